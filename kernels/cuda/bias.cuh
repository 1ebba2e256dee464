// A bias of scores: numbers by sequence, head, token and key.  Its gradient is in bias_gradient.cuh.
//
// -DBIAS= says how many numbers of a row are read at a time: 2 if all rows begin and end so that they can be, else 1;
// 0, or nothing, if there is no bias.  Its elements are of type BIAS_ELEMENT.  An axis of length 1 has the stride 0.  A
// row's numbers lie one after another.
//
// A lane reads what it needs where it needs it, in the register layout of scores (warp.cuh).  A row's 8 columns are 32
// bytes of float32, a whole sector of memory, which its four lanes read two numbers at a time.  A tile in shared memory
// would read the same sectors, and take the room of K; bfloat16 rows that begin anywhere could not be copied there
// asynchronously at all.  Where products are added up by tensor cores and nothing bends the scores, the bias is what
// the sums begin with: the registers that wait for it are needed anyway, and forward it is on its way while K arrives.

#pragma once

#include "rows.cuh"
#include "softmax.cuh"

// bias_unit is 1 in units of transformed scores (softmax.cuh), which are then multiplied by `factor`.
//
// The names of arguments that a kernel does not have stand for constants, which the compiler folds.
#if BIAS
#define BIAS_ARGUMENTS                                                                             \
    , const BIAS_ELEMENT *__restrict__ bias_numbers, long long bias_sequence, long long bias_head, \
        long long bias_token, int bias_heads, float bias_unit
#else
#define BIAS 0
#define BIAS_ELEMENT float
#define BIAS_ARGUMENTS
constexpr const float* bias_numbers = nullptr;
constexpr long long bias_sequence = 0, bias_head = 0, bias_token = 0;
constexpr int bias_heads = 1;
constexpr float bias_unit = 0;
#endif

constexpr bool BIAS_FIRST = BIAS && SCORE == 0 && sizeof(ELEMENT) == 2;  // float32 scores would be rounded more
constexpr bool BIAS_LAST = BIAS && !BIAS_FIRST;

// Numbers of the packed rows of a KV head.
template <class E>
struct Numbers {
    E* first;  // of the first row
    long long head, token;  // distances

    // sequence: of the rows.  of_head: of the first of them, within the sequence.
    __device__ __forceinline__ Numbers(E* numbers, long long sequences_apart, long long head_, long long token_,
                                       int sequence, int of_head)
        : first(numbers + sequence * sequences_apart + of_head * head_), head(head_), token(token_) {}
    __device__ __forceinline__ E* row(int r) const { return first + Rows::token(r) * token + r % HEADS_PER_KV * head; }
};
using Bias = Numbers<const BIAS_ELEMENT>;

// A lane's numbers of a row, in its columns of N pieces of 8, of which the first is column `first` of the row.  Columns
// from `count` on, which no row sees, get what some other column has.  With pairs, `first` and `count` are even.
template <int N>
__device__ __forceinline__ void read_row(float2 (&to)[N], const BIAS_ELEMENT* row, int first, int count) {
    const int column = first + thread_index_anew() % 4 * 2;
    const auto read = [&](const BIAS_ELEMENT* at, const BIAS_ELEMENT* next) {
        if (BIAS == 1)
            return make_float2(to_float(*at), to_float(*next));
        const Elements<BIAS_ELEMENT, 2> pair = load<2>(at);
        return make_float2(to_float(pair.element[0]), to_float(pair.element[1]));
    };
    if (first + 8 * N <= count) {
#pragma unroll
        for (int n = 0; n < N; ++n)
            to[n] = read(row + column + 8 * n, row + column + 8 * n + 1);
    } else {
#pragma unroll
        for (int n = 0; n < N; ++n)
            to[n] = read(row + min(column + 8 * n, count - BIAS), row + min(column + 8 * n + 1, count - 1));
    }
}

// This lane's first row of a tile whose rows are divided among SETS warps, 16 * M each.  Read anew where it is needed:
// addresses that were kept over the loop would take registers from the sums.
template <int M, int SETS>
__device__ __forceinline__ int row_anew(int first) {
    const int thread = thread_index_anew();
    return first + thread / 32 % SETS * 16 * M + thread % 32 / 4;
}

// Adds the bias in some unit to scores of the packed rows from `row` on, those of this lane 8 apart, and the columns
// from `first` on.  Rows from `rows` on get what the last row has, and nobody wants.
template <int M, int N>
__device__ __forceinline__ void add_bias(float (&score)[M][N][4], const Bias& bias, int row, int rows, int first,
                                         int count, float unit) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float2 of[N];
            read_row(of, bias.row(min(row + 16 * m + 8 * h, rows - 1)), first, count);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                score[m][n][2 * h] = fmaf(of[n].x, unit, score[m][n][2 * h]);
                score[m][n][2 * h + 1] = fmaf(of[n].y, unit, score[m][n][2 * h + 1]);
            }
        }
}

// The bias of a packed row and a key; 0 from row `rows` on, whose weights must stay finite.  Keys from `keys` on get
// what the last key has.  A warp's scores of gradient_kv have keys along rows: eight lanes read a row's eight numbers.
__device__ __forceinline__ float number_of_key(const Bias& bias, int row, int rows, int key, int keys) {
    return row < rows ? to_float(bias.row(row)[min(key, keys - 1)]) : 0;
}

// As add_bias, where keys lie along rows.
template <int M, int N>
__device__ __forceinline__ void add_bias_of_keys(float (&score)[M][N][4], const Bias& bias, int first, int rows,
                                                 int key, int keys, float unit) {
    const int column = first + lane_index() % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 2 * M * 2; ++i) {
            const int e = i / M / 2, m = i / 2 % M, h = i % 2;
            const float of = number_of_key(bias, column + 8 * n + e, rows, key + 16 * m + 8 * h, keys);
            score[m][n][2 * h + e] = fmaf(of, unit, score[m][n][2 * h + e]);
        }
}
