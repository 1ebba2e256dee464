// A tile in shared memory: ROWS rows of COLUMNS elements, its 16-byte chunks permuted so that neither the eight rows that
// ldmatrix reads nor a row that is written meet in a bank, and asynchronous copies into it.

#pragma once

#include "element.cuh"
#include "warp.cuh"

__device__ constexpr int padded(int dim) { return (dim + 31) / 32 * 32; }       // columns of a tile for vectors of `dim`

template <class T, int ROWS_, int COLUMNS_>
struct Tile {
    using Type = T;
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
    static constexpr int CHUNK = 16 / sizeof(T);                      // elements
    static constexpr int CHUNKS = COLUMNS / CHUNK;                    // a row
    static constexpr int PITCH = COLUMNS * sizeof(T);                 // bytes from row to row
    static constexpr int BYTES = ROWS * PITCH;
    static_assert(PITCH % 64 == 0, "rows are 64 or a multiple of 128 bytes, or as much and 64 more");

    // Offset of the element (row, column) in a tile at offset `base`.
    static __device__ __forceinline__ unsigned at(unsigned base, int row, int column) {
        const int turn = PITCH % 128 ? (row / 2) % 4 : row % 8;
        return base + row * PITCH + ((column / CHUNK) ^ turn) * 16 + column % CHUNK * sizeof(T);
    }

    // Offset of what lies an even number of chunks to the right of an offset in the first two of a row: one operation where
    // `chunks` is a constant.
    static __device__ __forceinline__ unsigned right_of(unsigned offset, int chunks) {
        constexpr int PANEL = PITCH % 128 ? 4 : 8;
        return (offset ^ chunks % PANEL * 16) + chunks / PANEL * PANEL * 16;
    }
};

// How the THREADS threads of a block copy a tile: LANES of them take a row, each every LANES-th of its chunks, and so STEP rows at a
// time.  The chunks of a row that a thread copies lie in one line, whatever the swizzle, and its rows STEP apart, so that all
// addresses but the first are sums with constants.
template <class Tile, int THREADS>
struct Copies {
    static constexpr int LANES = Tile::PITCH % 128 ? 4 : 8;
    static constexpr int STEP = THREADS / LANES, TIMES = Tile::ROWS / STEP, RUNS = Tile::CHUNKS / LANES;
    static_assert(Tile::ROWS % STEP == 0 && (STEP % 8 == 0 || (STEP == 4 && LANES == 8)), "rows keep their turn, or swap halves");

    const int row, column;                                           // the first that this thread copies
    const unsigned base;

    __device__ __forceinline__ Copies(unsigned base_, int thread)
        : row(thread / LANES), column(thread % LANES * Tile::CHUNK), base(Tile::at(base_, row, column)) {}

    // Offset of its part of row `row` + i * STEP.
    __device__ __forceinline__ unsigned at(int i) const {
        return (i * STEP % 8 ? base ^ 64 : base) + i * STEP * Tile::PITCH;
    }

    // Its part of the DIM elements of that row, which begins at from - column; zeros where it is not `valid`, and from DIM on.  The
    // copies belong to the group that is committed next; where DIM is no multiple of 16 bytes they are ordinary stores.
    template <int DIM>
    __device__ __forceinline__ void copy(int i, const typename Tile::Type* from, bool valid) const {
        using T = typename Tile::Type;
        constexpr int RUN = LANES * Tile::CHUNK;                     // columns
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

// Fills a tile: row(i) is where the DIM elements of row i begin in `source`, or negative for zeros.
template <class Tile, int DIM, int THREADS, class Row>
__device__ __forceinline__ void copy_rows(unsigned base, const typename Tile::Type* source, Row row) {
    const Copies<Tile, THREADS> copies(base, thread_index_anew());
#pragma unroll
    for (int i = 0; i < copies.TIMES; ++i) {
        const long long start = row(copies.row + i * copies.STEP);
        copies.template copy<DIM>(i, source + (start < 0 ? 0 : start) + copies.column, start >= 0);
    }
}

// The same where rows begin `pitch` elements apart, the first at `source`, and `count` of them are there.
template <class Tile, int DIM, int THREADS>
__device__ __forceinline__ void copy_rows_apart(unsigned base, const typename Tile::Type* source, long long pitch, int count) {
    const Copies<Tile, THREADS> copies(base, thread_index_anew());
    const typename Tile::Type* from = source + copies.row * pitch + copies.column;
    const long long step = copies.STEP * pitch;
    const int left = count - copies.row;
#pragma unroll
    for (int i = 0; i < copies.TIMES; ++i, from += step)
        copies.template copy<DIM>(i, from, i * copies.STEP < left);
}

// Whether what this thread itself copied, and has waited for, holds anything that is not finite.
template <class Tile, int THREADS>
__device__ __forceinline__ bool copied_not_finite(unsigned base) {
    using T = typename Tile::Type;
    const Copies<Tile, THREADS> copies(base, thread_index_anew());
    bool found = false;
#pragma unroll
    for (int i = 0; i < copies.TIMES; ++i)
#pragma unroll 1                                     // seldom done, and not worth the registers
        for (int run = 0; run < copies.RUNS; ++run) {
            const uint4 words = shared_at<uint4>(copies.at(i) + run * copies.LANES * 16);
            found |= not_finite<T>(words.x) || not_finite<T>(words.y) || not_finite<T>(words.z) || not_finite<T>(words.w);
        }
    return found;
}
