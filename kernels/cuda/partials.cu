// Kernels on whole partials and gradients: merge, add, delta, sinks.  All are limited by memory bandwidth.
//
// A row is a (token, head) pair of arrays (tokens, heads, dim).  T is the dtype of the incoming partials or outputs.
// In merge, add, delta and out_of_delta a thread takes VECTOR elements at a time; if VECTOR > 1, rows and addresses are
// multiples of as many bytes, or of 16.  In all of these but add, `lanes` of a warp share a row, a power of two.
//
// grid: any for add and add_splits; numbers of the gradient / THREADS for add_key_sums; rows / (THREADS / lanes) for
// the others of these, of which a thread of merge takes BATCH; rows / WARPS, one warp per row, for the rest, except for
// merge_parts (rows, one block per row) and sink_gradient (heads, one block per head).
//
// block: THREADS threads.
//
// shared memory: none, except for the warps' sums: THREADS * 16 bytes in merge_parts, WARPS * 8 in sink_gradient.
//
// tile sizes: none.  A warp steps through its row by 32 columns, and in merge_parts by 128 if dim is a multiple of 4.

#include "element.cuh"
#include "merge.cuh"
#include "warp.cuh"

using T = ELEMENT;
constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ long long my_row() { return (long long)blockIdx.x * WARPS + warp_index(); }

// The row of a thread where `lanes` of a warp share a row, and the first column that the thread takes.
__device__ __forceinline__ long long shared_row(int lanes) {
    return (long long)blockIdx.x * (THREADS / lanes) + threadIdx.x / lanes;
}
__device__ __forceinline__ int my_column(int lanes) { return threadIdx.x % lanes * VECTOR; }

