// Loops of wgmma m64n128k16, two warpgroups a block, one block a multiprocessor.  Operands lie in shared memory from
// the start, so that these are bounds for a kernel that also loads.  Included by hopper.cu.

#pragma once

constexpr int ROWS = 128, KEYS = 128, DIM = 128;  // of a block's tiles

struct Tiles {
    Descriptor q, k, v;  // q: of this warpgroup's 64 rows
};

INSIDE Tiles load_tiles(const Half* q, const Half* k, const Half* v) {
    unsigned char *tile_q = aligned_tiles(), *tile_k = tile_q + ROWS * DIM * 2, *tile_v = tile_k + KEYS * DIM * 2;
    fill(tile_q, q, ROWS, DIM);
    fill(tile_k, k, KEYS, DIM);
    fill(tile_v, v, KEYS, DIM);
    fence_async();
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // uniform, so that descriptors are so too
    return {descriptor(tile_q + warpgroup * 64 * 128, 16, 1024), descriptor(tile_k, 16, 1024),
            descriptor(tile_v, KEYS * 128, 1024)};
}

// The registers of a left operand: 64 rows of q.
INSIDE void load_left(unsigned (&left)[32], const Half* q) {
#pragma unroll
    for (int i = 0; i < 32; ++i)
        left[i] = *(const unsigned*)(q + (threadIdx.x / 128 * 64 + row_of(2 * i)) * DIM + column_of(2 * i));
}

// S += Q K^T again and again, LEFT groups of eight products in flight.
template <bool IN_REGISTERS, int LEFT>
INSIDE void scores_loop(const Half* q, const Tiles& of, float (&sums)[64], int times) {
    unsigned left[32];
    load_left(left, q);
#pragma unroll 1
    for (int i = 0; i < times; ++i) {
        wgmma_fence();
        if constexpr (IN_REGISTERS) {
#pragma unroll
            for (int k = 0; k < DIM; k += 16)
                Wgmma<KEYS, 0>::registers(sums, left + k / 4, later(of.k, k / 64 * KEYS * 128 + k % 64 * 2), 1);
        } else {
            scores<KEYS>(sums, of.q, ROWS, of.k, DIM, true);
        }
        wgmma_commit();
        wgmma_wait<LEFT>(sums);
    }
    wgmma_wait<0>(sums);
}

// O += P V again and again.
template <int LEFT>
INSIDE void values_loop(const Half* q, const Tiles& of, float (&sums)[64], int times) {
    unsigned left[32];
    load_left(left, q);
#pragma unroll 1
    for (int i = 0; i < times; ++i) {
        wgmma_fence();
        values<DIM>(sums, left, of.v, KEYS, true);
        wgmma_commit();
        wgmma_wait<LEFT>(sums);
    }
    wgmma_wait<0>(sums);
}

INSIDE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Online softmax of a thread's two rows: scores become weights; `factor` is what earlier sums are worth.
struct Softmax {
    float most[2] = {-1e30f, -1e30f}, total[2] = {0, 0}, factor[2];

    INSIDE void weigh(float (&s)[64]) {
        constexpr float SCALE = 0.1275f;  // log2(e) / sqrt(DIM)
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float top = most[row];
#pragma unroll
            for (int i = 0; i < 64; ++i)
                if (i / 2 % 2 == row)
                    top = fmaxf(top, s[i]);
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            factor[row] = exp2_fast((most[row] - top) * SCALE);
            most[row] = top;
            float sum = 0;
#pragma unroll
            for (int i = 0; i < 64; ++i)
                if (i / 2 % 2 == row)
                    sum += s[i] = exp2_fast(s[i] * SCALE - top * SCALE);
            total[row] = total[row] * factor[row] + sum;
        }
    }
    INSIDE void shrink(float (&sums)[64]) const {
#pragma unroll
        for (int i = 0; i < 64; ++i)
            sums[i] *= factor[i / 2 % 2];
    }
    INSIDE void normalize(float (&sums)[64]) {
        for (int row = 0; row < 2; ++row) {
            total[row] += __shfl_xor_sync(~0u, total[row], 1);
            total[row] += __shfl_xor_sync(~0u, total[row], 2);
            factor[row] = 1 / total[row];
        }
        shrink(sums);
    }
};

