// The functions of kernels/cuda/ptx.cuh on a CPU.
//
// An asynchronous copy writes poison when it is issued and its data when the thread waits for it, so that a missing
// wait shows.  mma sums in float32 in the order of the inner dimension; a GPU sums in another order.
//
// grid and block: those of the emulated launch.
// shared memory: every access is checked against its size and alignment.
// tile sizes: those of the instructions, 16x8x16 for mma and 8x8 for ldmatrix.

#pragma once

#include <array>

#include "device.h"

namespace emulation {

inline unsigned char* shared_bytes(unsigned offset, unsigned bytes, const char* what) {
    if (offset % bytes || offset + bytes > block.shared_bytes)
        fail(std::string(what) + " at byte " + std::to_string(offset) + " of " + std::to_string(block.shared_bytes)
             + " of shared memory");
    return block.shared.data() + offset;
}

inline float f16_to_float(unsigned short bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float sign = bits >> 15 ? -1.0f : 1.0f;
    if (exponent == 31)
        return mantissa ? __uint_as_float(0x7fc00000 | bits >> 15 << 31) : sign * INFINITY;
    return sign * (exponent ? ldexpf(float(1024 + mantissa), exponent - 25) : ldexpf(float(mantissa), -24));
}

inline const std::array<float, 65536>& f16_table() {
    static const std::array<float, 65536> table = [] {
        std::array<float, 65536> made;
        for (unsigned i = 0; i < made.size(); ++i)
            made[i] = f16_to_float(i);
        return made;
    }();
    return table;
}

inline unsigned short float_to_f16(float x) {
    const unsigned sign = __float_as_uint(x) >> 31 << 15;
    const float size = std::fabs(x);
    if (std::isnan(x))
        return 0x7fff;
    if (size >= 65520.0f)
        return sign | 0x7c00;
    if (size < 6.103515625e-5f)                                      // subnormal: a multiple of 2^-24
        return sign | unsigned(nearbyintf(size * 16777216.0f));
    const unsigned bits = __float_as_uint(size), half = bits >> 13, rest = bits & 0x1fff;
    return sign | (half - (112 << 10) + (rest > 0x1000 || (rest == 0x1000 && (half & 1))));
}

inline unsigned short float_to_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float decode(const f16*, unsigned short bits) { return f16_table()[bits]; }
inline float decode(const bf16*, unsigned short bits) { return __uint_as_float(unsigned(bits) << 16); }

template <class T>
inline float decode_half(unsigned word, int high) {
    return decode(static_cast<const T*>(nullptr), static_cast<unsigned short>(word >> 16 * high));
}

struct Multiply {
    float* c;
    const unsigned* a;
    unsigned b[2];
};

// Assembles A, B and c from the lanes, multiplies, and writes c back.  Word j of lane i holds two elements: of A, row
// i / 4 + 8 * (j % 2), columns 2 * (i % 4) + 8 * (j / 2) and the next; of B, rows 2 * (i % 4) + 8 * j and the next,
// column i / 4.
template <class T>
inline void multiply_warp() {
    float a[16][16], b[16][8], c[16][8];
    for (int i = 0; i < LANES; ++i) {
        const Multiply& of = *static_cast<const Multiply*>(lane_of_warp(i).in);
        const int row = i / 4, column = 2 * (i % 4);
        for (int e = 0; e < 2; ++e) {
            for (int j = 0; j < 4; ++j)
                a[row + 8 * (j % 2)][column + 8 * (j / 2) + e] = decode_half<T>(of.a[j], e);
            for (int j = 0; j < 2; ++j) {
                b[column + 8 * j + e][row] = decode_half<T>(of.b[j], e);
                c[row + 8 * j][column + e] = of.c[2 * j + e];
            }
        }
    }
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k)
            for (int column = 0; column < 8; ++column)
                c[row][column] += a[row][k] * b[k][column];
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < 4; ++j)
            static_cast<const Multiply*>(lane_of_warp(i).in)->c[j] = c[i / 4 + 8 * (j / 2)][2 * (i % 4) + j % 2];
}

