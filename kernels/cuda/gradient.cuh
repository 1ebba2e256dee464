// What the two kernels of the backward pass share.
//
// With P = exp(S - lse) and dP = dout V^T, of the scores S as they are weighed:
//     dV = P^T dout    dS = P (dP - delta)    dQ = scale dS K    dK = scale dS^T Q
// and a cap multiplies dS by 1 - tanh^2.  dQ is summed over keys and dK and dV over queries, so that one kernel that makes all
// three has to add up one side in global memory, atomically or in turns.  Here are two that keep their sums in registers, one
// goes through keys and one through queries: 7 products instead of 5, but the same bits every time, and no block that waits.

#pragma once

#include "product.cuh"
#include "rows.cuh"
#include "softmax.cuh"

constexpr float LOG2_E = 1.44269504088896341f;

// Rows without keys have lse -inf, and no pair that would use it.
__device__ __forceinline__ float base_of(float lse) { return lse == minus_infinity() ? 0 : lse * LOG2_E; }

// Of a pair: a raw score becomes P, and dP becomes dS; both 0 where it is not seen.
__device__ __forceinline__ void differentiate(float& score, float& product, float base, float delta, float inner,
                                              float factor, bool seen) {
    const float bent = bend(score, inner);
    const float weight = exp2_fast(fmaf(bent, factor, -base));
    const float slope = SCORE == 2 ? weight * (1 - bent * bent) : weight;
    score = seen ? weight : 0;
    product = seen ? slope * (product - delta) : 0;
}

// Adds 16 * M rows, those of start(m, h) >= 0, to rows of DIM floats that begin there; columns from `first` on.
template <int DIM, int M, int D, class Start>
__device__ __forceinline__ void add_rows(float* to, const float (&acc)[M][D][4], float factor, int first, Start start) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const long long row = start(m, h);
            if (row < 0)
                continue;
#pragma unroll
            for (int d = 0; d < D; ++d)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int column = first + 8 * d + lane_index() % 4 * 2 + e;
                    if (column < DIM)
                        to[row + column] += acc[m][d][2 * h + e] * factor;
                }
        }
}
