// As stream_products.h, for bfloat16 on AMX tiles, which have 16 rows of 64 bytes at most.
//
// Scores are keys, as they lie, times the queries in pairs of dims.  Sums of values are weights times the values in
// pairs of keys.  A weight is the sum of two bfloat16 numbers, and its rounding is that of 16 bits.

#pragma once

#include "stream.h"
#include "value_pairs.h"
#include "weight_pairs.h"

#define MAX_VECTORS(width) ((void)(width), 4)  // of values in a pass: so many tiles hold their sums
#define TILE 16  // rows
#define TILE_KEYS 32  // whose values are multiplied at a time

// As the compilers do not know that tiles read and write memory.
#define IN_ORDER() __asm__ volatile("" ::: "memory")

// Copies a row of queries, times the sign of scale, as row i of a tile.  q: [pair of dims][row][2]; row: memory for a
// row.
INLINE void put_query(int element, int width, const char* from, int dim, real scale, long i, real* row, real* q) {
    operand* pairs = (operand*)row;
    (void)element;
    copy_row(from, dim, DEPTH(dim), pairs);
    sign_row(pairs, dim, scale);
    for (long c = 0; c < DEPTH(dim); c += 2)
        memcpy((operand*)q + c * width + i * 2, pairs + c, 2 * sizeof *pairs);
}

// Shapes tiles 0 to 3 for sums of so many rows and columns, 4 and 5 for their rows of terms, 6 and 7 for columns.
INLINE void shape_tiles(int rows, int columns) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    UNROLLED for (int tile = 0; tile < 8; tile++) {
        shape.bytes[tile] = tile == 4 || tile == 5 ? 64 : 4 * columns;
        shape.rows[tile] = tile < 6 ? rows : TILE;
    }
    IN_ORDER();
    _tile_loadconfig(&shape);
}

// Where the numbers from byte `at` on of TILE keys from key j on lie, `stride` bytes apart: in `copy` if these are not
// all there side by side.
INLINE const char* key_tile(const struct block* block, int dim, long j, long at, int ahead, char* copy, long* stride) {
    const char *const *key = block->row + j, *near = key[block->near] + at * TILE;
    const long bytes = dim * sizeof(operand), rest = bytes - at;
    if (ahead && block->side_by_side)
        prefetch(near, 64 * TILE);
    else if (ahead)
        UNROLLED for (int i = 0; i < TILE; i++) prefetch(key[i + block->near] + at, 64);
    if (block->side_by_side && rest >= 64 && j + TILE <= block->count && key[TILE - 1] - key[0] == (TILE - 1) * bytes) {
        *stride = bytes;
        return key[0] + at;
    }
    const __mmask32 mask = rest < 64 ? (1u << rest / 2) - 1 : -1u;
    UNROLLED for (int i = 0; i < TILE; i++)
        _mm512_store_si512(copy + i * 64, _mm512_maskz_loadu_epi16(mask, key[i] + at));
    *stride = 64;
    return copy;
}

// The scores of the keys of a block.  ahead: whether to prefetch.
INLINE void stream_scores(int element, int width, int dim, const real* q, const struct block* block, int ahead,
                          real* score) {
    char copy[64 * TILE] __attribute__((aligned(64)));
    (void)element;
    shape_tiles(TILE, width);
    for (long j = 0; j < block->count; j += 4 * TILE) {
        const char *columns = (const char*)q, *from;
        long stride;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (long at = 0; at < dim * (long)sizeof(operand); at += 64, columns += 64 * width) {
            _tile_loadd(6, columns, 4 * width);
#define SCORES(n, rows)                                                  \
    from = key_tile(block, dim, j + n * TILE, at, ahead, copy, &stride); \
    IN_ORDER();                                                          \
    _tile_loadd(rows, from, stride);                                     \
    _tile_dpbf16ps(n, rows, 6);
            SCORES(0, 4)
            SCORES(1, 5)
            SCORES(2, 4)
            SCORES(3, 5)
        }
        _tile_stored(0, score + j * width, 4 * width);
        _tile_stored(1, score + (j + TILE) * width, 4 * width);
        _tile_stored(2, score + (j + 2 * TILE) * width, 4 * width);
        _tile_stored(3, score + (j + 3 * TILE) * width, 4 * width);
    }
    IN_ORDER();
}

// The parts of weights.  The lower one is not 0 where the upper is not: 0 times an infinite value would be NaN, and
// tiles take numbers below 2^-126 as 0.
INLINE vec upper(vec weight) { return (vec)((uvec)weight & 0xffff0000u); }
INLINE vec lower(vec weight) {
    return choose(upper(weight) > 0, larger(weight - upper(weight), splat(0x1p-126f)), weight);
}

// The numbers of two vectors in an order that makes pairs of them.
INLINE vec in_pairs(vec first, vec second, __m512i order) {
    return (vec)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}

