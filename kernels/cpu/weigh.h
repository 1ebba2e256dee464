// From the scores of a row to weights: a part of softmax.

#pragma once

#ifdef __AVX512BF16__
#include "pack_pairs.h"
#else
#include "pack.h"
#endif

#ifdef __AVX512BF16__
#define WEIGHTS_APART 1                         // from the scores

// What of the scale the packed rows leave to be multiplied.
INLINE real scale_left(real scale) { return scale == 0 ? 1 : scale < 0 ? -scale : scale; }

// e^x of scores, x at most 0 but for rounding; NaN for NaN.  The polynomial's error is that of a rounding.
INLINE vec weight_of(vec x) {
    const float magic = 12582912.0f, log2_e = 1.44269504088896341f;
    const vec inside = larger(splat(-200), x);                             // which gives 0
    const vec rounded = inside * log2_e + magic, n = rounded - magic;
    const vec f = inside * log2_e - n;
    vec p = f * 1.32647273e-03f + 9.67151299e-03f;
    p = p * f + 5.55073358e-02f;
    p = p * f + 2.40222424e-01f;
    p = p * f + 6.93147004e-01f;
    p = p * f + 1.0f;
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
}

INLINE void store_weights(operand* to, vec left, vec right) {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)right, (__m512)left);
    memcpy(to, &both, sizeof both);
}
#else
#define WEIGHTS_APART 0

INLINE real scale_left(real scale) {
    (void)scale;
    return 1;
}

INLINE vec weight_of(vec x) { return exponential(x); }

INLINE void store_weights(operand* to, vec left, vec right) {
    store(to, left);
    store(to + LANES, right);
}
#endif

// The scores of one row times scale, of the columns [start, stop), as weights relative to the largest so far; `top` is
// that, `total` the sum of weights.  Returns by how much earlier weights have shrunk.
INLINE real weigh(real scale, long start, long stop, const real* score, operand* weight, real* top, real* total) {
    vec high = splat(-INFINITY), high2 = high;
    for (long j = start; j < stop; j += NR) {
        high = larger(load(score + j), high);
        high2 = larger(load(score + j + LANES), high2);
    }
    const real now = largest_of(larger(high, high2)) * scale, before = *top;
    const real base = now > before ? now : before;                  // NaN stays NaN
    const vec minus = splat(base == -INFINITY ? 0 : base);
    vec sum = splat(0), sum2 = sum;
    for (long j = start; j < stop; j += NR) {
        const vec left = weight_of(load(score + j) * scale - minus);
        const vec right = weight_of(load(score + j + LANES) * scale - minus);
        store_weights(weight + j, left, right);
        sum += left, sum2 += right;
    }
    const real decay = now > before ? (before == -INFINITY ? 0 : exponential(splat(before - base))[0]) : 1;
    *total = *total * decay + sum_of(sum + sum2);
    *top = base;
    return decay;
}
