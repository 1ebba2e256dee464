// What products of bfloat16 have in common in decoding, above all values in pairs of two keys.

#pragma once

#include "pack_pairs.h"

#define NUMBERS 32  // of a vector of pairs

typedef int32_t factor;  // the weights of two keys

// Bytes that a product takes of a row.
INLINE int product_bytes(int element) {
    (void)element;
    return NUMBERS * sizeof(operand);
}

// What of the scale `put_query` leaves to be multiplied.
INLINE real scale_of_scores(real scale) { return scale_left(scale); }

// LANES values of two keys as pairs; of the last ones of a row as widened_rest has them.
INLINE __m512bh paired(const char* even, const char* odd, long at, int dim, int rest) {
    const __m512i lanes = (__m512i)(operand __attribute__((vector_size(64)))){
        0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    __mmask16 mask = -1;
    if (rest && dim < LANES)
        mask = (1u << dim) - 1;
    else if (rest)
        mask <<= LANES - dim % LANES, at = (dim - LANES) * sizeof(operand);
    const __m256i a =
        rest ? _mm256_maskz_loadu_epi16(mask, even + at) : _mm256_loadu_si256((const __m256i*)(even + at));
    const __m256i b = rest ? _mm256_maskz_loadu_epi16(mask, odd + at) : _mm256_loadu_si256((const __m256i*)(odd + at));
    return (__m512bh)_mm512_permutex2var_epi16(_mm512_castsi256_si512(a), lanes, _mm512_castsi256_si512(b));
}
