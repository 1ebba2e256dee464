// What the two kernels of the backward pass share.
//
// With P = exp(S - lse) and dP = dout V^T, of the scores S as they are weighed:
//     dV = P^T dout    dS = P (dP - delta)    dQ = scale dS K    dK = scale dS^T Q
// and a cap multiplies dS by 1 - tanh^2.  dQ is summed over keys and dK and dV over queries, so that one kernel that makes all
// three has to add up one side in global memory, atomically or in turns.  Here are two that keep their sums in registers, one
// goes through keys and one through queries: 7 products instead of 5, but the same bits every time, and no block that waits.

#pragma once

#include "columns.cuh"
#include "keys.cuh"
#include "product.cuh"
#include "rows.cuh"
#include "softmax.cuh"

constexpr float LOG2_E = 1.44269504088896341f;

// Which of the PARTS this block makes; a constant if there is but one, so that what follows from it is too.
__device__ __forceinline__ int part_index() { return PARTS == 1 ? 0 : blockIdx.y; }

// Rows without keys have lse -inf, and no pair that would use it.
__device__ __forceinline__ float base_of(float lse) { return lse == minus_infinity() ? 0 : lse * LOG2_E; }

// Of a pair: a raw score becomes P, and dP becomes dS.
__device__ __forceinline__ void differentiate(float& score, float& product, float base, float delta, float inner,
                                              float factor) {
    const float bent = bend(score, inner);
    score = exp2_fast(fmaf(bent, factor, -base));
    product = (SCORE == 2 ? score * (1 - bent * bent) : score) * (product - delta);
}

// Adds 16 * M rows, those of start(m, h) >= 0, to rows of DIM floats that begin there; columns from `first` on.
template <int DIM, int M, int D, class Start>
__device__ __forceinline__ void add_rows(float* to, const float (&acc)[M][D][4], float factor, int first, Start start) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const long long row = start(m, h);
            if (row >= 0)
                add_columns<DIM>(to + row, acc[m], h, true, 1, factor, first);
        }
}
