// The functions of kernels/cuda/ptx.cuh on a CPU.
//
// grid and block: those of the emulated launch.
// shared memory: every access is checked against its size and alignment; wide ones in global memory, their alignment.
// tile sizes: those of the instructions, 16x8x16 for mma and 8x8 for ldmatrix.

#pragma once

#include "device.h"
#include "hazards.h"
#include "operations.h"

using emulation::commit_copies;
using emulation::float_of_f16;
using emulation::load_matrices;
using emulation::load_matrices_transposed;
using emulation::pack_bf16;
using emulation::pack_f16;

// A value in shared memory, of which reading and writing are told apart.
template <class V>
struct SharedValue {
    unsigned offset;

    V& bytes() const { return *reinterpret_cast<V*>(emulation::shared_bytes(offset, sizeof(V), "an access")); }
    operator V() const {
        const V value = bytes();
        emulation::read_shared(offset, sizeof(V));
        return value;
    }
    void operator=(const V& value) const {
        V& to = bytes();
        emulation::write_shared(offset, sizeof(V));
        to = value;
    }
};

template <class V>
inline SharedValue<V> shared_at(unsigned offset) {
    return {offset};
}

template <class V>
inline V& global_at(const void* address) {
    if (reinterpret_cast<size_t>(address) % alignof(V))
        emulation::fail("an access in global memory at an address that is not a multiple of %zu", alignof(V));
    return *static_cast<V*>(const_cast<void*>(address));
}

inline unsigned thread_index_anew() { return threadIdx.x; }
inline unsigned block_z_anew() { return blockIdx.z; }

inline void copy_async_16(unsigned to, const void* from, bool valid) { emulation::copy_async(to, from, 16, valid); }
inline void copy_async_4(unsigned to, const void* from, bool valid) { emulation::copy_async(to, from, 4, valid); }

template <int PENDING>
inline void wait_copies() {
    emulation::wait_copies(PENDING);
}

inline void multiply_add(f16, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    emulation::multiply_add_f16(c, a, b0, b1);
}
inline void multiply_add(bf16, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    emulation::multiply_add_bf16(c, a, b0, b1);
}

inline float exp2_fast(float x) {
    const float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;
}
