// Products with keys and values where they lie, each read once for all rows of a tile.
//
// A tile has `width` rows, a power of two up to LANES.  A vector of scores or weights holds all its rows for
// LANES / width keys: [key][row].

#pragma once

#include "element.h"
#include "rows.h"

#define BLOCK_KEYS 64

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
        __builtin_prefetch(row + at, 0, 2);
}

// Vectors of a row.
INLINE long vectors_of(long dim) { return (dim + LANES - 1) / LANES; }

// Where number c of a row is in its vectors: the last one ends with the row (widened_rest).
INLINE long streamed(long c, long dim) { return dim > LANES && c >= dim / LANES * LANES ? c + LANES - dim % LANES : c; }

// The scores of the keys of a block.  q: [vector][row][LANES].
INLINE void stream_scores(int element, int width, int dim, int value_bytes, const real* q, const struct block* block,
                          real* score) {
    const int keys = LANES / width, bytes = element_bytes[element] * LANES, full = dim / LANES;
    for (long j = 0; j < block->count; j += keys) {
        const char* key[LANES];
        vec sum[LANES];
        UNROLLED for (int n = 0; n < keys; n++) key[n] = block->key[j + n];
        UNROLLED for (int i = 0; i < LANES; i++) sum[i] = splat(0);
        for (int n = 0; n < keys; n++)
            prefetch(block->value[j + n], value_bytes);
        const real* row = q;
        for (long at = 0; at < full * bytes; at += bytes, row += width * LANES)
            UNROLLED for (int n = 0; n < keys; n++) {
                const vec numbers = widened(element, key[n] + at);
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
// next: the block whose keys are prefetched; NULL for none.
INLINE void stream_columns(int element, int width, int vectors, int rest, int dim, int from, const struct block* block,
                           const struct block* next, int key_bytes, const real* weight, const real* decay, real* acc,
                           long pitch) {
    const int bytes = element_bytes[element] * LANES;
    vec sum[SUMS];
    UNROLLED for (int i = 0; i < width * vectors; i++) sum[i] = splat(0);
    for (long j = 0; j < block->count; j++, weight += width) {
        vec numbers[SUMS];
        if (next)
            prefetch(next->key[j], key_bytes);
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

INLINE void stream_values(int element, int width, int dim, const struct block* block, const struct block* next,
                          int key_bytes, const real* weight, const real* decay, real* acc, long pitch) {
    const int most_vectors = SUMS / width < 8 ? SUMS / width : 8, full = dim / LANES;
    int from = 0;
    for (; from + most_vectors <= full; from += most_vectors)
        stream_columns(element, width, most_vectors, 0, dim, from, block, from ? 0 : next, key_bytes, weight, decay,
                       acc, pitch);
    for (; from < full; from++)
        stream_columns(element, width, 1, 0, dim, from, block, 0, 0, weight, decay, acc, pitch);
    if (dim % LANES)
        stream_columns(element, width, 1, 1, dim, from, block, 0, 0, weight, decay, acc, pitch);
}
