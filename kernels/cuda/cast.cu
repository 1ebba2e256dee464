// dst = src, cast from ELEMENT to TARGET.  Both have shape (n0, n1, n2, n3) and any strides, in elements.
//
// A thread casts VECTOR elements of the last axis at a time; if VECTOR > 1, that axis is contiguous in both arrays.
// -DINDEX=unsigned is for arrays whose number of elements fits 32 bits.
//
// grid: any, in one dimension.
// block: THREADS threads.
// shared memory: none.
// tile sizes: none.

#include "element.cuh"

extern "C" __global__ void
__launch_bounds__(THREADS)
cast(TARGET* __restrict__ dst, const ELEMENT* __restrict__ src, long long n0, long long n1, long long n2, long long n3,
     long long d0, long long d1, long long d2, long long d3, long long s0, long long s1, long long s2, long long s3) {
    const INDEX last = n3 / VECTOR, rows = n0 * n1 * n2, size = rows * last, step = INDEX(gridDim.x) * THREADS;
    for (INDEX i = INDEX(blockIdx.x) * THREADS + threadIdx.x; i < size; i += step) {
        long long to, from;
        if (rows == 1) {
            to = i * VECTOR * d3, from = i * VECTOR * s3;
        } else {
            const INDEX row = i / last, i3 = (i - row * last) * VECTOR, line = row / INDEX(n2), i2 = row - line * INDEX(n2);
            const INDEX i0 = line / INDEX(n1), i1 = line - i0 * INDEX(n1);
            to = i0 * d0 + i1 * d1 + i2 * d2 + i3 * d3, from = i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3;
        }
        const Elements<ELEMENT, VECTOR> read = load<VECTOR>(src + from);
        Elements<TARGET, VECTOR> written;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            written.element[e] = Element<TARGET>::round(to_float(read.element[e]));
        store<VECTOR>(dst + to, written);
    }
}
