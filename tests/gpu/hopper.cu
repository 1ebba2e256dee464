// Small kernels that show how a Hopper GPU reads descriptors and tensor maps, and how fast its tensor cores go; see
// gpu_hopper.py.  STEP chooses which of them are compiled.
//
// A tile lies in shared memory as panels of 64 columns.  A row of a panel is 128 bytes, and its 16-byte chunks are
// permuted as in kernels/cuda/tile.cuh: chunk c of row r is at chunk c ^ r % 8.

typedef unsigned short Half;  // the bits of a bfloat16
typedef unsigned long long Descriptor;

#define INSIDE __device__ __forceinline__

// Places in shared memory

INSIDE unsigned address_of(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

extern __shared__ unsigned char shared_memory[];

INSIDE unsigned char* aligned_tiles() {  // the swizzle goes by address bits, so tiles begin at multiples of 1024
    return shared_memory + (-address_of(shared_memory) & 1023);
}

// The offset of an element in a tile of `rows` rows.
INSIDE int at(int rows, int row, int column) {
    return column / 64 * rows * 128 + row * 128 + (column % 64 / 8 ^ row % 8) * 16 + column % 8 * 2;
}

// The block's threads copy `rows` x `columns` elements that are contiguous in global memory to a tile.
INSIDE void fill(unsigned char* tile, const Half* from, int rows, int columns) {
    for (int i = threadIdx.x; i < rows * columns / 8; i += blockDim.x) {
        const int row = i / (columns / 8), column = i % (columns / 8) * 8;
        *(uint4*)(tile + at(rows, row, column)) = *(const uint4*)(from + row * columns + column);
    }
}

// Every byte becomes 0xff, that is NaN: what should not be read is then seen in the results.
INSIDE void poison(unsigned char* from, int bytes) {
    for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16)
        *(uint4*)(from + i) = make_uint4(~0u, ~0u, ~0u, ~0u);
}

// Ordinary stores of this thread come before what tensor cores and the copy engine do after the next barrier.
INSIDE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// wgmma

// Of a tile with the swizzle of 128 bytes.  leading, stride: bytes.
INSIDE Descriptor descriptor(const void* shared, unsigned leading, unsigned stride) {
    return (Descriptor)((address_of(shared) & 0x3ffff) >> 4) | (Descriptor)(leading >> 4) << 16 |
           (Descriptor)(stride >> 4) << 32 | 1ull << 62;
}

INSIDE Descriptor later(Descriptor of, unsigned bytes) { return of + (bytes >> 4); }

INSIDE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INSIDE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Values are computed before the volatile instructions that follow, and read after those that precede.
template <int N>
INSIDE void pin(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        asm volatile("" : "+f"(values[i])::"memory");
}

// Waits until at most LEFT groups are in flight.  `sums` are those of a group that has ended: the compiler must not
// read them earlier.
template <int LEFT, int N>
INSIDE void wgmma_wait(float (&sums)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
    pin(sums);
}

// sums (64 x COLUMNS) = A B + sums, or A B if not `keep`.  A is 64 x 16: a tile K-major, or registers.  B is 16 x
// COLUMNS: K-major, or column-major if TURNED.
template <int COLUMNS, int TURNED>
struct Wgmma;

#define OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT32 OUT4(0), OUT4(4), OUT4(8), OUT4(12), OUT4(16), OUT4(20), OUT4(24), OUT4(28)
#define OUT64 OUT32, OUT4(32), OUT4(36), OUT4(40), OUT4(44), OUT4(48), OUT4(52), OUT4(56), OUT4(60)
#define NAME32                                                                                                  \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAME64                                                                                                    \
    NAME32                                                                                                        \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
    "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define WGMMA(COLUMNS, NAMES, OUT, I0, I1, I2, I3, I4, I5, I6)                                                       \
    template <int TURNED>                                                                                            \
    struct Wgmma<COLUMNS, TURNED> {                                                                                  \
        static INSIDE void shared(float (&d)[COLUMNS / 2], Descriptor a, Descriptor b, int keep) {                   \
            asm volatile("{.reg .pred keep; setp.ne.b32 keep, " I2 ", 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS \
                         "k16.f32.bf16.bf16 {" NAMES "}, " I0 ", " I1 ", keep, 1, 1, 0, " I3 ";}"                    \
                         : OUT                                                                                       \
                         : "l"(a), "l"(b), "r"(keep), "n"(TURNED));                                                  \
        }                                                                                                            \
        static INSIDE void registers(float (&d)[COLUMNS / 2], const unsigned* a, Descriptor b, int keep) {           \
            asm volatile("{.reg .pred keep; setp.ne.b32 keep, " I5 ", 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS \
                         "k16.f32.bf16.bf16 {" NAMES "}, {" I0 ", " I1 ", " I2 ", " I3 "}, " I4 ", keep, 1, 1, " I6  \
                         ";}"                                                                                        \
                         : OUT                                                                                       \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(TURNED));              \
        }                                                                                                            \
    }
WGMMA(64, NAME32, OUT32, "%32", "%33", "%34", "%35", "%36", "%37", "%38");
WGMMA(128, NAME64, OUT64, "%64", "%65", "%66", "%67", "%68", "%69", "%70");

// Accumulator i of a thread is in this row and column.
INSIDE int row_of(int i) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
INSIDE int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

template <int N>
INSIDE void store(float* to, const float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        to[row_of(i) * 2 * N + column_of(i)] = sums[i];
}

// Accumulators become the left operand of N / 8 products of 16 columns each, four registers a product.
template <int N>
INSIDE void pack(unsigned (&to)[N / 2], const float (&from)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(to[i]) : "f"(from[2 * i + 1]), "f"(from[2 * i]));
}

