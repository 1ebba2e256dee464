// A tile in shared memory, ROWS rows of COLUMNS elements, and asynchronous copies into it.
//
// Its 16-byte chunks are permuted (XOR swizzle), so that ldmatrix's reads of eight rows and the writes of a row have no
// bank conflicts.

#pragma once

#include "element.cuh"
#include "warp.cuh"

__device__ constexpr int padded(int dim, int to = 32) { return (dim + to - 1) / to * to; }  // a tile's columns

template <bool FIRST, class A, class B>
struct Choice {
    using Type = A;
};
template <class A, class B>
struct Choice<false, A, B> {
    using Type = B;
};

template <class T, int ROWS_, int COLUMNS_>
struct Tile {
    using Type = T;
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
    static constexpr int CHUNK = 16 / sizeof(T);  // elements
    static constexpr int CHUNKS = COLUMNS / CHUNK;  // per row
    static constexpr int PITCH = COLUMNS * sizeof(T);  // bytes from row to row
    static constexpr int BYTES = ROWS * PITCH;
    static_assert(PITCH % 64 == 0, "rows are 64 or a multiple of 128 bytes, or as much and 64 more");

    // Offset in bytes of the element (row, column) of a tile at offset `base`.
    static __device__ __forceinline__ unsigned at(unsigned base, int row, int column) {
        const int turn = PITCH % 128 ? (row / 2) % 4 : row % 8;
        return base + row * PITCH + ((column / CHUNK) ^ turn) * 16 + column % CHUNK * sizeof(T);
    }

    // Offset of the chunk `chunks` to the right of `offset`.  The number of the chunk at `offset` must have no bit in
    // common with `chunks`: chunk 0 or 1 and even `chunks`, say.  One operation if `chunks` is a constant.
    static __device__ __forceinline__ unsigned right_of(unsigned offset, int chunks) {
        constexpr int PANEL = PITCH % 128 ? 4 : 8;
        return (offset ^ chunks % PANEL * 16) + chunks / PANEL * PANEL * 16;
    }
};

// The mapping of the THREADS threads of a block to a tile's chunks.  LANES threads copy a row, each every LANES-th
// chunk, so the block copies STEP rows at a time.  The swizzle keeps a thread's chunks of a row a constant distance
// apart, and its rows are STEP apart, so all addresses but the first are sums with constants.
template <class Tile, int THREADS>
struct Copies {
    static constexpr int LANES = Tile::PITCH % 128 ? 4 : 8;
    static constexpr int STEP = THREADS / LANES, TIMES = Tile::ROWS / STEP, RUNS = Tile::CHUNKS / LANES;
    static_assert(Tile::ROWS % STEP == 0 && (STEP % 8 == 0 || (STEP == 4 && LANES == 8)),
                  "rows keep their turn, or swap halves");

    const int row, column;  // of the first element that this thread copies
    const unsigned base;

    __device__ __forceinline__ Copies(unsigned base_, unsigned thread)
        : row(thread / LANES), column(thread % LANES * Tile::CHUNK), base(Tile::at(base_, row, column)) {}

    // Offset of this thread's first chunk in row `row` + i * STEP.
    __device__ __forceinline__ unsigned at(int i) const {
        return (i * STEP % 8 ? base ^ 64 : base) + i * STEP * Tile::PITCH;
    }

    // Copies this thread's part of that row, whose DIM elements begin at from - column in global memory.  Elements are
    // zeros if not `valid`, and from DIM on.  The copies belong to the next committed group; if DIM elements are not a
    // multiple of 16 bytes, they are ordinary stores.
    template <int DIM>
    __device__ __forceinline__ void copy(int i, const typename Tile::Type* from, bool valid) const {
        using T = typename Tile::Type;
        constexpr int RUN = LANES * Tile::CHUNK;  // columns
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            const unsigned to = at(i) + run * LANES * 16;
            if constexpr (DIM % Tile::CHUNK == 0) {
                copy_async_16(to, from + run * RUN, valid && ((run + 1) * RUN <= DIM || column + run * RUN < DIM));
            } else {
#pragma unroll 1
                for (int e = 0; e < Tile::CHUNK; ++e)
                    shared_at<T>(to + e * sizeof(T)) =
                        valid && column + run * RUN + e < DIM ? from[run * RUN + e] : T{};
            }
        }
    }
};

// Fills a tile: row(i) is the index in `source` of the first of row i's DIM elements, or negative for a row of zeros.
template <class Tile, int DIM, int THREADS, class Row>
__device__ __forceinline__ void copy_rows(unsigned base, const typename Tile::Type* source, Row row) {
    const Copies<Tile, THREADS> copies(base, thread_index_anew());
#pragma unroll
    for (int i = 0; i < copies.TIMES; ++i) {
        const long long start = row(copies.row + i * copies.STEP);
        copies.template copy<DIM>(i, source + (start < 0 ? 0 : start) + copies.column, start >= 0);
    }
}

// The same for rows that begin `pitch` elements apart in `source`: the tile gets those from number `first` on, and
// zeros from number `count` on.
template <class Tile, int DIM, int THREADS>
__device__ __forceinline__ void copy_rows_apart(unsigned base, const typename Tile::Type* source, int pitch, int first,
                                                int count) {
    const Copies<Tile, THREADS> copies(base, thread_index_anew());
    const int row = first + copies.row;
    const typename Tile::Type* from = source + copies.column + (long long)row * pitch;
#pragma unroll
    for (int i = 0; i < copies.TIMES; ++i, from += (long long)copies.STEP * pitch)
        copies.template copy<DIM>(i, from, row + i * copies.STEP < count);
}

// Whether the elements that this thread copied hold one that is not finite.  The thread must have waited for its
// copies.
template <class Tile, int THREADS>
__device__ __forceinline__ bool copied_not_finite(unsigned base) {
    using T = typename Tile::Type;
    const Copies<Tile, THREADS> copies(base, thread_index_anew());
    bool found = false;
#pragma unroll
    for (int i = 0; i < copies.TIMES; ++i)
#pragma unroll 1  // runs rarely; unrolling would cost registers
        for (int run = 0; run < copies.RUNS; ++run) {
            const uint4 words = shared_at<uint4>(copies.at(i) + run * copies.LANES * 16);
            found |=
                not_finite<T>(words.x) || not_finite<T>(words.y) || not_finite<T>(words.z) || not_finite<T>(words.w);
        }
    return found;
}
