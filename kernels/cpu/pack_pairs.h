// Copies of a tile's bfloat16 numbers in the order in which the micro-kernel of pairs reads them:
//
//     columns of a product, by key   [tile of NR keys][pair of dims][NR][2]
//     columns of a product, by dim   [tile of NR dims][pair of keys, pitch / 2 of them][NR][2]
//     key rows of a product              [panel of MR rows][DEPTH(dim)]
//
// What is not finite is left out as in pack.h.

#pragma once

#include "product_pairs.h"
#include "scratch.h"

INLINE real real_of(operand number) { return from_bfloat16(number); }

INLINE int finite_row_of_pairs(const operand* row, long n) {
    int odd = 0;
    for (long i = 0; i < n; i++)
        odd |= (row[i] & 0x7f80) == 0x7f80;
    return !odd;
}

// `dim` numbers, and zeros up to `depth`.
INLINE void copy_row(const char* from, int dim, long depth, operand* to) {
    memcpy(to, from, dim * sizeof(operand));
    memset(to + dim, 0, (depth - dim) * sizeof(operand));
}

// from[i * step] for 16 i
INLINE __m512i gathered(const int* from, int step) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_i32gather_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(step)), from, 4);
}

// NR rows of `pairs` pairs each, in the order of these: [pair][NR].
INLINE void turn(const operand* row, long pairs, operand* to) {
    for (long pair = 0; pair < pairs; pair++)
        for (int half = 0; half < 2; half++)
            _mm512_store_si512(to + (pair * 2 + half) * 32,
                               gathered((const int*)row + half * 16 * pairs + pair, pairs));
}

// NR rows of `pairs` pairs each, in the order of their dims, `pitch` numbers apart.
INLINE void turn_apart(const operand* row, long pairs, operand* to, long pitch) {
    for (long pair = 0; pair < pairs; pair++, to += 2 * pitch)
        for (int half = 0; half < 2; half++) {
            const __m512i both = gathered((const int*)row + half * 16 * pairs + pair, pairs);
            _mm256_store_si256((__m256i*)(to + half * 16), _mm512_cvtepi32_epi16(both));
            _mm256_store_si256((__m256i*)(to + pitch + half * 16), _mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
        }
}

// Two rows as pairs: place is that of their first NR numbers, `pitch` rows before that of the next.
INLINE void interleave(const operand* even, const operand* odd, long depth, long pitch, operand* place) {
    for (long c = 0; c < depth; c += NR)
        for (int i = 0; i < NR; i++) {
            const uint32_t pair = even[c + i] | (uint32_t)odd[c + i] << 16;
            memcpy(place + c * pitch + 2 * i, &pair, sizeof pair);
        }
}

// Keys [first, first + count) of a KV head, or those that `key` lists: by key if by_key is given, by dim if by_dim is.
// row: NR * DEPTH(dim).
static void pack_keys(const struct launch* of, const struct array* array, int kv_head, int dim, long first, long count,
                      operand* row, operand* by_key, operand* by_dim, long pitch, struct odd* odd, const int32_t* key) {
    const char* from = kv_rows(of, array, kv_head) + first * array->token;
    const long depth = DEPTH(dim);
    if (odd)
        odd->count = 0;
    for (long tile = 0; tile < count; tile += NR) {
        const int keys = min(count - tile, NR);
        for (int i = 0; i < keys; i++) {
            const long at = tile + i, later = at + AHEAD_ROWS;
            if (later < count)
                prefetch_row(from + (key ? key[later] : later) * array->token, dim * sizeof(operand));
            copy_row(from + (key ? key[at] : at) * array->token, dim, depth, row + i * depth);
        }
        memset(row + keys * depth, 0, (NR - keys) * depth * sizeof(operand));
        if (by_key)
            turn(row, depth / 2, by_key + tile * depth);
        if (by_dim) {
            for (int i = 0; i < keys; i++)
                if (!finite_row_of_pairs(row + i * depth, dim)) {
                    odd->row[odd->count++] = tile + i;
                    memset(row + i * depth, 0, depth * sizeof(operand));
                }
            for (int i = 0; i < NR; i += 2)
                interleave(row + i * depth, row + (i + 1) * depth, depth, pitch, by_dim + (tile + i) * NR);
        }
    }
}

#define SLACK 0

// What of the scale the packed rows leave to be multiplied.
INLINE real scale_left(real scale) { return scale == 0 ? 1 : scale < 0 ? -scale : scale; }

// Multiplies numbers by the sign of factor, 0 too, which rounds nothing.
INLINE void sign_row(operand* row, long n, real factor) {
    if (factor < 0)
        for (long i = 0; i < n; i++)
            row[i] ^= 0x8000;
    else if (factor == 0)
        for (long i = 0; i < n; i++)
            row[i] = (row[i] & 0x7f80) == 0x7f80 ? 0x7fc0 : 0;      // 0 times what is not finite is NaN
}

// The rows of a tile times the sign of factor: in panels, and by dim if by_dim is given,
// [DEPTH(dim)][pitch].  row: NR * DEPTH(dim).
static void pack_rows(const struct launch* of, const struct array* array, int dim, const struct rows* rows, real factor,
                      operand* row, operand* panels, operand* by_dim, long pitch, struct odd* odd) {
    const long depth = DEPTH(dim);
    (void)of;
    if (odd)
        odd->count = 0;
    for (long first = 0; first < rows->count; first += MR) {
        const int count = min(rows->count - first, MR);
        operand* panel = panels + first * depth;
        for (int i = 0; i < count; i++) {
            prefetch_row_at(rows, array, first + i, dim * sizeof(operand));
            copy_row(row_at(rows, array, first + i), dim, depth, panel + i * depth);
        }
        memset(panel + count * depth, 0, (MR - count) * depth * sizeof(operand));
        sign_row(panel, count * depth, factor);
        if (by_dim) {
            memcpy(row, panel, MR * depth * sizeof(operand));
            for (int i = 0; i < count; i++)
                if (!finite_row_of_pairs(row + i * depth, dim)) {
                    odd->row[odd->count++] = first + i;
                    memset(row + i * depth, 0, depth * sizeof(operand));
                }
            turn_apart(row, depth / 2, by_dim + first, pitch);
        }
    }
}