// Attention without masks, loads and what follows the loop.
template <bool SOFTMAX>
INSIDE void forward_loop(const Tiles& of, float (&sums)[64], int times) {
    Softmax softmax;
    float s[64];
    unsigned p[32];
#pragma unroll 1
    for (int i = 0; i < times; ++i) {
        wgmma_fence();
        scores<KEYS>(s, of.q, ROWS, of.k, DIM, false);
        wgmma_commit();
        wgmma_wait<0>(s);
        if constexpr (SOFTMAX) {
            softmax.weigh(s);
            softmax.shrink(sums);
        }
        pack(p, s);
        wgmma_fence();
        values<DIM>(sums, p, of.v, KEYS, true);
        wgmma_commit();
        wgmma_wait<0>(sums);
    }
    if constexpr (SOFTMAX)
        softmax.normalize(sums);
}

// The same, but scores of the next tile are multiplied before the values of this one, and the softmax runs while values
// are multiplied.  It is at the end of the loop's body, and the wait at the beginning: ptxas would move the wait ahead
// of it if no jump lay between.
INSIDE void forward_ahead_loop(const Tiles& of, float (&sums)[64], int times) {
    Softmax softmax;
    float s[64];
    unsigned p[32];
    wgmma_fence();
    scores<KEYS>(s, of.q, ROWS, of.k, DIM, false);
    wgmma_commit();
    wgmma_wait<0>(s);
    softmax.weigh(s);
#pragma unroll 1
    for (int i = 1; i < times; ++i) {
        wgmma_wait<0>(sums);
        softmax.shrink(sums);
        pack(p, s);
        wgmma_fence();
        scores<KEYS>(s, of.q, ROWS, of.k, DIM, false);
        wgmma_commit();
        values<DIM>(sums, p, of.v, KEYS, true);
        wgmma_commit();
        wgmma_wait<1>(s);
        softmax.weigh(s);
        pin(s);
    }
    wgmma_wait<0>(sums);
    softmax.shrink(sums);
    pack(p, s);
    wgmma_fence();
    values<DIM>(sums, p, of.v, KEYS, true);
    wgmma_commit();
    wgmma_wait<0>(sums);
    softmax.normalize(sums);
}

// out: (blocks, 2, 64, 128).  cycles: (blocks,), of the loop.
#define SPEED(NAME, LOOP)                                                                             \
    extern "C" __global__ void __launch_bounds__(256, 1)                                              \
        NAME(const Half* q, const Half* k, const Half* v, float* out, long long* cycles, int times) { \
        const Tiles of = load_tiles(q, k, v);                                                         \
        float sums[64];                                                                               \
        _Pragma("unroll") for (int i = 0; i < 64; ++i) sums[i] = 0;                                   \
        const long long start = clock64();                                                            \
        LOOP;                                                                                         \
        if (threadIdx.x == 0)                                                                         \
            cycles[blockIdx.x] = clock64() - start;                                                   \
        store(out + (blockIdx.x * 2 + threadIdx.x / 128) * 64 * 128, sums);                           \
    }
SPEED(speed_scores, (scores_loop<false, 0>(q, of, sums, times)))
SPEED(speed_scores_in_flight, (scores_loop<false, 1>(q, of, sums, times)))
SPEED(speed_scores_registers, (scores_loop<true, 1>(q, of, sums, times)))
SPEED(speed_values, (values_loop<0>(q, of, sums, times)))
SPEED(speed_values_in_flight, (values_loop<1>(q, of, sums, times)))
SPEED(speed_products, (forward_loop<false>(of, sums, times)))
SPEED(speed_forward, (forward_loop<true>(of, sums, times)))
SPEED(speed_forward_ahead, forward_ahead_loop(of, sums, times))
