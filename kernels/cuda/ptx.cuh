// Functions for the instructions that CUDA C++ cannot express.  All PTX of these kernels is in this file;
// kernels/emulation/instructions.h has the same functions for a CPU.
//
// Addresses in shared memory are byte offsets into the block's dynamic shared memory.

#pragma once

#ifdef EMULATED
#include "instructions.h"
#else

extern __shared__ __align__(128) unsigned char shared_memory[];

__device__ __forceinline__ unsigned shared_address(unsigned offset) {
    return unsigned(__cvta_generic_to_shared(shared_memory)) + offset;
}

template <class V>
__device__ __forceinline__ V& shared_at(unsigned offset) {
    return *reinterpret_cast<V*>(shared_memory + offset);
}

// Several numbers in global memory, which are read or written in one instruction: the emulation checks the alignment.
template <class V>
__device__ __forceinline__ V& global_at(const void* address) {
    return *static_cast<V*>(const_cast<void*>(address));
}

// The thread's index, read again each time, so that the compiler does not keep derived addresses in registers over a
// loop.
__device__ __forceinline__ unsigned thread_index_anew() {
    unsigned index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// The same of the thread block's index in the grid's third dimension.
__device__ __forceinline__ unsigned block_z_anew() {
    unsigned index;
    asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(index));
    return index;
}

// Asynchronous copies of 16 or 4 bytes from global to shared memory.  If not `valid`, they write zeros and read
// nothing.

__device__ __forceinline__ void copy_async_16(unsigned to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_async_4(unsigned to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(valid ? 4 : 0)
                 : "memory");
}

// commit_copies() makes the copies since its last call a group.  wait_copies<n>() returns when all of this thread's
// groups but the latest n are done.

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ldmatrix: four 8x8 matrices of 16-bit elements.  Lane i passes the address of row i % 8 of matrix i / 8.  In r[j] it
// gets two elements of matrix j: (i / 4, 2 * (i % 4)) and the next one in the row; transposed, (2 * (i % 4), i / 4) and
// the one below.

__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// mma.m16n8k16: c += A B, with A 16x16, B 16x8 by columns, c 16x8.  Lane i holds the element
// (i / 4 + 8 * h, 2 * (i % 4) + e) of c in c[2 * h + e].

__device__ __forceinline__ void multiply_add(f16, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_add(bf16, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x with an error of at most 2 ulp; subnormal numbers become 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float float_of_f16(unsigned short bits) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}

// Two floats, rounded to nearest even and packed into a word.

__device__ __forceinline__ unsigned pack_f16(float low, float high) {
    unsigned y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
    unsigned y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

#endif
