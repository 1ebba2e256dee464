// Weights and lse of merged partials.
//
// merge_weight is the weight of (out_b, lse_b) in the merged partial; (out, lse) has the remainder to 1.  An empty
// partial has lse -inf.  Two empty partials give no NaN, and an exponential that overflows gives weight 0.

#pragma once

constexpr float LN_2 = 0.693147180559945309f;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000); }

__device__ __forceinline__ float merge_weight(float lse, float lse_b) {
    return lse_b == minus_infinity() ? 0 : 1 / (1 + expf(lse - lse_b));
}

__device__ __forceinline__ float merge_lse(float lse, float lse_b) {
    return lse == lse_b ? lse + LN_2 : fmaxf(lse, lse_b) + log1pf(expf(-fabsf(lse - lse_b)));
}
