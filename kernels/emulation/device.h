// The parts of the CUDA language that the kernels use, on top of fibers: qualifiers, indices, barriers, shuffles,
// votes.
//
// grid and block: those of the emulated launch; a block has one dimension.
// shared memory: emulation::block.shared, a host array.
// tile sizes: those that the kernel is compiled with.

#pragma once

#include "fibers.h"
#include "hazards.h"

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

template <class T>
inline T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
inline T max(T a, T b) {
    return a < b ? b : a;
}

// Those of the C library that kernels call.  <cmath> takes longer to read than most kernels to compile.
extern "C" {
float exp2f(float) noexcept;
float expf(float) noexcept;
float fabsf(float) noexcept;
float fmaf(float, float, float) noexcept;
float fmaxf(float, float) noexcept;
float log1pf(float) noexcept;
float logf(float) noexcept;
float tanhf(float) noexcept;
}

inline int __syncthreads_or(int flag) { return emulation::barrier(flag != 0); }
inline void __syncthreads() { emulation::barrier(false); }

inline void __syncwarp(unsigned = ~0u) {
    emulation::warp_operation("__syncwarp", nullptr, nullptr, emulation::order_warp);
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
            const int from = static_cast<const In*>(emulation::in_of_lane(i))->source & (emulation::LANES - 1);
            *static_cast<T*>(emulation::out_of_lane(i)) = static_cast<const In*>(emulation::in_of_lane(from))->value;
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
            votes |= unsigned(*static_cast<const bool*>(emulation::in_of_lane(i))) << i;
        for (int i = 0; i < emulation::LANES; ++i)
            *static_cast<unsigned*>(emulation::out_of_lane(i)) = votes;
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