template <class T>
inline void multiply_add(const char* operation, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const Multiply in{c, a, {b0, b1}};
    warp_operation(operation, &in, nullptr, multiply_warp<T>);
}

// Half e of word j of lane i gets element (i / 4, 2 * (i % 4) + e) of matrix j; transposed, the mirrored element.
template <bool TRANSPOSED>
inline void load_matrices(const char* operation, unsigned (&r)[4], unsigned row) {
    warp_operation(operation, &row, r, [] {
        for (int i = 0; i < LANES; ++i)
            for (int j = 0; j < 4; ++j) {
                unsigned short half[2];
                for (int e = 0; e < 2; ++e) {
                    const int across = i / 4, along = 2 * (i % 4) + e;
                    const int from = TRANSPOSED ? along : across, at = TRANSPOSED ? across : along;
                    const unsigned start = *static_cast<const unsigned*>(lane_of_warp(8 * j + from).in);
                    memcpy(&half[e], shared_bytes(start, 16, "ldmatrix") + 2 * at, 2);
                }
                static_cast<unsigned*>(lane_of_warp(i).out)[j] = half[0] | unsigned(half[1]) << 16;
            }
    });
}

inline void copy_async(unsigned to, const void* from, unsigned bytes, bool valid) {
    if (reinterpret_cast<size_t>(from) % bytes)
        fail("an asynchronous copy from an address that is not a multiple of " + std::to_string(bytes));
    memset(shared_bytes(to, bytes, "an asynchronous copy"), 0xff, bytes);
    self().copies.push_back({to, valid ? from : nullptr, bytes});
}

inline void finish(const std::vector<AsyncCopy>& copies) {
    for (const AsyncCopy& copy : copies)
        if (copy.from)
            memcpy(block.shared.data() + copy.to, copy.from, copy.bytes);
        else
            memset(block.shared.data() + copy.to, 0, copy.bytes);
}

}  // namespace emulation

template <class V>
inline V& shared_at(unsigned offset) {
    return *reinterpret_cast<V*>(emulation::shared_bytes(offset, sizeof(V), "an access"));
}

inline int thread_index_anew() { return threadIdx.x; }

inline void copy_async_16(unsigned to, const void* from, bool valid) { emulation::copy_async(to, from, 16, valid); }
inline void copy_async_4(unsigned to, const void* from, bool valid) { emulation::copy_async(to, from, 4, valid); }

inline void commit_copies() {
    emulation::Thread& me = emulation::self();
    me.groups.push_back(std::move(me.copies));
    me.copies.clear();
}

template <int PENDING>
inline void wait_copies() {
    emulation::Thread& me = emulation::self();
    while (me.groups.size() > PENDING) {
        emulation::finish(me.groups.front());
        me.groups.erase(me.groups.begin());
    }
}

inline void load_matrices(unsigned (&r)[4], unsigned row) { emulation::load_matrices<false>("ldmatrix", r, row); }
inline void load_matrices_transposed(unsigned (&r)[4], unsigned row) {
    emulation::load_matrices<true>("ldmatrix.trans", r, row);
}

inline void multiply_add(f16, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    emulation::multiply_add<f16>("mma", c, a, b0, b1);
}
inline void multiply_add(bf16, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    emulation::multiply_add<bf16>("mma", c, a, b0, b1);
}

inline float exp2_fast(float x) {
    const float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;
}

inline float float_of_f16(unsigned short bits) { return emulation::f16_table()[bits]; }
inline unsigned pack_f16(float low, float high) {
    return emulation::float_to_f16(low) | unsigned(emulation::float_to_f16(high)) << 16;
}
inline unsigned pack_bf16(float low, float high) {
    return emulation::float_to_bf16(low) | unsigned(emulation::float_to_bf16(high)) << 16;
}