// The sum over the lanes of a row, in the same order on each.
__device__ __forceinline__ float row_sum(float x, int lanes) {
    for (int mask = lanes / 2; mask; mask /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
}

constexpr int BATCH = 4;  // rows or vectors of a thread that are on their way at a time

// Merges a partial (out_b, lse_b) into (out, lse).  out of a row without keys is not read.
extern "C" __global__ void
__launch_bounds__(THREADS)
merge(float* __restrict__ out, float* __restrict__ lse, const T* __restrict__ out_b, const float* __restrict__ lse_b,
      long long rows, int dim, int lanes) {
    const int apart = THREADS / lanes;                               // rows of the block that its threads take at a time
    const long long first = (long long)blockIdx.x * apart * BATCH + threadIdx.x / lanes;
    float held[BATCH], other[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        const long long row = first + i * apart;
        held[i] = row < rows ? lse[row] : minus_infinity();
        other[i] = row < rows ? lse_b[row] : minus_infinity();
    }
    for (int column = my_column(lanes); column < dim; column += lanes * VECTOR) {
        Elements<T, VECTOR> read[BATCH];
        Elements<float, VECTOR> sum[BATCH] = {};
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (other[i] != minus_infinity()) {
                const long long at = (first + i * apart) * dim + column;
                read[i] = load<VECTOR>(out_b + at);
                if (held[i] != minus_infinity())
                    sum[i] = load<VECTOR>(out + at);
            }
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (other[i] != minus_infinity()) {
                const float weight = merge_weight(held[i], other[i]);
#pragma unroll
                for (int e = 0; e < VECTOR; ++e)
                    sum[i].element[e] = sum[i].element[e] * (1 - weight) + to_float(read[i].element[e]) * weight;
                store<VECTOR>(out + (first + i * apart) * dim + column, sum[i]);
            }
    }
    __syncwarp();                                                    // all lanes have read lse
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
        if (first + i * apart < rows && threadIdx.x % lanes == 0)
            lse[first + i * apart] = merge_lse(held[i], other[i]);
}

constexpr int AHEAD = 8;                           // loads of a lane of merge_parts in flight at a time

__device__ __forceinline__ void add_weighted(float& sum, float x, float weight) { sum += x * weight; }
__device__ __forceinline__ void add_weighted(float4& sum, const float4& x, float weight) {
    sum.x += x.x * weight, sum.y += x.y * weight, sum.z += x.z * weight, sum.w += x.w * weight;
}

// Writes the weighted sum of a row's parts, `dim` columns as Vectors.  The warps of the block take the parts in turn.
// out: of the row.  out_b, lse_b: of the row in the first part; a part has `rows` rows.
template <class Vector>
__device__ __forceinline__ void sum_parts(float* __restrict__ out, const float* __restrict__ out_b,
                                          const float* __restrict__ lse_b, long long rows, int dim, int parts, float base,
                                          float keep, float norm) {
    constexpr int WIDTH = sizeof(Vector) / sizeof(float);
    const int mine = lane_index() * WIDTH;
    for (int first = 0; first < dim; first += 32 * WIDTH) {
        const int column = first + mine;
        const bool inside = column < dim;
        Vector sum = {};
        for (int block = warp_index(); block < parts; block += 32 * WARPS) {
            // Each lane computes the weight of one part; -1 marks an empty part, whose values are ignored.
            const int part = block + lane_index() * WARPS;
            const float of = part < parts ? lse_b[part * rows] : minus_infinity();
            const float weight = of == minus_infinity() ? -1 : expf(of - base);
            for (int i = 0; i < 32 && block + i * WARPS < parts; i += AHEAD) {
                Vector loaded[AHEAD];
#pragma unroll
                for (int j = 0; j < AHEAD; ++j) {
                    const long long at = (block + (i + j) * WARPS) * rows * dim + column;
                    loaded[j] = inside && block + (i + j) * WARPS < parts
                        ? *reinterpret_cast<const Vector*>(out_b + at) : Vector{};
                }
#pragma unroll
                for (int j = 0; j < AHEAD; ++j) {
                    const float by = __shfl_sync(ALL_LANES, weight, i + j);
                    if (!(by < 0))
                        add_weighted(sum, loaded[j], by);
                }
            }
        }
        if (inside)
            shared_at<Vector>((warp_index() * 32 * WIDTH + mine) * sizeof(float)) = sum;
        __syncthreads();
        if (warp_index() == 0 && inside) {
            Vector* to = reinterpret_cast<Vector*>(out + column);
            Vector total = {};
            if (keep)
                add_weighted(total, *to, keep * norm);
            for (int warp = 0; warp < WARPS; ++warp)
                add_weighted(total, shared_at<Vector>((warp * 32 * WIDTH + mine) * sizeof(float)), norm);
            *to = total;
        }
        __syncthreads();                                             // the sums may be overwritten
    }
}

// Merges partials, out_b (parts, rows, dim) and lse_b (parts, rows), into (out, lse).  A block takes one row.  It computes
// all weights first, relative to the largest, so that the sums are independent of each other.
//
// `parts` not 0: all rows have so many.  `parts` 0: there are several sequences of `rows` rows; those of sequence s have
// the parts [firsts[s], firsts[s + 1]), which replace (out, lse); a sequence without parts keeps (out, lse).  firsts is
// `work` from `firsts_at` on.
extern "C" __global__ void __launch_bounds__(THREADS)
merge_parts(float* __restrict__ out, float* __restrict__ lse, const float* __restrict__ out_b,
            const float* __restrict__ lse_b, const int* __restrict__ work, long long firsts_at, long long rows, int dim,
            int parts) {
    const bool fresh = parts == 0;
    const int* firsts = work + firsts_at;
    out += (long long)blockIdx.x * dim, lse += blockIdx.x;
    long long row = blockIdx.x;
    if (fresh) {
        const int sequence = row / rows, first = firsts[sequence];
        parts = firsts[sequence + 1] - first;
        row += (first - sequence) * rows;
        if (parts == 0)
            return;
    }
    out_b += row * dim, lse_b += row;
    const float held = fresh ? minus_infinity() : *lse;
    float top = held;
    for (int part = lane_index(); part < parts; part += 32)
        top = fmaxf(top, lse_b[part * rows]);
#pragma unroll
    for (int mask = 16; mask; mask /= 2)
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, mask));
    const float base = top == minus_infinity() ? 0 : top, keep = expf(held - base);
    float sum = 0;
    for (int part = lane_index(); part < parts; part += 32)
        sum += expf(lse_b[part * rows] - base);
    sum = warp_sum(sum) + keep;
    const float norm = sum == 0 ? 0 : 1 / sum;
    if (dim % 4)
        sum_parts<float>(out, out_b, lse_b, rows, dim, parts, base, keep, norm);
    else
        sum_parts<float4>(out, out_b, lse_b, rows, dim, parts, base, keep, norm);
    if (threadIdx.x == 0)                          // after the barriers: all threads have read it
        *lse = top == minus_infinity() ? top : top + logf(sum);
}

// unnormalize turns a partial into terms that ranks can sum, with weights relative to top; normalize turns the sums
// back into a partial.
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
    const long long apart = (long long)gridDim.x * THREADS * VECTOR;
    long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * VECTOR;
    for (; at < size; at += BATCH * apart) {
        Elements<T, VECTOR> read[BATCH];
        Elements<float, VECTOR> sum[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (at + i * apart < size) {
                read[i] = load<VECTOR>(other + at + i * apart);
                sum[i] = load<VECTOR>(array + at + i * apart);
            }
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (at + i * apart < size) {
#pragma unroll
                for (int e = 0; e < VECTOR; ++e)
                    sum[i].element[e] += to_float(read[i].element[e]);
                store<VECTOR>(array + at + i * apart, sum[i]);
            }
    }
}

