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
};

// Fills a tile by all THREADS of a block: row(i) is where the DIM elements of row i begin in `source`, or negative for zeros.
// Columns from DIM on are zeros.  The copies belong to the group that is committed next; where DIM is no multiple of 16 bytes
// they are ordinary stores.
template <class Tile, int DIM, int THREADS, class Row>
__device__ __forceinline__ void copy_rows(unsigned base, const typename Tile::Type* source, Row row) {
    using T = typename Tile::Type;
#pragma unroll 1                                     // unrolled, its addresses take the registers that the products need
    for (int i = threadIdx.x; i < Tile::ROWS * Tile::CHUNKS; i += THREADS) {
        const int r = i / Tile::CHUNKS, column = i % Tile::CHUNKS * Tile::CHUNK;
        const unsigned to = Tile::at(base, r, column);
        const long long start = row(r);
        if constexpr (DIM % Tile::CHUNK == 0) {
            const bool valid = start >= 0 && column < DIM;
            copy_async_16(to, source + (valid ? start + column : 0), valid);
        } else {
            for (int e = 0; e < Tile::CHUNK; ++e)
                shared_at<T>(to + e * sizeof(T)) = start >= 0 && column + e < DIM ? source[start + column + e] : T{};
        }
    }
}

// Whether what this thread itself copied by copy_rows, and has waited for, holds anything that is not finite.
template <class Tile, int THREADS>
__device__ __forceinline__ bool copied_not_finite(unsigned base) {
    bool found = false;
    for (int i = threadIdx.x; i < Tile::ROWS * Tile::CHUNKS; i += THREADS) {
        const uint4 words = shared_at<uint4>(Tile::at(base, i / Tile::CHUNKS, i % Tile::CHUNKS * Tile::CHUNK));
        using T = typename Tile::Type;
        found |= not_finite<T>(words.x) || not_finite<T>(words.y) || not_finite<T>(words.z) || not_finite<T>(words.w);
    }
    return found;
}
