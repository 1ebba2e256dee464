// Products of a warp's rows with tiles in shared memory.  Results and left operands have the layout of warp.cuh.
//
//     Product<T>::with_rows       c += A B^T     A, B tiles, both with the inner dimension along their rows: scores
//     Product<T>::with_columns    c += W B       W in registers, rounded to T where T is 16 bits wide: outputs
//     Product<T>::of_tiles        c += A B       A, B tiles of 16-bit elements
//     product_of_seen             c += W B       leaving out pairs that are not seen, for a B that is not finite
//     product_of_seen_tiles       c += A B       the same
//
// A warp has 16 * M rows, in A those from a_row on.  with_rows uses 8 * N rows of B, from b_row on, and the first DEPTH
// columns of both; the others use the columns of B from `first` on.

#pragma once

#include "tile.cuh"

template <int M, int N>
__device__ __forceinline__ void set_zero(float (&c)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                c[m][n][i] = 0;
}

// Whether products unroll their loop over DEPTH columns.  That takes fewer instructions, but more registers for
// addresses.
__device__ constexpr bool unrolls(int depth) {
#if __CUDA_ARCH__ >= 1000
    return false;  // the compiler for these GPUs would spill registers
#else
    return depth <= 256;
#endif
}

// T is f16 or bf16: tensor cores.
template <class T>
struct Product {
    template <class A, class B, int DEPTH = A::COLUMNS, bool UNROLL = unrolls(DEPTH), int M, int N>
    static __device__ __forceinline__ void with_rows(float (&c)[M][N][4], unsigned a, int a_row, unsigned b,
                                                     int b_row = 0) {
        const int lane = lane_index();
        const unsigned a_at = A::at(a, a_row + lane % 16, lane / 16 * 8);
        const unsigned b_at = B::at(b, b_row + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
#pragma unroll(UNROLL ? 16 : 2)
        for (int k = 0; k < DEPTH; k += 16) {
            unsigned left[M][4];
#pragma unroll
            for (int m = 0; m < M; ++m)
                load_matrices(left[m], A::right_of(a_at, k / 8) + 16 * m * A::PITCH);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                unsigned right[4];
                load_matrices(right, B::right_of(b_at, k / 8) + 8 * n * B::PITCH);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    multiply_add(T{}, c[m][n], left[m], right[0], right[1]);
                    multiply_add(T{}, c[m][n + 1], left[m], right[2], right[3]);
                }
            }
        }
    }

    // W is 16 * M x 8 * K, B has 8 * K rows.
    template <class B, int M, int N, int K>
    static __device__ __forceinline__ void with_columns(float (&c)[M][N][4], const float (&w)[M][K][4], unsigned b,
                                                        int first) {
        with_left<B, K>(c, b, first, [&](int k, unsigned (&left)[M][4]) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    left[m][i] = Element<T>::pack(w[m][k + i / 2][i % 2 * 2], w[m][k + i / 2][i % 2 * 2 + 1]);
        });
    }

    // A has as many columns as B has rows.
    template <class A, class B, int M, int N>
    static __device__ __forceinline__ void of_tiles(float (&c)[M][N][4], unsigned a, int a_row, unsigned b, int first) {
        const unsigned lane = thread_index_anew() % 32;
        const unsigned a_at = A::at(a, a_row + lane % 16, lane / 16 * 8);
        with_left<B, A::COLUMNS / 8>(c, b, first, [&](int k, unsigned (&left)[M][4]) {
#pragma unroll
            for (int m = 0; m < M; ++m)
                load_matrices(left[m], A::right_of(a_at, k) + 16 * m * A::PITCH);
        });
    }

    // left_of(k, left) gets the 16 columns of the left operand from 8 * k on.
    template <class B, int K, int M, int N, class Left>
    static __device__ __forceinline__ void with_left(float (&c)[M][N][4], unsigned b, int first, Left left_of) {
        const unsigned lane = thread_index_anew() % 32;  // else registers hold addresses over the loop
        const unsigned b_at = B::at(b, lane % 16, lane / 16 * 8);
#pragma unroll
        for (int k = 0; k < K; k += 2) {
            unsigned left[M][4];
            left_of(k, left);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                unsigned right[4];
                load_matrices_transposed(right, B::right_of(b_at, first / 8 + n) + 8 * k * B::PITCH);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    multiply_add(T{}, c[m][n], left[m], right[0], right[1]);
                    multiply_add(T{}, c[m][n + 1], left[m], right[2], right[3]);
                }
            }
        }
    }
};