// Adds the sums of all splits, parts (splits, size), to an array of `size` numbers, four at a time.
extern "C" __global__ void __launch_bounds__(THREADS)
add_splits(float4* __restrict__ array, const float4* __restrict__ parts, long long fours, int splits) {
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < fours; i += (long long)gridDim.x * THREADS) {
        float4 sum = array[i];
        for (int split = 0; split < splits; ++split)
            add_weighted(sum, parts[split * fours + i], 1);
        array[i] = sum;
    }
}

// Adds sums by head and key, parts (parts, heads, keys), to the gradient of a bias (own_sequences, own_heads, keys) with
// any strides but the last's.  An axis of length 1 takes the sum over all sequences, or over the heads of a sequence.
extern "C" __global__ void __launch_bounds__(THREADS)
add_key_sums(float* __restrict__ dbias, const float* __restrict__ sums, long long sequence_apart, long long head_apart,
             int keys, int sequences, int heads, int own_sequences, int own_heads, int parts) {
    const long long i = (long long)blockIdx.x * THREADS + threadIdx.x, slot = i / keys;
    if (slot >= (long long)own_sequences * own_heads)
        return;
    const int key = i % keys, of_sequence = slot / own_heads, of_head = slot % own_heads;
    const int first_sequence = own_sequences > 1 ? of_sequence : 0, first_head = own_heads > 1 ? of_head : 0;
    const int last_sequence = own_sequences > 1 ? of_sequence + 1 : sequences;
    const int last_head = own_heads > 1 ? of_head + 1 : heads;
    float sum = 0;
    for (int sequence = first_sequence; sequence < last_sequence; ++sequence)
        for (int head = first_head; head < last_head; ++head)
            for (int part = 0; part < parts; ++part)
                sum += sums[(((long long)part * sequences + sequence) * heads + head) * keys + key];
    dbias[of_sequence * sequence_apart + of_head * head_apart + key] += sum;
}

// delta = rowsum(dout * out) - dlse; dlse is used only if `with_dlse`.  A row whose out is 0, such as a row without
// keys, has rowsum 0 even if its dout is NaN, as the padding of a batch may be.
extern "C" __global__ void __launch_bounds__(THREADS)
delta(float* delta, const T* __restrict__ dout, const T* __restrict__ out, const float* dlse, long long rows, int dim,
      int lanes, int with_dlse) {
    const long long row = shared_row(lanes);
    const bool inside = row < rows;
    float sum = 0, others = 0;
    for (int column = my_column(lanes); inside && column < dim; column += lanes * VECTOR) {
        const Elements<T, VECTOR> of_out = load<VECTOR>(out + row * dim + column);
        const Elements<T, VECTOR> of_dout = load<VECTOR>(dout + row * dim + column);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const float value = to_float(of_out.element[e]);
            sum += to_float(of_dout.element[e]) * value;
            others += value != 0;
        }
    }
    sum = row_sum(sum, lanes), others = row_sum(others, lanes);
    if (inside && threadIdx.x % lanes == 0)
        delta[row] = (others ? sum : 0) - (with_dlse ? dlse[row] : 0);
}

// An out with rowsum(dout * out) = delta: dout * delta / |dout|^2.  It is for a library that computes delta itself.
// Where delta is that of an attention's out, no row is longer than that out.  A row of dout that is 0 has delta 0.
// lanes * VECTOR is dim or more.
extern "C" __global__ void __launch_bounds__(THREADS)
out_of_delta(T* __restrict__ out, const T* __restrict__ dout, const float* __restrict__ delta, long long rows, int dim,
             int lanes) {
    const long long row = shared_row(lanes);
    const int column = my_column(lanes);
    const bool inside = row < rows && column < dim;
    Elements<T, VECTOR> read = {};
    if (inside)
        read = load<VECTOR>(dout + row * dim + column);
    float largest = 0;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e)
        largest = fmaxf(largest, fabsf(to_float(read.element[e])));
    for (int mask = lanes / 2; mask; mask /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, mask));
    // Squares of numbers in units of the largest neither overflow nor vanish; nor does the unit's inverse.
    const float inverse = largest < 0x1p-100f ? 0x1p100f : largest > 0x1p100f ? 0x1p-100f : 1 / largest;
    float value[VECTOR], sum = 0;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
        value[e] = to_float(read.element[e]) * inverse;
        sum += value[e] * value[e];
    }
    sum = row_sum(sum, lanes);
    if (!inside)
        return;
    const float factor = sum == 0 ? 0 : delta[row] * inverse / sum;
    Elements<T, VECTOR> written;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e)
        written.element[e] = Element<T>::round(value[e] * factor);
    store<VECTOR>(out + row * dim + column, written);
}

// Adds one key of score sinks[head] and value 0 to every query of a head.  out of a row without other keys stays 0.
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

// gradient[head] = -sum over tokens of exp(sinks - lse) * delta.  One block per head, in a fixed order of summation.
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
