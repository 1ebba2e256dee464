// What is done to partials and gradients between blocks: merge, add, delta, sinks.  All of it waits for memory alone.
//
// Rows are (token, head) pairs of arrays (tokens, heads, dim); a warp takes one.  T is the dtype that partials or outputs come in.

#include "element.cuh"
#include "merge.cuh"
#include "warp.cuh"

using T = ELEMENT;
constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ long long my_row() { return (long long)blockIdx.x * WARPS + warp_index(); }

// Merges `parts` partials, (parts, rows, dim) and (parts, rows), one after the other into (out, lse), or if `fresh` into an
// empty partial in its place.
extern "C" __global__ void __launch_bounds__(THREADS)
merge(float* __restrict__ out, float* __restrict__ lse, const T* __restrict__ out_b, const float* __restrict__ lse_b,
      long long rows, int dim, int parts, int fresh) {
    const long long row = my_row();
    if (row >= rows)
        return;
    const float held = fresh ? minus_infinity() : lse[row];
    for (int column = lane_index(); column < dim; column += 32) {
        float value = fresh ? 0 : out[row * dim + column], total = held;
        for (int part = 0; part < parts; ++part) {
            const float other = lse_b[part * rows + row], weight = merge_weight(total, other);
            if (other != minus_infinity())
                value = value * (1 - weight) + to_float(out_b[(part * rows + row) * dim + column]) * weight;
            total = merge_lse(total, other);
        }
        out[row * dim + column] = value;
    }
    __syncwarp();                                                    // all lanes have read lse
    if (lane_index() == 0) {
        float total = held;
        for (int part = 0; part < parts; ++part)
            total = merge_lse(total, lse_b[part * rows + row]);
        lse[row] = total;
    }
}

// A partial becomes sums that ranks can add up, of weights relative to top, and such sums become a partial again.
extern "C" __global__ void __launch_bounds__(THREADS)
unnormalize(float* __restrict__ out, float* __restrict__ lse, const float* __restrict__ top, long long rows, int dim) {
    const long long row = my_row();
    if (row >= rows)
        return;
    const float weight = expf(lse[row] - (top[row] == minus_infinity() ? 0 : top[row]));
    for (int column = lane_index(); column < dim; column += 32)
        out[row * dim + column] *= weight;
    __syncwarp();                                                    // all lanes have read lse
    if (lane_index() == 0)
        lse[row] = weight;
}

extern "C" __global__ void __launch_bounds__(THREADS)
normalize(float* __restrict__ out, float* __restrict__ lse, const float* __restrict__ top, long long rows, int dim) {
    const long long row = my_row();
    if (row >= rows)
        return;
    const float sum = lse[row];
    for (int column = lane_index(); column < dim; column += 32)
        out[row * dim + column] /= sum == 0 ? 1 : sum;
    __syncwarp();
    if (lane_index() == 0)
        lse[row] = top[row] + logf(sum);
}

extern "C" __global__ void __launch_bounds__(THREADS)
add(float* __restrict__ array, const T* __restrict__ other, long long size) {
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < size; i += (long long)gridDim.x * THREADS)
        array[i] += to_float(other[i]);
}

// delta = rowsum(dout * out) - dlse; dlse counts only if `with_dlse`.  A row whose out is 0, as that of one which sees no
// key is, has rowsum 0 whatever its dout: NaN, say, as what pads a batch may hold.
extern "C" __global__ void __launch_bounds__(THREADS)
delta(float* delta, const T* __restrict__ dout, const T* __restrict__ out, const float* dlse, long long rows, int dim,
      int with_dlse) {
    const long long row = my_row();
    if (row >= rows)
        return;
    float sum = 0;
    bool other = false;
    for (int column = lane_index(); column < dim; column += 32) {
        const float value = to_float(out[row * dim + column]);
        sum += to_float(dout[row * dim + column]) * value;
        other |= value != 0;
    }
    sum = warp_sum(sum);
    const bool counts = __ballot_sync(ALL_LANES, other) != 0;
    if (lane_index() == 0)
        delta[row] = (counts ? sum : 0) - (with_dlse ? dlse[row] : 0);
}

// Every query of a head sees one more key, of score sinks[head] and value 0.  A row that saw nothing stays 0.
extern "C" __global__ void __launch_bounds__(THREADS)
sink(float* __restrict__ out, float* __restrict__ lse, const float* __restrict__ sinks, long long rows, int heads,
     int dim) {
    const long long row = my_row();
    if (row >= rows)
        return;
    const float score = sinks[row % heads], held = lse[row];
    const float weight = held == minus_infinity() ? 0 : merge_weight(held, score);
    for (int column = lane_index(); column < dim; column += 32)
        out[row * dim + column] *= 1 - weight;
    __syncwarp();
    if (lane_index() == 0)
        lse[row] = merge_lse(held, score);
}

// gradient[head] = -sum over tokens of exp(sinks - lse) * delta, a block a head, always in the same order.
extern "C" __global__ void __launch_bounds__(THREADS)
sink_gradient(float* __restrict__ gradient, const float* __restrict__ sinks, const float* __restrict__ lse,
              const float* __restrict__ delta, int tokens, int heads) {
    const int head = blockIdx.x;
    const float score = sinks[head];
    double sum = 0;
    for (int token = threadIdx.x; token < tokens && score != minus_infinity(); token += THREADS) {
        const long long at = (long long)token * heads + head;
        sum += double(expf(score - lse[at]) * delta[at]);
    }
#pragma unroll
    for (int mask = 16; mask; mask /= 2)
        sum += __shfl_xor_sync(ALL_LANES, sum, mask);
    if (lane_index() == 0)
        shared_at<double>(warp_index() * sizeof(double)) = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < WARPS; ++warp)
            sum += shared_at<double>(warp * sizeof(double));
        gradient[head] = float(-sum);
    }
}