// sums = A B^T, A 64 rows from `a` on in a tile of `a_rows` rows, B COLUMNS rows, both `dim` wide and K-major.
template <int COLUMNS>
INSIDE void scores(float (&sums)[COLUMNS / 2], Descriptor a, int a_rows, Descriptor b, int dim, bool keep) {
#pragma unroll
    for (int k = 0; k < dim; k += 16)
        Wgmma<COLUMNS, 0>::shared(sums, later(a, k / 64 * a_rows * 128 + k % 64 * 2),
                                  later(b, k / 64 * COLUMNS * 128 + k % 64 * 2), keep || k);
}

// sums += P V, P in registers, V `keys` rows: the next 16 keys are 16 rows of 128 bytes below.
template <int COLUMNS>
INSIDE void values(float (&sums)[COLUMNS / 2], const unsigned* p, Descriptor v, int keys, bool keep) {
#pragma unroll
    for (int k = 0; k < keys; k += 16)
        Wgmma<COLUMNS, 1>::registers(sums, p + k / 4, later(v, k * 128), keep || k);
}

// mbarriers and the copy engine

INSIDE void barrier_init(const void* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(arrivals) : "memory");
}

INSIDE void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

INSIDE void barrier_expect(const void* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(barrier)), "r"(bytes)
                 : "memory");
}

INSIDE void barrier_arrive(const void* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of(barrier)) : "memory");
}

INSIDE void barrier_wait(const void* barrier, unsigned parity) {
    unsigned done = 0;
    while (!done)
        asm volatile(
            "{.reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done;}"
            : "=r"(done)
            : "r"(address_of(barrier)), "r"(parity)
            : "memory");
}

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

INSIDE void copy_box(const void* to, const TensorMap* map, int x, int y, int z, const void* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(address_of(to)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(address_of(barrier))
        : "memory");
}

INSIDE void copy_bytes(const void* to, const void* from, unsigned bytes, const void* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address_of(to)),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(address_of(barrier))
        : "memory");
}

#if STEP == 1  // descriptors: one warpgroup

constexpr int POISONED = 96 * 1024;

// d = a b^T, a (64, DIM), b (COLUMNS, DIM).
template <int COLUMNS, int DIM>
INSIDE void scores_step(const Half* a, const Half* b, float* d, unsigned leading, unsigned stride) {
    unsigned char *tile_a = aligned_tiles(), *tile_b = tile_a + 64 * DIM * 2;
    poison(tile_a, POISONED);
    __syncthreads();
    fill(tile_a, a, 64, DIM);
    fill(tile_b, b, COLUMNS, DIM);
    fence_async();
    __syncthreads();
    float sums[COLUMNS / 2];
    wgmma_fence();
    scores<COLUMNS>(sums, descriptor(tile_a, leading, stride), 64, descriptor(tile_b, leading, stride), DIM, false);
    wgmma_commit();
    wgmma_wait<0>(sums);
    store(d, sums);
}

// d = p v, p (64, KEYS), v (KEYS, COLUMNS).
template <int COLUMNS, int KEYS>
INSIDE void values_step(const Half* p, const Half* v, float* d, unsigned leading, unsigned stride) {
    unsigned char* tile = aligned_tiles();
    poison(tile, POISONED);
    __syncthreads();
    fill(tile, v, KEYS, COLUMNS);
    fence_async();
    __syncthreads();
    unsigned left[KEYS / 4];
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i)
        left[i] = *(const unsigned*)(p + row_of(2 * i) * KEYS + column_of(2 * i));
    float sums[COLUMNS / 2];
    wgmma_fence();
    values<COLUMNS>(sums, left, descriptor(tile, leading, stride), KEYS, false);
    wgmma_commit();
    wgmma_wait<0>(sums);
    store(d, sums);
}

#define PRODUCT(NAME, FUNCTION)                                                           \
    extern "C" __global__ void __launch_bounds__(128)                                     \
        NAME(const Half* a, const Half* b, float* d, unsigned leading, unsigned stride) { \
        FUNCTION(a, b, d, leading, stride);                                               \
    }
PRODUCT(scores_64_64, (scores_step<64, 64>))
PRODUCT(scores_64_128, (scores_step<64, 128>))
PRODUCT(scores_128_64, (scores_step<128, 64>))
PRODUCT(scores_128_128, (scores_step<128, 128>))
PRODUCT(values_64_64, (values_step<64, 64>))
PRODUCT(values_64_128, (values_step<64, 128>))
PRODUCT(values_128_64, (values_step<128, 64>))
PRODUCT(values_128_128, (values_step<128, 128>))

