// The products of decoding, compiled for each element of the inputs and each width of a tile.

#pragma once

#ifdef __AMX_BF16__
#include "stream_tiles.h"
#elif defined(__AVX512BF16__)
#include "stream_pairs.h"
#else
#include "stream_products.h"
#endif

// Sets how a block is read with a tile of so many rows: in which steps, and how far ahead it is prefetched.
INLINE void set_ahead(const struct launch* of, int width, struct block* block) {
    const int element = element_bytes[of->element];
    const long key = of->head_dim * element, value = of->value_dim * element;
    const long products = width * 64 / product_bytes(of->element);  // with a line
    const long near = NEAR_BYTES + min(max(products, 2), NEAR_PRODUCTS) * NEAR_BYTES_PRODUCT;
    block->step = STEP_ROWS;
    while (block->step > MIN_STEP && block->step * value > STEP_BYTES)
        block->step /= 2;
    block->near = min(max(near / max(key, value), block->step), NEAR_ROWS);
    block->side_by_side = of->k.token == key && of->v.token == value && of->page_size >= SIDE_BY_SIDE;
}

// A pass over keys for so many vectors of their values at a time, as often as there are so many.
#define PASSES(vectors)                                     \
    if ((vectors) <= MAX_VECTORS(width))                    \
        for (; from + (vectors) <= full; from += (vectors)) \
    stream_columns(element, width, vectors, 0, dim, from, block, ahead, first, stop, factors, acc, pitch)

// Adds the values of a block by their weights to acc.  ahead: whether to prefetch.
INLINE void stream_values(int element, int width, int dim, const struct block* block, int ahead, const real* weight,
                          real* acc, long pitch) {
    factor memory[BLOCK_KEYS * LANES] __attribute__((aligned(64)));
    const factor* factors = factors_of(width, block->count, weight, memory);
    const int full = dim / LANES;
    const int once = full <= MAX_VECTORS(width) && !(full & (full - 1));  // whether a pass takes whole rows
    const long step = once ? BLOCK_KEYS : block->step;
    for (long first = 0; first < block->count; first += step) {
        const long stop = min(first + step, block->count);
        int from = 0;
        PASSES(8);
        PASSES(4);
        PASSES(2);
        PASSES(1);
        if (dim % LANES)
            stream_columns(element, width, 1, 1, dim, from, block, 0, first, stop, factors, acc, pitch);
    }
}

struct streams {
    void (*scores)(int dim, const real* q, const struct block* block, int ahead, real* score);
    void (*values)(int dim, const struct block* block, int ahead, const real* weight, real* acc, long pitch);
};

#define STREAMS(element, width)                                                                               \
    static void scores_##element##_##width(int dim, const real* q, const struct block* block, int ahead,      \
                                           real* score) {                                                     \
        stream_scores(element, width, dim, q, block, ahead, score);                                           \
    }                                                                                                         \
    static void values_##element##_##width(int dim, const struct block* block, int ahead, const real* weight, \
                                           real* acc, long pitch) {                                           \
        stream_values(element, width, dim, block, ahead, weight, acc, pitch);                                 \
    }
#define NAMES(element, width) {scores_##element##_##width, values_##element##_##width},

#if VBYTES / REAL_BYTES >= 16
#define WIDTHS(each, element) each(element, 1) each(element, 2) each(element, 4) each(element, 8) each(element, 16)
#elif VBYTES / REAL_BYTES >= 8
#define WIDTHS(each, element) each(element, 1) each(element, 2) each(element, 4) each(element, 8)
#elif VBYTES / REAL_BYTES >= 4
#define WIDTHS(each, element) each(element, 1) each(element, 2) each(element, 4)
#else
#define WIDTHS(each, element) each(element, 1) each(element, 2)
#endif

#if REAL_BYTES == 8
WIDTHS(STREAMS, FLOAT64)
#elif defined(__AVX512BF16__)
WIDTHS(STREAMS, BFLOAT16)
#else
WIDTHS(STREAMS, FLOAT32)
WIDTHS(STREAMS, FLOAT16)
WIDTHS(STREAMS, BFLOAT16)
#endif

// By element, and by the logarithm of the width.
static const struct streams streams[][5] = {
#if REAL_BYTES == 8
    [FLOAT64] = {WIDTHS(NAMES, FLOAT64)},
#elif defined(__AVX512BF16__)
    [BFLOAT16] = {WIDTHS(NAMES, BFLOAT16)},
#else
    [FLOAT32] = {WIDTHS(NAMES, FLOAT32)},
    [FLOAT16] = {WIDTHS(NAMES, FLOAT16)},
    [BFLOAT16] = {WIDTHS(NAMES, BFLOAT16)},
#endif
};
