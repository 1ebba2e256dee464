// Packed rows, the keys that a row sees, and the tiles of keys that a thread block has to process.
//
// The query heads of a KV head are packed: row r of a KV head is token r / HEADS_PER_KV of its query head r %
// HEADS_PER_KV.  These heads share keys and values, so they can share a tile of rows.  With many heads, even one token
// fills a tile.

#pragma once

#include "tile.cuh"

// The keys [begin, end), numbered within the chunk.
struct Interval {
    int begin, end;

    __device__ __forceinline__ bool sees(int key) const { return begin <= key && key < end; }
};

// The intervals of the tokens of one group of heads.
struct Intervals {
    const int* begin;
    const int* end;

    __device__ __forceinline__ Intervals(const int* begins, const int* ends, int group, int tokens)
        : begin(begins + (long long)group * tokens), end(ends + (long long)group * tokens) {}
    __device__ __forceinline__ Interval of(int token) const { return {begin[token], end[token]}; }
};

// The hull of several rows: no row sees a key outside [lo, hi), and every row sees all of [full_from, full_to).
struct Hull {
    int lo, hi, full_from, full_to;

    __device__ __forceinline__ bool empty() const { return lo >= hi; }
    __device__ __forceinline__ bool touches(int first, int last) const { return lo < last && hi > first; }
    __device__ __forceinline__ bool covers(int first, int last) const { return full_from <= first && last <= full_to; }
    // With a bias or dropout the first key is even, so that what two neighbouring columns have is read at once.
    __device__ __forceinline__ void begin_even() {
#if BIAS || DROPOUT
        lo &= ~1;
#endif
    }
    // Leaves out the keys outside [first, last).
    __device__ __forceinline__ void cut(int first, int last) {
        lo = max(lo, first), hi = min(hi, last), full_to = min(full_to, last);
    }
};

constexpr int NO_KEY = 0x7fffffff;

// The work of a thread block: tile number `tile` of `rows` rows, of the `count` rows of KV head `kv_head`.  Tiles and
// KV heads share the grid's first dimension, because the others are limited to 65535.  The blocks of a KV head are
// consecutive, because they share its data in the cache.
struct Share {
    int tiles, tile, kv_head;

    __device__ __forceinline__ Share(int count, int rows)
        : tiles((count + rows - 1) / rows), tile(blockIdx.x % unsigned(tiles)), kv_head(blockIdx.x / unsigned(tiles)) {}
};

// The hull of the tokens [first, last).  Every warp computes it independently.
__device__ __forceinline__ Hull hull_of(const Intervals& intervals, int first, int last) {
    Hull hull = {NO_KEY, 0, 0, NO_KEY};
    for (int token = first + lane_index(); token < last; token += 32) {
        const Interval keys = intervals.of(token);
        if (keys.begin < keys.end) {
            hull.lo = min(hull.lo, keys.begin);
            hull.hi = max(hull.hi, keys.end);
        }
        hull.full_from = max(hull.full_from, keys.begin);
        hull.full_to = min(hull.full_to, keys.end);
    }
#pragma unroll
    for (int mask = 16; mask; mask /= 2) {
        hull.lo = min(hull.lo, __shfl_xor_sync(ALL_LANES, hull.lo, mask));
        hull.hi = max(hull.hi, __shfl_xor_sync(ALL_LANES, hull.hi, mask));
        hull.full_from = max(hull.full_from, __shfl_xor_sync(ALL_LANES, hull.full_from, mask));
        hull.full_to = min(hull.full_to, __shfl_xor_sync(ALL_LANES, hull.full_to, mask));
    }
    return hull;
}

// The packed rows of one KV head of a chunk.
struct Rows {
    int count, heads, first_head;                  // packed rows; all query heads; first query head of this KV head

    __device__ __forceinline__ Rows(int tokens, int kv_heads, int kv_head)
        : count(tokens * HEADS_PER_KV), heads(kv_heads * HEADS_PER_KV), first_head(kv_head * HEADS_PER_KV) {}
    static __device__ __forceinline__ int token(int row) { return row / HEADS_PER_KV; }
    // Index of the row's (token, head) in an array (tokens, heads).
    __device__ __forceinline__ long long index(int row) const {
        return (long long)token(row) * heads + first_head + row % HEADS_PER_KV;
    }
    // Index of the row's first element in an array (tokens, heads, DIM); negative if there is no such row.
    template <int DIM>
    __device__ __forceinline__ long long start(int row) const {
        return row < count ? index(row) * DIM : -1;
    }
    // Fills a tile with the rows of such an array from `first` on, and with zeros for rows from `count` on.
    template <class Tile, int DIM, int THREADS>
    __device__ __forceinline__ void copy(unsigned base, const typename Tile::Type* source, int first) const {
        if constexpr (HEADS_PER_KV == 1)
            copy_rows_apart<Tile, DIM, THREADS>(base, source + first_head * DIM, heads * DIM, first, count);
        else
            copy_rows<Tile, DIM, THREADS>(base, source, [&](int i) { return start<DIM>(first + i); });
    }
};

// Index of the first element of token j of a KV head in an array (tokens, kv_heads, DIM); negative outside the chunk.
template <int DIM>
__device__ __forceinline__ long long key_start(int j, int keys, int kv_heads, int kv_head) {
    return j < keys ? ((long long)j * kv_heads + kv_head) * DIM : -1;
}