// out (64, 128) = bfloat16(q k^T) v, q (64, 128), k and v (128, 128): accumulators of one are operands of the other.
extern "C" __global__ void
__launch_bounds__(128) chain(const Half* q, const Half* k, const Half* v, float* out) {
    unsigned char *tile_q = aligned_tiles(), *tile_k = tile_q + 16384, *tile_v = tile_k + 32768;
    fill(tile_q, q, 64, 128);
    fill(tile_k, k, 128, 128);
    fill(tile_v, v, 128, 128);
    fence_async();
    __syncthreads();
    float s[64], sums[64];
    wgmma_fence();
    scores<128>(s, descriptor(tile_q, 16, 1024), 64, descriptor(tile_k, 16, 1024), 128, false);
    wgmma_commit();
    wgmma_wait<0>(s);
    unsigned p[32];
    pack(p, s);
    wgmma_fence();
    values<128>(sums, p, descriptor(tile_v, 128 * 128, 1024), 128, false);
    wgmma_commit();
    wgmma_wait<0>(sums);
    store(out, sums);
}

#elif STEP == 2  // boxes

// out: the bytes that a box of `bytes` bytes becomes in shared memory.
extern "C" __global__ void box(const __grid_constant__ TensorMap map, uint4* out, int x, int y, int z, int bytes) {
    __shared__ unsigned long long barrier;
    unsigned char* tile = aligned_tiles();
    poison(tile, bytes);
    if (threadIdx.x == 0) {
        barrier_init(&barrier, 1);
        barriers_made();
    }
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier_expect(&barrier, bytes);
        copy_box(tile, &map, x, y, z, &barrier);
    }
    barrier_wait(&barrier, 0);
    for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) out[i] = ((const uint4*)tile)[i];
}

// d (64, 128) = q k^T for keys key .. key + 127 of a head: both come as boxes of 64 columns and go to the tensor cores.
extern "C" __global__ void __launch_bounds__(128) box_scores(const __grid_constant__ TensorMap q, int packed,
                                                             const __grid_constant__ TensorMap k, int head, int key,
                                                             float* d) {
    __shared__ unsigned long long barrier;
    unsigned char *tile_q = aligned_tiles(), *tile_k = tile_q + 16384;
    if (threadIdx.x == 0) {
        barrier_init(&barrier, 1);
        barriers_made();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier_expect(&barrier, 16384 + 32768);
        for (int panel = 0; panel < 2; ++panel) {
            copy_box(tile_q + panel * 8192, &q, panel * 64, head * packed, 0, &barrier);
            for (int half = 0; half < 2; ++half)
                copy_box(tile_k + panel * 16384 + half * 8192, &k, panel * 64, head, key + half * 64, &barrier);
        }
    }
    barrier_wait(&barrier, 0);
    float sums[64];
    wgmma_fence();
    scores<128>(sums, descriptor(tile_q, 16, 1024), 64, descriptor(tile_k, 16, 1024), 128, false);
    wgmma_commit();
    wgmma_wait<0>(sums);
    store(d, sums);
}

#elif STEP == 3  // registers move from a producer to consumers

constexpr int STAGES = 2, ELEMENTS = 4096, SUMS = 192;

// out (SUMS, 256): sums over tiles, of source (tiles, ELEMENTS), of element thread + 16 i.  Sums are in registers, more
// of them than a thread has at the start.
extern "C" __global__ void __launch_bounds__(384, 1) registers(const float* source, float* out, int tiles) {
    __shared__ unsigned long long full[STAGES], empty[STAGES];
    const float* ring = (const float*)aligned_tiles();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, 256);
        }
        barriers_made();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0)
            for (int i = 0; i < tiles; ++i) {
                const int stage = i % STAGES;
                if (i >= STAGES)
                    barrier_wait(empty + stage, i / STAGES % 2 ^ 1);
                barrier_expect(full + stage, ELEMENTS * 4);
                copy_bytes(ring + stage * ELEMENTS, source + i * ELEMENTS, ELEMENTS * 4, full + stage);
            }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int thread = threadIdx.x - 128;
        float sums[SUMS];
#pragma unroll
        for (int j = 0; j < SUMS; ++j) sums[j] = 0;
#pragma unroll 1
        for (int i = 0; i < tiles; ++i) {
            const int stage = i % STAGES;
            barrier_wait(full + stage, i / STAGES % 2);
            const float* tile = ring + stage * ELEMENTS + thread;
#pragma unroll
            for (int j = 0; j < SUMS; ++j) sums[j] += tile[16 * j];
            barrier_arrive(empty + stage);
        }
#pragma unroll
        for (int j = 0; j < SUMS; ++j) out[j * 256 + thread] = sums[j];
    }
}

#elif STEP == 4
#include "hopper_speed.cuh"
#endif
