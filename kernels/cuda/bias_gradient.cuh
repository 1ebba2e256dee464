// The gradient of a bias, float32 numbers of its shape with strides of their own, to which gradient_q adds.
//
// -DDBIAS= says how many numbers of a row are read and written at a time, as -DBIAS= does (bias.cuh).

#pragma once

#include "bias.cuh"

#if DBIAS
#define DBIAS_ARGUMENTS                                                                                         \
    , float *__restrict__ dbias_numbers, long long dbias_sequence, long long dbias_head, long long dbias_token, \
        int sharers, int sharers_apart, int owners_apart, int per_kv
#else
#define DBIAS 0
#define DBIAS_ARGUMENTS
constexpr float* dbias_numbers = nullptr;
constexpr long long dbias_sequence = 0, dbias_head = 0, dbias_token = 0;
constexpr int sharers = 1, sharers_apart = 0, owners_apart = 1, per_kv = 1;
#endif

// Adds a lane's numbers to a row of the gradient, in the columns of read_row.  All are read before one is written.
template <int N>
__device__ __forceinline__ void add_to_row(float* row, const float2 (&of)[N], int first, int count) {
    const int column = first + thread_index_anew() % 4 * 2;
    float2 sum[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float* at = row + column + 8 * n;
        const int left = count - column - 8 * n;
        if (DBIAS > 1)
            sum[n] = left > 0 ? global_at<const float2>(at) : make_float2(0, 0);
        else
            sum[n] = make_float2(left > 0 ? at[0] : 0, left > 1 ? at[1] : 0);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float* at = row + column + 8 * n;
        const int left = count - column - 8 * n;
        const float2 whole = make_float2(sum[n].x + of[n].x, sum[n].y + of[n].y);
        if (DBIAS > 1) {
            if (left > 0)
                global_at<float2>(at) = whole;
        } else {
            if (left > 0)
                at[0] = whole.x;
            if (left > 1)
                at[1] = whole.y;
        }
    }
}
