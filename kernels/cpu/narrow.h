// Partials as halves, rounded to the nearest, of two as near to the even one: NumPy does it element by element.

#pragma once

#include "partials.h"

#if REAL_BYTES == 4

typedef uint16_t halves __attribute__((vector_size(VBYTES / 2)));
typedef uint16_t loose_halves __attribute__((vector_size(VBYTES / 2), aligned(2), may_alias));
typedef uint32_t bits __attribute__((vector_size(VBYTES)));

// The upper half of the sum carries what rounds up.  A NaN has no other bits than its sign, as in ml_dtypes.
INLINE bits to_bfloat16(vec x) {
    const bits wide = (bits)x, rounded = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
    const bits nan = (wide >> 16 & 0x8000) | 0x7fc0;
    return (bits)choose(x == x, (vec)rounded, (vec)nan);
}

#if !defined(__AVX2__) && !__ARM_FEATURE_SVE_BITS
// Numbers below 2^-14 are rounded by a sum: 0.5 has what 2^-24, the step of float16 there, as its last bit.
INLINE bits to_float16(vec x) {
    const bits sign = (bits)x & 0x80000000, size = (bits)x ^ sign;
    const bits usual = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;  // the exponent's bias, from 127 to 15
    const bits small = (bits)((vec)size + 0.5f) - 0x3f000000, nan = (size >> 13 & 0x3ff) | 0x7e00;
    vec half = choose((ivec)(size < 0x38800000), (vec)small, (vec)usual);
    half = choose((ivec)(size >= 0x47800000), (vec)(bits)(ivec)(size * 0 + 0x7c00), half);
    half = choose(x == x, half, (vec)nan);
    return (bits)half | sign >> 16;
}
#endif

// LANES numbers as halves, to any address.
INLINE void put_halves(int element, vec x, uint16_t* to) {
#if defined(__AVX512F__)
    *(loose_halves*)to = element == BFLOAT16 ? (halves)_mm512_cvtepi32_epi16((__m512i)to_bfloat16(x))
                                             : (halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
    *(loose_halves*)to = element == BFLOAT16 ? __builtin_convertvector(to_bfloat16(x), halves)
                                             : (halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif __ARM_FEATURE_SVE_BITS
    const svuint32_t rounded = to_bfloat16(x);
    const svuint32_t cast = svreinterpret_u32(svcvt_f16_f32_x(svptrue_b8(), x));
    svst1h(svptrue_b8(), to, element == BFLOAT16 ? rounded : cast);
#else
    *(loose_halves*)to = __builtin_convertvector(element == BFLOAT16 ? to_bfloat16(x) : to_float16(x), halves);
#endif
}

INLINE void narrow_numbers(int element, const real* from, uint16_t* to, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        put_halves(element, *(const loose_vec*)(from + i), to + i);
    if (i < n) {
        vec rest = splat(0);
        uint16_t half[LANES];
        memcpy(&rest, from + i, (n - i) * sizeof(real));
        put_halves(element, rest, half);
        memcpy(to + i, half, (n - i) * sizeof(uint16_t));
    }
}

static void narrow_row(const struct launch* of, struct place at) {
    const real* from = (const real*)row_of(&of->other, at);
    uint16_t* to = (uint16_t*)row_of(&of->out, at);
    if (of->element == FLOAT16)
        narrow_numbers(FLOAT16, from, to, of->value_dim);
    else
        narrow_numbers(BFLOAT16, from, to, of->value_dim);
}

static int32_t narrow(const struct launch* of) { return by_rows(of, narrow_row); }

#endif
