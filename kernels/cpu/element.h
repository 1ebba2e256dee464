// Numbers of the inputs as real ones.

#pragma once

#include "launch.h"
#include "vector.h"

#if REAL_BYTES == 8
#define REAL FLOAT64
#else
#define REAL FLOAT32
#endif

static const int element_bytes[] = {4, 8, 2, 2};

INLINE float from_bfloat16(uint16_t half) {
    union {
        uint32_t bits;
        float value;
    } wide = {(uint32_t)half << 16};
    return wide.value;
}

// LANES numbers from any address as a vector.
INLINE vec widened(int element, const char* from) {
#if REAL_BYTES == 4
    typedef uint16_t halves __attribute__((vector_size(VBYTES / 2), aligned(2), may_alias, unused));
    typedef uint32_t words __attribute__((vector_size(VBYTES), unused));
#if defined(__AVX512F__)                              // GCC converts vectors of halves in two parts
    const __m256i half = _mm256_loadu_si256((const __m256i*)from);
    if (element == FLOAT16)
        return (vec)_mm512_cvtph_ps(half);
    if (element == BFLOAT16)
        return (vec)((words)_mm512_cvtepu16_epi32(half) << 16);
#elif defined(__AVX2__)
    const __m128i half = _mm_loadu_si128((const __m128i*)from);
    if (element == FLOAT16)
        return (vec)_mm256_cvtph_ps(half);
    if (element == BFLOAT16)
        return (vec)((words)_mm256_cvtepu16_epi32(half) << 16);
#elif __ARM_FEATURE_SVE_BITS                    // and these one by one
    const svuint32_t half = svld1uh_u32(svptrue_b8(), (const uint16_t*)from);
    if (element == FLOAT16)
        return svcvt_f32_f16_x(svptrue_b8(), svreinterpret_f16(half));
    if (element == BFLOAT16)
        return svreinterpret_f32(svlsl_x(svptrue_b8(), half, 16));
#else
    if (element != FLOAT32) {
        const words half = __builtin_convertvector(*(const halves*)from, words), rest = half & 0x7fff;
        if (element == BFLOAT16)
            return (vec)(half << 16);
        // Exponent and mantissa are shifted to where float32 has them; the value is 2^112 times too small there.
        const vec wide = (vec)(rest << 13) * 0x1p112f;
        return (vec)((words)wide | (half & 0x8000) << 16 | ((words)(rest >= 0x7c00) & 0x7f800000));
    }
#endif
#endif
    (void)element;
    return *(const loose_vec*)from;
}

// The last dim % LANES numbers of a row, in a vector's last lanes behind zeros; in its first ones if dim < LANES.
// Not inlined: the copy is long to compile, and the many kernels of decoding need it.
static __attribute__((noinline)) vec widened_rest(int element, const char* row, int dim) {
    const int bytes = element_bytes[element];
    if (dim < LANES) {
        char copy[VBYTES] __attribute__((aligned(64))) = {0};
        memcpy(copy, row, dim * bytes);
        return widened(element, copy);
    }
    return (vec)((ivec)widened(element, row + (dim - LANES) * bytes) & (lane_numbers() >= LANES - dim % LANES));
}

// to[i] = from[i] * factor for the n numbers of a row.
static void read_row(int element, const char* from, real* restrict to, int n, real factor) {
    if (n < LANES) {
        const vec row = widened_rest(element, from, n) * factor;
        memcpy(to, &row, n * sizeof(real));
    }
    for (int c = 0; c < n && n >= LANES; c += LANES) {
        const int at = c + LANES <= n ? c : n - LANES;  // the last vector ends with the row
        store_loose(to + at, widened(element, from + at * element_bytes[element]) * factor);
    }
}

// Whether every number of a row is finite.
INLINE int finite_row(const real* row, int n) {
    int odd = 0;
    for (int i = 0; i < n; i++)
        odd |= !(row[i] - row[i] == 0);
    return !odd;
}
