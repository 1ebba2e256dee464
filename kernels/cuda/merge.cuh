// Merging of partials: a weight is that of (out_b, lse_b) in the sum with (out, lse), whose own is the rest to 1.  An empty partial
// has lse -inf; nothing here takes the exponential of a positive number, or gives NaN for two empty ones.

#pragma once

constexpr float LN_2 = 0.693147180559945309f;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000); }

__device__ __forceinline__ float merge_weight(float lse, float lse_b) {
    return lse_b == minus_infinity() ? 0 : 1 / (1 + expf(lse - lse_b));
}

__device__ __forceinline__ float merge_lse(float lse, float lse_b) {
    return lse == lse_b ? lse + LN_2 : fmaxf(lse, lse_b) + log1pf(expf(-fabsf(lse - lse_b)));
}
