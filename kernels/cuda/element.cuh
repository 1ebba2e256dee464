// The element types of arrays, and their conversion to and from float.  -DELEMENT= is the type of a kernel's inputs.

#pragma once

struct f16 {
    unsigned short bits;
};
struct bf16 {
    unsigned short bits;
};

#include "ptx.cuh"

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ __forceinline__ float to_float(f16 x) { return float_of_f16(x.bits); }

template <class T>
struct Element;

template <>
struct Element<float> {
    static constexpr unsigned EXPONENT = 0x7f800000;       // exponent bits; all ones: not finite
    static __device__ __forceinline__ float round(float x) { return x; }
};

template <>
struct Element<f16> {
    static constexpr unsigned EXPONENT = 0x7c007c00;       // of both elements in a word
    static __device__ __forceinline__ unsigned pack(float low, float high) { return pack_f16(low, high); }
    static __device__ __forceinline__ f16 round(float x) { return {(unsigned short)(pack_f16(x, 0))}; }
};

template <>
struct Element<bf16> {
    static constexpr unsigned EXPONENT = 0x7f807f80;
    static __device__ __forceinline__ unsigned pack(float low, float high) { return pack_bf16(low, high); }
    static __device__ __forceinline__ bf16 round(float x) { return {(unsigned short)(pack_bf16(x, 0))}; }
};

// Whether a word of T holds an element that is not finite.
template <class T>
__device__ __forceinline__ bool not_finite(unsigned word) {
    constexpr unsigned low = Element<T>::EXPONENT & 0xffff, high = Element<T>::EXPONENT & 0xffff0000;
    return (low && (word & low) == low) || (word & high) == high;
}

// COUNT consecutive elements in global memory, read and written up to 16 bytes at a time.
template <class T, int COUNT>
struct alignas(COUNT * sizeof(T) < 16 ? COUNT * sizeof(T) : 16) Elements {
    T element[COUNT];
};

template <int COUNT, class T>
__device__ __forceinline__ Elements<T, COUNT> load(const T* from) {
    return global_at<const Elements<T, COUNT>>(from);
}

template <int COUNT, class T>
__device__ __forceinline__ void store(T* to, const Elements<T, COUNT>& elements) {
    global_at<Elements<T, COUNT>>(to) = elements;
}

// Two consecutive elements in shared memory, as floats.
template <class T>
__device__ __forceinline__ float2 pair_at(unsigned offset) {
    const unsigned word = shared_at<unsigned>(offset);
    return make_float2(to_float(T{(unsigned short)word}), to_float(T{(unsigned short)(word >> 16)}));
}

template <>
__device__ __forceinline__ float2 pair_at<float>(unsigned offset) {
    return shared_at<float2>(offset);
}
