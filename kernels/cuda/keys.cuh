// Addresses of the keys and values of a KV head, and their copies into tiles.
//
// With -DPAGE_SIZE=0 they lie in a chunk (keys, kv_heads, DIM).  Else they lie in a pool of pages (kv_heads, slots,
// DIM): page i of a sequence is the PAGE_SIZE slots from pages[i] * PAGE_SIZE on.

#pragma once

#include "tile.cuh"

struct Keys {
    const int* pages;
    int count, slots, kv_heads, kv_head;

    // Fills a tile with the keys from `first` on, and with zeros from `count` on.
    template <class Tile, int DIM, int THREADS>
    __device__ __forceinline__ void copy(unsigned base, const typename Tile::Type* source, int first) const {
#if PAGE_SIZE
        // Each lane looks up the slot of one row that its warp copies; the lanes that copy the row get it by a shuffle.
        using Of = Copies<Tile, THREADS>;
        constexpr int ROWS = 32 / Of::LANES;                         // that a warp copies at a time
        const Of copies(base, thread_index_anew());
        const int lane = lane_index();
#pragma unroll
        for (int ahead = 0; ahead < Of::TIMES; ahead += Of::LANES) {
            const int j = first + (ahead + lane / ROWS) * Of::STEP + warp_index() * ROWS + lane % ROWS;
            const int looked_up = j < count ? pages[j / PAGE_SIZE] * PAGE_SIZE + j % PAGE_SIZE : -1;
#pragma unroll
            for (int i = ahead; i < Of::TIMES && i < ahead + Of::LANES; ++i) {
                const int slot = __shfl_sync(ALL_LANES, looked_up, (i - ahead) * ROWS + lane / Of::LANES);
                copies.template copy<DIM>(i, source + ((long long)kv_head * slots + slot) * DIM + copies.column,
                                          slot >= 0);
            }
        }
#else
        copy_rows_apart<Tile, DIM, THREADS>(base, source + kv_head * DIM, kv_heads * DIM, first, count);
#endif
    }
};
