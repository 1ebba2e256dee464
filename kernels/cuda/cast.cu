// dst = src, cast from ELEMENT to TARGET; both of shape (n0, n1, n2, n3) with any strides, in elements.

#include "element.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
cast(TARGET* __restrict__ dst, const ELEMENT* __restrict__ src, long long n0, long long n1, long long n2, long long n3,
     long long d0, long long d1, long long d2, long long d3, long long s0, long long s1, long long s2, long long s3) {
    const long long size = n0 * n1 * n2 * n3, step = (long long)gridDim.x * THREADS;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < size; i += step) {
        const long long i3 = i % n3, i2 = i / n3 % n2, i1 = i / n3 / n2 % n1, i0 = i / n3 / n2 / n1;
        dst[i0 * d0 + i1 * d1 + i2 * d2 + i3 * d3] =
            Element<TARGET>::round(to_float(src[i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3]));
    }
}
