// Vectors of REAL, float or double, as wide as the instruction set has them, by the compilers' vector types.
//
// Only what those types have no operator for is written with intrinsics: maximum, sums over lanes, scaling by 2^n.
// SVE's registers have no fixed size; these vectors are of the size that the compiler was told, which choose.c checks.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#elif __ARM_FEATURE_SVE_BITS
#include <arm_sve.h>
#endif

#if defined(__AVX512BF16__)
#define VBYTES 64
#define MR 32                   // two AMX tiles
#elif defined(__AVX512F__)
#define VBYTES 64
#define MR 12                   // rows of a micro-tile: 24 of 32 registers hold its two vectors of columns
#elif defined(__AVX2__)
#define VBYTES 32
#define MR 6                    // 12 of 16 registers
#elif __ARM_FEATURE_SVE_BITS
#define VBYTES (__ARM_FEATURE_SVE_BITS / 8)
#define MR 12
#elif defined(__aarch64__)
#define VBYTES 16
#define MR 12
#else
#define VBYTES 16
#define MR 6
#endif

#if REAL_BYTES == 8
#define logarithm log
typedef double real;
typedef int64_t integer;
typedef uint64_t unsigned_integer;
#else
#define logarithm logf
typedef float real;
typedef int32_t integer;
typedef uint32_t unsigned_integer;
#endif

#define LANES ((int)(VBYTES / sizeof(real)))
#define NR (2 * LANES)          // columns of a micro-tile

typedef real vec __attribute__((vector_size(VBYTES)));
typedef real loose_vec __attribute__((vector_size(VBYTES), aligned(sizeof(real)), may_alias));     // at any address
typedef char loose_bytes __attribute__((vector_size(VBYTES), aligned(1), may_alias));               // of any numbers
typedef integer ivec __attribute__((vector_size(VBYTES)));
typedef unsigned_integer uvec __attribute__((vector_size(VBYTES)));

#if __ARM_FEATURE_SVE_BITS && REAL_BYTES == 8       // what a vec is to SVE's intrinsics
typedef svfloat64_t svreal;
#elif __ARM_FEATURE_SVE_BITS
typedef svfloat32_t svreal;
#endif

#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

#define INLINE static inline __attribute__((always_inline))

INLINE vec splat(real x) { return x - (vec){0}; }
INLINE vec load(const real* from) { return *(const vec*)from; }
INLINE void store(real* to, vec x) { *(vec*)to = x; }
INLINE vec load_loose(const real* from) { return *(const loose_vec*)from; }
INLINE void store_loose(real* to, vec x) { *(loose_vec*)to = x; }

// 0, 1, 2 and so on.
INLINE ivec lane_numbers(void) {
    ivec lane = {0};
    UNROLLED for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane;
}

// All bits of the lanes that have one in `bits`, the first lane the lowest.
INLINE ivec lanes_of(uint64_t bits) {
    ivec lane = {0}, all = {0};
    UNROLLED for (int i = 0; i < LANES; i++) lane[i] = (integer)1 << i;
    return ((all + (integer)(bits & (((uint64_t)1 << LANES) - 1))) & lane) != 0;
}

// A product, rounded here.  Compilers may fuse one with the subtraction of its largest value or of an lse: a score of
// 2^32 would then be 256 more than itself, and its weight infinite.
INLINE vec rounded_now(vec x) {
#if defined(__x86_64__)
    __asm__("" : "+v"(x));
#elif __ARM_FEATURE_SVE_BITS
    svreal lanes = x;
    __asm__("" : "+w"(lanes));
    x = lanes;
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#endif
    return x;
}

// x where mask is set (all bits of a lane), else y
INLINE vec choose(ivec mask, vec x, vec y) { return (vec)((mask & (ivec)x) | (~mask & (ivec)y)); }

#if defined(__clang__)
#define pick(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define pick(x, y, ...) __builtin_shuffle(x, y, (ivec){__VA_ARGS__})
#endif

