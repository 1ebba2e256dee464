// Where the keys and values of a KV head lie: with -DPAGE_SIZE=0 in a chunk, (keys, kv_heads, DIM), else in a pool of pages,
// (kv_heads, slots, DIM), which a sequence's table of pages tells: page pages[i] is the PAGE_SIZE slots from pages[i] * PAGE_SIZE on.

#pragma once

#include "rows.cuh"

struct Keys {
    const int* pages;
    int count, slots, kv_heads, kv_head;

    // Of key j; negative from `count` on.
    template <int DIM>
    __device__ __forceinline__ long long start(int j) const {
#if PAGE_SIZE
        if (j >= count)
            return -1;
        const int slot = pages[j / PAGE_SIZE] * PAGE_SIZE + j % PAGE_SIZE;
        return ((long long)kv_head * slots + slot) * DIM;
#else
        return key_start<DIM>(j, count, kv_heads, kv_head);
#endif
    }
};
