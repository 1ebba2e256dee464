// A thread's lane and warp index, and reductions over lanes.
//
// Results of products have the register layout of mma.m16n8k16: of a 16x8 piece, lane i holds the element
// (i / 4 + 8 * h, 2 * (i % 4) + e) in c[2 * h + e].  The four lanes of a row are a quad.

#pragma once

constexpr unsigned ALL_LANES = 0xffffffff;

__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_index() { return threadIdx.x / 32; }

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

// The sum over a warp, in the same order on every lane.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
}