// The larger and the smaller one; y where x is NaN, and NaN where y is.
INLINE vec larger(vec x, vec y) {
#if defined(__AVX512F__) && REAL_BYTES == 4
    return (vec)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX512F__)
    return (vec)_mm512_max_pd((__m512d)x, (__m512d)y);
#elif defined(__AVX2__) && REAL_BYTES == 4
    return (vec)_mm256_max_ps((__m256)x, (__m256)y);
#elif defined(__AVX2__)
    return (vec)_mm256_max_pd((__m256d)x, (__m256d)y);
#else
    return choose(x > y, x, y);
#endif
}

INLINE vec smaller(vec x, vec y) { return -larger(-x, -y); }

INLINE real sum_of(vec x) {
#if defined(__AVX512F__) && REAL_BYTES == 4
    return _mm512_reduce_add_ps((__m512)x);
#elif __ARM_FEATURE_SVE_BITS
    const svreal lanes = x;
    return svaddv(svptrue_b8(), lanes);
#else
    real lane[LANES];
    memcpy(lane, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] += lane[i + half];
    return lane[0];
#endif
}

// FOLD(l, h) is lane l ^ h of x for lanes l of x, and lane l ^ h of y for those with bit h.
#define FOLD(l, h) ((l) & (h) ? LANES + ((l) ^ (h)) : ((l) ^ (h)))
#define BIT(l, h) ((l) & (h))
#define LANES_2(of, l, h) of(l, h), of((l) + 1, h)
#define LANES_4(of, l, h) LANES_2(of, l, h), LANES_2(of, (l) + 2, h)
#define LANES_8(of, l, h) LANES_4(of, l, h), LANES_4(of, (l) + 4, h)
#define LANES_16(of, l, h) LANES_8(of, l, h), LANES_8(of, (l) + 8, h)
#if VBYTES / REAL_BYTES == 16
#define ALL_LANES LANES_16
#elif VBYTES / REAL_BYTES == 8
#define ALL_LANES LANES_8
#elif VBYTES / REAL_BYTES == 4
#define ALL_LANES LANES_4
#else
#define ALL_LANES LANES_2
#endif

// Halves the vectors in x: lane l of what is left of x[i] and x[i + half] is of that one whose bit `half` is l's.
#define HALVE(x, half)                                                         \
    for (int i = 0; i < (half); i++)                                           \
    x[i] = choose((ivec){ALL_LANES(BIT, 0, half)} != 0, x[i + (half)], x[i]) + \
           pick(x[i], x[i + (half)], ALL_LANES(FOLD, 0, half))

// The sums of LANES vectors' lanes: lane l is that of x[l].
INLINE vec sums_of(vec* x) {
#if VBYTES / REAL_BYTES >= 16
    HALVE(x, 8);
#endif
#if VBYTES / REAL_BYTES >= 8
    HALVE(x, 4);
#endif
#if VBYTES / REAL_BYTES >= 4
    HALVE(x, 2);
#endif
    HALVE(x, 1);
    return x[0];
}

// LOW(l, h) is lane l of x for lanes l without bit h, and lane l ^ h of y for the others; HIGH(l, h) is lane l ^ h of x
// for lanes without bit h, and lane l of y.
#define LOW(l, h) ((l) & (h) ? LANES + ((l) ^ (h)) : (l))
#define HIGH(l, h) ((l) & (h) ? LANES + (l) : (l) ^ (h))

// Exchanges the lanes with bit `half` of each vector x[i] with those without it of x[i + half].
#define EXCHANGE(x, half)                                                    \
    UNROLLED for (int i = 0; i < LANES; i++) if (!(i & (half))) {            \
        const vec low = pick(x[i], x[i + (half)], ALL_LANES(LOW, 0, half));  \
        x[i + (half)] = pick(x[i], x[i + (half)], ALL_LANES(HIGH, 0, half)); \
        x[i] = low;                                                          \
    }