// float: FMAs, because tensor cores would round the operands to 11 bits.
template <>
struct Product<float> {
    template <class A, class B, int DEPTH = A::COLUMNS, bool UNROLL = false, int M, int N>
    static __device__ __forceinline__ void with_rows(float (&c)[M][N][4], unsigned a, int a_row, unsigned b,
                                                     int b_row = 0) {
        const int row = lane_index() / 4, column = b_row + lane_index() % 4 * 2;
#pragma unroll 2
        for (int k = 0; k < DEPTH; k += 4) {
            float4 left[M][2];
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    left[m][h] = shared_at<float4>(A::at(a, a_row + 16 * m + 8 * h + row, k));
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float4 right = shared_at<float4>(B::at(b, 8 * n + column + e, k));
#pragma unroll
                    for (int m = 0; m < M; ++m)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            float& sum = c[m][n][2 * h + e];
                            sum += left[m][h].x * right.x;
                            sum += left[m][h].y * right.y;
                            sum += left[m][h].z * right.z;
                            sum += left[m][h].w * right.w;
                        }
                }
        }
    }

    template <class B, int M, int N, int K>
    static __device__ __forceinline__ void with_columns(float (&c)[M][N][4], const float (&w)[M][K][4], unsigned b,
                                                        int first) {
        const int quad = lane_index() / 4 * 4, column = first + lane_index() % 4 * 2;
#pragma unroll
        for (int k = 0; k < K; ++k)
#pragma unroll 1
            for (int source = 0; source < 4; ++source)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float left[M][2];
#pragma unroll
                    for (int m = 0; m < M; ++m)
#pragma unroll
                        for (int h = 0; h < 2; ++h)
                            left[m][h] = __shfl_sync(ALL_LANES, w[m][k][2 * h + e], quad + source);
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        const float2 right = pair_at<float>(B::at(b, 8 * k + 2 * source + e, column + 8 * n));
#pragma unroll
                        for (int m = 0; m < M; ++m)
#pragma unroll
                            for (int h = 0; h < 2; ++h) {
                                c[m][n][2 * h] += left[m][h] * right.x;
                                c[m][n][2 * h + 1] += left[m][h] * right.y;
                            }
                    }
                }
    }
};

// c += left * B's row j, for the rows of c that see it.
template <class B, int M, int N>
__device__ __forceinline__ void add_row_of_seen(float (&c)[M][N][4], const float (&left)[M][2],
                                                const bool (&seen)[M][2], unsigned b, int j, int column) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float2 right = pair_at<typename B::Type>(B::at(b, j, column + 8 * n));
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                c[m][n][2 * h] += seen[m][h] ? left[m][h] * right.x : 0;
                c[m][n][2 * h + 1] += seen[m][h] ? left[m][h] * right.y : 0;
            }
    }
}

// As with_columns, but pairs for which sees(m, h, j) is false are not multiplied, because 0 * NaN is NaN.  Such tiles
// are rare.  The arguments of sees stand for this lane's row 16 * m + 8 * h + lane / 4 and row j of B.
//
// W is destroyed: it is shifted through its first eight columns, which keeps the loop short and register indices
// constant.
template <class B, int M, int N, int K, class Sees>
__device__ __forceinline__ void product_of_seen(float (&c)[M][N][4], float (&w)[M][K][4], unsigned b, int first,
                                                Sees sees) {
    const int quad = lane_index() / 4 * 4, column = first + lane_index() % 4 * 2;
#pragma unroll 1
    for (int j = 0; j < 8 * K; j += 8) {
#pragma unroll 1
        for (int source = 0; source < 4; ++source)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float left[M][2];
                bool seen[M][2];
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        left[m][h] = __shfl_sync(ALL_LANES, w[m][0][2 * h + e], quad + source);
                        seen[m][h] = sees(m, h, j + 2 * source + e);
                    }
                add_row_of_seen<B>(c, left, seen, b, j + 2 * source + e, column);
            }
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int k = 0; k + 1 < K; ++k)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    w[m][k][i] = w[m][k + 1][i];
    }
}

// As of_tiles, for the same pairs.
template <class A, class B, int M, int N, class Sees>
__device__ __forceinline__ void product_of_seen_tiles(float (&c)[M][N][4], unsigned a, int a_row, unsigned b, int first,
                                                      Sees sees) {
    const int row = a_row + lane_index() / 4, column = first + lane_index() % 4 * 2;
#pragma unroll 1
    for (int j = 0; j < A::COLUMNS; ++j) {
        float left[M][2];
        bool seen[M][2];
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                left[m][h] = to_float(shared_at<typename A::Type>(A::at(a, row + 16 * m + 8 * h, j)));
                seen[m][h] = sees(m, h, j);
            }
        add_row_of_seen<B>(c, left, seen, b, j, column);
    }
}
