// Adds results to rows in global memory.  A warp's lanes hold the columns in the layout of warp.cuh.
//
// A batch is read completely before it is written, so that a warp waits for memory latency once per BATCH * 8 columns.

#pragma once

#include "warp.cuh"

constexpr int BATCH = 16;

// A lane's two columns from `column` on, of a row of DIM floats.  If DIM is even, the row is aligned to 8 bytes.
template <int DIM>
__device__ __forceinline__ float2 read_pair(const float* row, int column) {
    if constexpr (DIM % 2 == 0)
        return column < DIM ? *reinterpret_cast<const float2*>(row + column) : make_float2(0, 0);
    else
        return make_float2(column < DIM ? row[column] : 0, column + 1 < DIM ? row[column + 1] : 0);
}

template <int DIM>
__device__ __forceinline__ void write_pair(float* row, int column, float2 pair) {
    if constexpr (DIM % 2 == 0) {
        if (column < DIM)
            *reinterpret_cast<float2*>(row + column) = pair;
    } else {
        if (column < DIM)
            row[column] = pair.x;
        if (column + 1 < DIM)
            row[column + 1] = pair.y;
    }
}

// row = row * keep + acc * factor, for the columns from `first` on.  h selects which of a lane's two rows in acc is
// used.  If not `held`, the row is not read and counts as 0.
template <int DIM, int D>
__device__ __forceinline__ void add_columns(float* row, const float (&acc)[D][4], int h, bool held, float keep,
                                            float factor, int first) {
    const int column = first + lane_index() % 4 * 2;
#pragma unroll
    for (int from = 0; from < D; from += BATCH) {
        float2 before[BATCH];
#pragma unroll
        for (int d = from; d < D && d < from + BATCH; ++d)
            before[d - from] = make_float2(0, 0);
        if (held)
#pragma unroll
            for (int d = from; d < D && d < from + BATCH; ++d)
                before[d - from] = read_pair<DIM>(row, column + 8 * d);
#pragma unroll
        for (int d = from; d < D && d < from + BATCH; ++d)
            write_pair<DIM>(row, column + 8 * d,
                            make_float2(before[d - from].x * keep + acc[d][2 * h] * factor,
                                        before[d - from].y * keep + acc[d][2 * h + 1] * factor));
    }
}