// A matrix of LANES vectors transposed: lane l of x[i] becomes lane i of x[l].
INLINE void transpose(vec* x) {
#if VBYTES / REAL_BYTES >= 16
    EXCHANGE(x, 8);
#endif
#if VBYTES / REAL_BYTES >= 8
    EXCHANGE(x, 4);
#endif
#if VBYTES / REAL_BYTES >= 4
    EXCHANGE(x, 2);
#endif
    EXCHANGE(x, 1);
}

// The largest lane, of which none is NaN.
INLINE real largest_of(vec x) {
#if defined(__AVX512F__) && REAL_BYTES == 4
    return _mm512_reduce_max_ps((__m512)x);
#elif __ARM_FEATURE_SVE_BITS
    const svreal lanes = x;
    return svmaxv(svptrue_b8(), lanes);
#else
    real lane[LANES], top = -INFINITY;
    memcpy(lane, &x, sizeof x);
    for (int i = 0; i < LANES; i++)
        top = lane[i] > top ? lane[i] : top;
    return top;
#endif
}

// e^x; NaN for NaN, 0 below about e^-87 (float) or e^-708.  x is at most about 88 or 709: `limited` sees to that.
#if REAL_BYTES == 4
#define LOWEST -87.3f
#define HIGHEST 89.0f
INLINE vec exponential(vec x) {
    const float magic = 12582912.0f, log2_e = 1.44269504088896341f;        // adding 1.5 * 2^23 rounds to an integer
    const vec inside = larger(splat(LOWEST), x);
    const vec rounded = inside * log2_e + magic, n = rounded - magic;
    const vec f = inside * log2_e - n;                                     // one rounding, by a fused multiply-add
    vec p = f * 1.5353376e-4f + 1.3398874e-3f;
    p = p * f + 9.6184373e-3f;
    p = p * f + 5.5503324e-2f;
    p = p * f + 2.4022648e-1f;
    p = p * f + 6.9314720e-1f;
    p = p * f + 1.0f;
    const vec power = (vec)(((uvec)rounded << 23) + 0x3f800000u);          // unsigned, since NaN may overflow
    return (vec)((ivec)(p * power) & ~(inside <= LOWEST));
}
#else
#define LOWEST -708.0
#define HIGHEST 710.0
INLINE vec exponential(vec x) {
    const double magic = 6755399441055744.0, log2_e = 1.4426950408889634;
    const vec inside = larger(splat(LOWEST), x);
    const vec rounded = inside * log2_e + magic, n = rounded - magic;
    const vec r = (inside - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
    const vec z = r * r;                                                   // the rational function of Cephes
    const vec p = r * ((1.26177193074810590878e-4 * z + 3.02994407707441961300e-2) * z + 1.0);
    const vec q =
        ((3.00198505138664455042e-6 * z + 2.52448340349684104192e-3) * z + 2.27265548208155028766e-1) * z + 2.0;
    const vec e = 1.0 + 2.0 * p / (q - p);
    const vec power = (vec)(((uvec)rounded << 52) + 0x3ff0000000000000u);
    return (vec)((ivec)(e * power) & ~(inside <= LOWEST));
}
#endif

INLINE vec limited(vec x) { return smaller(splat(HIGHEST), x); }

// tanh, accurate for small x too: a polynomial (Cephes) there, elsewhere by e^-2|x|.
INLINE vec hyperbolic_tangent(vec x) {
    const vec z = x * x, size = larger(-x, x);
#if REAL_BYTES == 4
    const vec p = (((-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f) * z + 1.33314422036e-1f) * z -
                  3.33332819422e-1f;
    const vec small = x + x * z * p;
#else
    const vec p = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3;
    const vec q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3;
    const vec small = x + x * z * (p / q);
#endif
    const vec e = exponential(-2 * size);
    const vec large = (1 - e) / (1 + e);
    const vec either = choose(size < (real)0.625, small, choose(x < 0, -large, large));
    return choose(x == x, either, x);
}
