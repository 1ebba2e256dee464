// Which weights are dropped: Philox4x32-10 (Salmon et al., SC11) of positions, as mpiattn/backends/block.py defines it.
//
// -DDROPOUT=1 if there is dropout.  Keys that lie one after another in the sequence share the four words of a counter,
// so the words of two neighbouring columns are made at once where that is so.

#pragma once

#include "rows.cuh"

// As in bias.cuh.
#if DROPOUT
#define DROPOUT_ARGUMENTS                                                                                       \
    , const int *__restrict__ drop_rows, const int *__restrict__ drop_keys, const int *__restrict__ drop_heads, \
        unsigned drop_below, float drop_factor, unsigned seed_low, unsigned seed_high
#else
#define DROPOUT 0
#define DROPOUT_ARGUMENTS
constexpr const int *drop_rows = nullptr, *drop_keys = nullptr, *drop_heads = nullptr;
constexpr unsigned drop_below = 0, seed_low = 0, seed_high = 0;
constexpr float drop_factor = 1;
#endif

__device__ __forceinline__ uint4 philox(unsigned x, unsigned y, unsigned z, unsigned key, unsigned key_high) {
    unsigned w = 0;
#pragma unroll 1  // else the words of many pairs are made at a time, in registers that the sums need
    for (int round = 0; round < 10; ++round) {
        const unsigned long long first = x * 0xD2511F53ull, second = z * 0xCD9E8D57ull;
        x = unsigned(second >> 32) ^ y ^ key, y = unsigned(second);
        z = unsigned(first >> 32) ^ w ^ key_high, w = unsigned(first);
        key += 0x9E3779B9u, key_high += 0xBB67AE85u;
    }
    return make_uint4(x, y, z, w);
}

// The dropout of the packed rows of a KV head.
struct Dropout {
    const int *rows, *keys, *heads;  // positions; numbers of heads, from that of the first row on
    int row_count, key_count;
    unsigned below;  // a weight is dropped whose word is below
    float factor;  // of the other weights
    unsigned seed_low, seed_high;

    __device__ __forceinline__ unsigned key(int j) const { return keys[min(j, key_count - 1)]; }
    __device__ __forceinline__ uint4 words(int row, unsigned key) const {
        const int r = min(row, row_count - 1);
        return philox(key / 4, rows[Rows::token(r)], heads[r % HEADS_PER_KV], seed_low, seed_high);
    }
    __device__ __forceinline__ float factor_of(const uint4& words, unsigned key) const {
        const unsigned low = key & 1 ? words.y : words.x, high = key & 1 ? words.w : words.z;
        return (key & 2 ? high : low) >= below ? factor : 0;
    }
    // What the weight of a packed row and a key is multiplied by.
    __device__ __forceinline__ float of(int row, unsigned key) const { return factor_of(words(row, key), key); }
    // The same of two keys.
    __device__ __forceinline__ float2 of(int row, unsigned key, unsigned next) const {
        uint4 held = words(row, key);
        const float first = factor_of(held, key);
        if (next / 4 != key / 4)
            held = words(row, next);
        return make_float2(first, factor_of(held, next));
    }
};

// Multiplies weights of the packed rows from `row` on, those of this lane 8 apart, and the keys from `first` on.
template <int M, int N>
__device__ __forceinline__ void drop(float (&weight)[M][N][4], const Dropout& dropout, int row, int first) {
    const int column = first + lane_index() % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const unsigned key = dropout.key(column + 8 * n), next = dropout.key(column + 8 * n + 1);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 factors = dropout.of(row + 16 * m + 8 * h, key, next);
                weight[m][n][2 * h] *= factors.x, weight[m][n][2 * h + 1] *= factors.y;
            }
    }
}
