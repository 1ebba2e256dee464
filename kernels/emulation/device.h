// The parts of the CUDA language that the kernels use, on top of fibers: qualifiers, indices, barriers, shuffles,
// votes.
//
// grid and block: those of the emulated launch; a block has one dimension.
// shared memory: emulation::block.shared, a host array.
// tile sizes: those that the kernel is compiled with.

#pragma once

#include <algorithm>
#include <cmath>

#include "fibers.h"

#define EMULATED 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict

#define threadIdx (emulation::Index{unsigned(emulation::block.current), 0, 0})
#define blockIdx (emulation::block.index)
#define gridDim (emulation::block.grid)
#define blockDim (emulation::Index{emulation::block.threads, 1, 1})

struct alignas(8) float2 {
    float x, y;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

using std::max;
using std::min;

inline int __syncthreads_or(int flag) {
    emulation::Meeting& all = emulation::block.all;
    all.flag |= flag != 0;
    emulation::meet(all, emulation::block.threads, "__syncthreads", [&] {
        all.flag_result = all.flag;
        all.flag = 0;
    });
    return all.flag_result;
}

inline void __syncthreads() {
    __syncthreads_or(0);
}

inline void __syncwarp(unsigned = ~0u) {
    emulation::warp_operation("__syncwarp", nullptr, nullptr, [] {});
}

// Lane i gets the value of the lane that it names as `source`; value and source are the operands of each lane.
template <class T>
inline T emulated_shuffle(const char* operation, T value, int source) {
    struct {
        T value;
        int source;
    } in{value, source};
    using In = decltype(in);
    T out;
    emulation::warp_operation(operation, &in, &out, [] {
        for (int i = 0; i < emulation::LANES; ++i) {
            emulation::Thread& to = emulation::lane_of_warp(i);
            const int from = static_cast<const In*>(to.in)->source & (emulation::LANES - 1);
            *static_cast<T*>(to.out) = static_cast<const In*>(emulation::lane_of_warp(from).in)->value;
        }
    });
    return out;
}

template <class T>
inline T __shfl_sync(unsigned, T value, int source) {
    return emulated_shuffle("__shfl_sync", value, source);
}

template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulated_shuffle("__shfl_xor_sync", value, emulation::lane() ^ mask);
}

inline unsigned __ballot_sync(unsigned, bool flag) {
    unsigned out;
    emulation::warp_operation("__ballot_sync", &flag, &out, [] {
        unsigned votes = 0;
        for (int i = 0; i < emulation::LANES; ++i)
            votes |= unsigned(*static_cast<const bool*>(emulation::lane_of_warp(i).in)) << i;
        for (int i = 0; i < emulation::LANES; ++i)
            *static_cast<unsigned*>(emulation::lane_of_warp(i).out) = votes;
    });
    return out;
}

inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline float __uint_as_float(unsigned x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
inline unsigned __float_as_uint(float x) {
    unsigned y;
    memcpy(&y, &x, 4);
    return y;
}
