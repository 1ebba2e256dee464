// As stream_products.h, for bfloat16: products of pairs of numbers.
//
// Scores take pairs along a row, as they lie; sums of values take those of two keys, whose weights become bfloat16 too.

#pragma once

#include "pack_pairs.h"
#include "stream.h"
#include "value_pairs.h"
#include "weight_pairs.h"

#define SUMS 16  // that stay in registers
#define MAX_VECTORS(width) min(SUMS / (width), 8)  // of values in a pass

// Copies a row of queries, times the sign of scale, as row i of a tile.  q: [vector][row][NUMBERS]; row: memory for a
// row.
INLINE void put_query(int element, int width, const char* from, int dim, real scale, long i, real* row, real* q) {
    operand* pairs = (operand*)row;
    (void)element;
    copy_row(from, dim, DEPTH(dim), pairs);
    sign_row(pairs, dim, scale);
    for (long c = 0; c < dim; c += NUMBERS)
        memcpy((operand*)q + c * width + i * NUMBERS, pairs + c, NUMBERS * sizeof *pairs);
}

// The scores of the keys of a block.  ahead: whether to prefetch.
INLINE void stream_scores(int element, int width, int dim, const real* q, const struct block* block, int ahead,
                          real* score) {
    const int keys = LANES / width, few = keys < GROUP ? keys : GROUP;
    const long stride = block->side_by_side ? few : 1;
    const __mmask32 rest = (1u << dim % NUMBERS) - 1;
    (void)element;
    for (long j = 0; j < block->count; j += keys) {
        __m512 sum[LANES];
        UNROLLED for (int i = 0; i < LANES; i++) sum[i] = (__m512){0};
        UNROLLED for (int first = 0; first < keys; first += few) {
            const char *const *key = block->row + j + first, *near[LANES];
            UNROLLED for (int n = 0; n < few; n++) near[n] =
                block->side_by_side ? key[block->near] + n * 64 : key[block->near + n];
            const char* row = (const char*)q;
            __m512* of_keys = sum + first * width;
            for (long at = 0; at < dim / NUMBERS * 64; at += 64, row += width * 64)
                UNROLLED for (int n = 0; n < few; n++) {
                    const __m512bh numbers = (__m512bh)_mm512_loadu_si512(key[n] + at);
                    if (ahead)
                        prefetch(near[n] + at * stride, 64);
                    UNROLLED for (int i = 0; i < width; i++) of_keys[n * width + i] =
                        _mm512_dpbf16_ps(of_keys[n * width + i], (__m512bh)_mm512_load_si512(row + i * 64), numbers);
                }
            if (rest)
                UNROLLED for (int n = 0; n < few; n++) {
                    const __m512bh numbers = (__m512bh)_mm512_maskz_loadu_epi16(rest, key[n] + dim / NUMBERS * 64);
                    UNROLLED for (int i = 0; i < width; i++) of_keys[n * width + i] =
                        _mm512_dpbf16_ps(of_keys[n * width + i], (__m512bh)_mm512_load_si512(row + i * 64), numbers);
                }
        }
        store(score + j * width, sums_of((vec*)sum));
    }
}

// The weights of a block as `stream_columns` takes them: [pair of keys][row], 0 beyond `count` keys.
INLINE const factor* factors_of(int width, long count, const real* weight, factor* memory) {
    const long vectors = (count * width + LANES - 1) / LANES;
    operand from[NUMBERS] __attribute__((aligned(64)));
    UNROLLED for (int lane = 0; lane < LANES; lane++) {
        from[2 * lane] = lane / width * 2 * width + lane % width;
        from[2 * lane + 1] = from[2 * lane] + width;
    }
    const __m512i lanes = _mm512_load_si512(from);
    for (long n = 0; n < vectors; n += 2) {
        const vec even = load(weight + n * LANES), odd = n + 1 < vectors ? load(weight + (n + 1) * LANES) : splat(0);
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
        _mm512_storeu_si512(memory + n / 2 * LANES, _mm512_permutexvar_epi16(lanes, both));
    }
    return memory;
}

// As in stream_products.h.
INLINE void stream_columns(int element, int width, int vectors, int rest, int dim, int from, const struct block* block,
                           int ahead, long first, long stop, const factor* weight, real* acc, long pitch) {
    (void)element;
    const int bytes = sizeof(operand) * LANES;
    const char* const* value = block->row + block->behind;
    const int in_steps = block->side_by_side && vectors < dim / LANES;
    const char* near = value[first + block->near] + from * bytes * (stop - first);  // where prefetching goes on
    __m512 sum[LANES * 8];
    UNROLLED for (int i = 0; i < width * vectors; i++) sum[i] = (__m512){0};
    weight += first / 2 * width;
    for (long j = first; j < stop; j += 2, weight += width) {
        __m512bh numbers[8];
        if (ahead && in_steps)
            prefetch(near, 2 * vectors * bytes);
        else if (ahead) {
            prefetch(value[j + block->near] + from * bytes, vectors * bytes);
            prefetch(value[j + 1 + block->near] + from * bytes, vectors * bytes);
        }
        near += 2 * vectors * bytes;
        UNROLLED for (int n = 0; n < vectors; n++) numbers[n] =
            paired(value[j], value[j + 1], (from + n) * bytes, dim, rest);
        UNROLLED for (int i = 0; i < width; i++) {
            const __m512bh each = (__m512bh)_mm512_set1_epi32(weight[i]);
            UNROLLED for (int n = 0; n < vectors; n++) sum[i * vectors + n] =
                _mm512_dpbf16_ps(sum[i * vectors + n], each, numbers[n]);
        }
    }
    UNROLLED for (int i = 0; i < width; i++) UNROLLED for (int n = 0; n < vectors; n++) {
        real* to = acc + i * pitch + (from + n) * LANES;
        store(to, load(to) + (vec)sum[i * vectors + n]);
    }
}
