// Scores and the online softmax of a warp's 16 * M rows, in base 2.
//
// A raw score s is the dot product of q and k.  The exponential takes transformed(s) * factor, with -DSCORE=
//     0    transformed(s) = s                  factor = scale * log2(e)        scale > 0
//     1    transformed(s) = s * inner          factor = log2(e)                inner = scale, of any sign
//     2    transformed(s) = tanh(s * inner)    factor = softcap * log2(e)      inner = scale / softcap
// The product with the factor is free: it is part of the FMA before the exponential.

#pragma once

#include "merge.cuh"
#include "warp.cuh"

__device__ __forceinline__ float transform(float score, float inner) {
    return SCORE == 0 ? score : SCORE == 1 ? score * inner : tanhf(score * inner);
}

template <int M>
struct Softmax {
    float top[M][2];                               // largest score so far, times factor
    float sum[M][2];                               // sum of weights relative to top, over this lane's columns only

    __device__ __forceinline__ Softmax() {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                top[m][h] = minus_infinity(), sum[m][h] = 0;
    }

    // Turns scores into weights, and rescales the earlier sums and `out` to the new maximum.
    template <int N, int D>
    __device__ __forceinline__ void weigh(float (&score)[M][N][4], float (&out)[M][D][4], float factor) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float highest = minus_infinity();
#pragma unroll
                for (int n = 0; n < N; ++n)
                    highest = fmaxf(highest, fmaxf(score[m][n][2 * h], score[m][n][2 * h + 1]));
                const float new_top = fmaxf(top[m][h], quad_max(highest) * factor);
                const float base = new_top == minus_infinity() ? 0 : new_top;
                const float decay = exp2_fast(top[m][h] - base);
                float total = 0;
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; ++e) {
                        score[m][n][e] = exp2_fast(fmaf(score[m][n][e], factor, -base));
                        total += score[m][n][e];
                    }
                sum[m][h] = sum[m][h] * decay + total;
                top[m][h] = new_top;
#pragma unroll
                for (int d = 0; d < D; ++d)
                    out[m][d][2 * h] *= decay, out[m][d][2 * h + 1] *= decay;
            }
    }
};
