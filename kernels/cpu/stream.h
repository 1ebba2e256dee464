// Products with keys and values where they lie, each read once for all rows of a tile.
//
// A tile has `width` rows, a power of two up to LANES.  A vector of scores or weights holds all its rows for
// LANES / width keys: [key][row].

#pragma once

#include "element.h"
#include "rows.h"

#define BLOCK_KEYS 32           // at most
#define BLOCK_BYTES 16384       // of keys and values, about, which are prefetched while as many are multiplied
#define FEW 2                   // rows, whose scores take so little time that nothing is prefetched meanwhile

#if VBYTES == 64
#define SUMS 16                 // that stay in registers
#else
#define SUMS 8
#endif

struct block {                                          // of keys; beyond `count` the addresses are of zeros
    long first, count;
    const char *key[BLOCK_KEYS], *value[BLOCK_KEYS];
};

INLINE void prefetch(const char* row, long bytes) {
    for (long at = 0; at < bytes; at += 64)
        __builtin_prefetch(row + at, 0, 3);
}

// Vectors of a row.
INLINE long vectors_of(long dim) { return (dim + LANES - 1) / LANES; }

// Where number c of a row is in its vectors: the last one ends with the row (widened_rest).
INLINE long streamed(long c, long dim) { return dim > LANES && c >= dim / LANES * LANES ? c + LANES - dim % LANES : c; }

// The scores of the keys of a block.  q: [vector][row][LANES].
INLINE void stream_scores(int element, int width, int dim, const real* q, const struct block* block, real* score) {
    const int keys = LANES / width, bytes = element_bytes[element] * LANES, full = dim / LANES;
    for (long j = 0; j < block->count; j += keys) {
        const char* key[LANES];
        vec sum[LANES];
        UNROLLED for (int n = 0; n < keys; n++) key[n] = block->key[j + n];
        UNROLLED for (int i = 0; i < LANES; i++) sum[i] = splat(0);
        const real* row = q;
        for (long at = 0; at < full * bytes; at += bytes, row += width * LANES)
            UNROLLED for (int n = 0; n < keys; n++) {
                const vec numbers = widened(element, key[n] + at);
                if (width > FEW && (bytes >= 64 || at % 64 == 0))
                    __builtin_prefetch(block->value[j + n] + at, 0, 3);
                UNROLLED for (int i = 0; i < width; i++) sum[n * width + i] += load(row + i * LANES) * numbers;
            }
        if (dim % LANES)
            UNROLLED for (int n = 0; n < keys; n++) {
                const vec numbers = widened_rest(element, key[n], dim);
                UNROLLED for (int i = 0; i < width; i++) sum[n * width + i] += load(row + i * LANES) * numbers;
            }
        store(score + j * width, sums_of(sum));
    }
}

// acc[i] = acc[i] * decay[i] + the sum of the values by their weights, of `vectors` vectors from number `from` on.
// next: the block to prefetch; NULL for none.
INLINE void stream_columns(int element, int width, int vectors, int rest, int dim, int from, const struct block* block,
                           const struct block* next, long ahead, long ahead_bytes, const real* weight,
                           const real* decay, real* acc, long pitch) {
    const int bytes = element_bytes[element] * LANES;
    vec sum[LANES * 8];
    UNROLLED for (int i = 0; i < width * vectors; i++) sum[i] = splat(0);
    for (long j = 0; j < block->count; j++, weight += width) {
        vec numbers[8];
        if (next)
            prefetch(next->key[j] + ahead, ahead_bytes);
        if (next && width <= FEW)
            prefetch(next->value[j] + ahead, ahead_bytes);
        UNROLLED for (int n = 0; n < vectors; n++) numbers[n] =
            rest ? widened_rest(element, block->value[j], dim) : widened(element, block->value[j] + (from + n) * bytes);
        UNROLLED for (int i = 0; i < width; i++) {
            const real factor = weight[i];
            UNROLLED for (int n = 0; n < vectors; n++) sum[i * vectors + n] += factor * numbers[n];
        }
    }
    UNROLLED for (int i = 0; i < width; i++) UNROLLED for (int n = 0; n < vectors; n++) {
        real* to = acc + i * pitch + (from + n) * LANES;
        store(to, load(to) * decay[i] + sum[i * vectors + n]);
    }
}

// A pass over a block for so many vectors of its values at a time, as often as there are so many.
#define PASSES(vectors)                                                                              \
    if (width * (vectors) <= SUMS)                                                                   \
        for (; from + (vectors) <= full; from += (vectors))                                          \
    stream_columns(element, width, vectors, 0, dim, from, block, next, (long)key_bytes* from / full, \
                   (long)key_bytes * (vectors) / full, weight, decay, acc, pitch)

INLINE void stream_values(int element, int width, int dim, const struct block* block, const struct block* next,
                          int key_bytes, const real* weight, const real* decay, real* acc, long pitch) {
    const int full = dim / LANES;
    int from = 0;
    PASSES(8);
    PASSES(4);
    PASSES(2);
    PASSES(1);
    if (dim % LANES)
        stream_columns(element, width, 1, 1, dim, from, block, 0, 0, 0, weight, decay, acc, pitch);
}