// The weights of a block as `stream_columns` takes them, 0 beyond `count` keys: for each TILE_KEYS the upper parts of
// all rows, then the lower ones, [row][pair of keys].
INLINE const factor* factors_of(int width, long count, const real* weight, factor* memory) {
    const int both = width < LANES;                         // parts are in one tile
    const int pairs = both ? LANES / 2 / width : 1;         // of keys in a vector, or in two
    real* to = (real*)memory;
    __m512i order[LANES];
    for (int pair = 0; pair < pairs; pair++) {
        operand from[NUMBERS] __attribute__((aligned(64))) = {0};
        for (int i = 0; i < (1 + both) * width; i++) {
            from[2 * i] = i / width * LANES + pair * 2 * width + i % width;
            from[2 * i + 1] = from[2 * i] + width;
        }
        order[pair] = _mm512_load_si512(from);
    }
    for (long j = 0; j < count; j += TILE_KEYS) {
        vec high[LANES], low[LANES];
        UNROLLED for (int p = 0; p < LANES; p++) {
            const long key = j + p / pairs * pairs * 2;     // the first of the vector
            const vec first = key < count ? load(weight + key * width) : splat(0);
            const vec second = both || key + 1 >= count ? splat(0) : load(weight + (key + 1) * width);
            high[p] = in_pairs(upper(first), both ? lower(first) : upper(second), order[p % pairs]);
            low[p] = in_pairs(lower(first), lower(second), order[0]);
        }
        transpose(high);
        transpose(low);
        for (int i = 0; i < (1 + both) * width; i++, to += LANES)
            store(to, high[i]);
        for (int i = 0; i < width && !both; i++, to += LANES)
            store(to, low[i]);
    }
    return memory;
}

// The sums of 32 columns that unpacking has left in the order of its halves, added to acc.
INLINE void add_columns(vec low, vec high, real* acc) {
    store(acc, load(acc) + pick(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
    acc += LANES;
    store(acc, load(acc) + pick(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
}

// As in stream_products.h.
INLINE void stream_columns(int element, int width, int vectors, int rest, int dim, int from, const struct block* block,
                           int ahead, long first, long stop, const factor* weight, real* acc, long pitch) {
    const int bytes = sizeof(operand) * LANES, rows = width == LANES ? LANES : 2 * width;
    const char* const* value = block->row + block->behind;
    const int in_steps = block->side_by_side && vectors < dim / LANES;
    const char* near = value[first + block->near] + from * bytes * (stop - first);  // where prefetching goes on
    char columns[4][64 * TILE] __attribute__((aligned(64)));
    real sum[4][TILE * LANES] __attribute__((aligned(64)));
    (void)element;
    shape_tiles(rows, LANES);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    weight += first * width;
    for (long j = first; j < stop; j += TILE_KEYS, weight += TILE_KEYS * width) {
        for (int p = 0; p < TILE; p++) {
            const char *even = value[j + 2 * p], *odd = value[j + 2 * p + 1];
            if (ahead && in_steps)
                prefetch(near, 2 * vectors * bytes);
            else if (ahead) {
                prefetch(value[j + 2 * p + block->near] + from * bytes, vectors * bytes);
                prefetch(value[j + 2 * p + 1 + block->near] + from * bytes, vectors * bytes);
            }
            near += 2 * vectors * bytes;
            if (vectors == 1)
                _mm512_store_si512(columns[0] + p * 64, (__m512i)paired(even, odd, from * bytes, dim, rest));
            for (int n = 0; n + 1 < vectors; n += 2) {
                const __m512i a = _mm512_loadu_si512(even + (from + n) * bytes);
                const __m512i b = _mm512_loadu_si512(odd + (from + n) * bytes);
                _mm512_store_si512(columns[n] + p * 64, _mm512_unpacklo_epi16(a, b));
                _mm512_store_si512(columns[n + 1] + p * 64, _mm512_unpackhi_epi16(a, b));
            }
        }
        IN_ORDER();
        _tile_loadd(4, weight, 64);
        if (width == LANES)
            _tile_loadd(5, weight + LANES * LANES, 64);
#define SUM(n, of)                       \
    if (n < vectors) {                   \
        _tile_loadd(of, columns[n], 64); \
        _tile_dpbf16ps(n, 4, of);        \
        if (width == LANES)              \
            _tile_dpbf16ps(n, 5, of);    \
    }
        SUM(0, 6)
        SUM(1, 7)
        SUM(2, 6)
        SUM(3, 7)
        IN_ORDER();
    }
    _tile_stored(0, sum[0], 64);
    _tile_stored(1, sum[1], 64);
    _tile_stored(2, sum[2], 64);
    _tile_stored(3, sum[3], 64);
    IN_ORDER();
    for (int i = 0; i < width; i++) {
        real* to = acc + i * pitch + from * LANES;
        vec each[4];
        for (int n = 0; n < vectors; n++) {
            each[n] = load(sum[n] + i * LANES);
            if (width < LANES)
                each[n] += load(sum[n] + (width + i) * LANES);
        }
        if (vectors == 1)
            store(to, load(to) + each[0]);
        for (int n = 0; n + 1 < vectors; n += 2)
            add_columns(each[n], each[n + 1], to + n * LANES);
    }
}
