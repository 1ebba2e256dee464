// Shared parts of the two kernels of the backward pass, gradient_q.cu and gradient_kv.cu.
//
// With the scores S after scale, softcap and bias, P = exp(S - lse) and dP = dout V^T:
//     dV = P^T dout    dS = P (dP - delta)    dbias = dS    dQ = scale dS K    dK = scale dS^T Q
// A softcap multiplies the last two dS by 1 - tanh^2.  Dropout multiplies dP, and the P of dV, by its factors.
//
// dQ is a sum over keys; dK and dV are sums over queries.  A single kernel for all three would have to sum one side in
// global memory, atomically or in turns.  Two kernels keep their sums in registers: one loops over keys, one over
// queries.  That takes 7 products instead of 5, but results are the same bits in every run, and no block waits for
// another.

// With -DSHARED_KV=1 a value is the first VALUE_DIM numbers of its key: there is no v, and dk is the sum of both
// gradients.

#pragma once

#include "bias.cuh"
#include "columns.cuh"
#include "dropout.cuh"
#include "keys.cuh"
#include "product.cuh"
#include "rows.cuh"
#include "softmax.cuh"

constexpr float LOG2_E = 1.44269504088896341f;
constexpr int DEPTH = padded(HEAD_DIM, SHARED_KV ? 64 * PARTS : 32),
              VALUE_DEPTH = padded(VALUE_DIM, SHARED_KV ? 64 : 32);

// The part of the results' columns that this block computes.  With one part it is a constant that the compiler can
// fold.
__device__ __forceinline__ int part_index() { return PARTS == 1 ? 0 : blockIdx.y; }

// lse in base 2.  Rows without keys have lse -inf; no pair uses it, so 0 takes its place.
__device__ __forceinline__ float base_of(float lse) { return lse == minus_infinity() ? 0 : lse * LOG2_E; }

// For one pair: replaces the raw score by the P of dV, and dP by the dS of dQ and dK.  Returns that of dbias.
// bias: in units of transformed scores, unless the raw score has it already.  kept: the factor of dropout.
__device__ __forceinline__ float differentiate(float& score, float& product, float base, float delta, float inner,
                                               float factor, float bias, float kept) {
    const float transformed = transform(score, inner);
    score = exp2_fast(fmaf(BIAS_LAST ? transformed + bias : transformed, factor, -base));
    const float rest = (DROPOUT ? product * kept : product) - delta, gradient = score * rest;
    product = (SCORE == 2 ? score * (1 - transformed * transformed) : score) * rest;
    if (DROPOUT)
        score *= kept;
    return gradient;
}

// Adds 16 * M rows of acc times factor to rows of DIM floats, which begin at to + start(m, h), in the columns from
// `first` on.  Rows with start(m, h) < 0 are skipped.
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
