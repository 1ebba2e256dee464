// Hulls (rows.cuh) of tiles of TILE_COLUMNS packed rows: int4 (groups, tiles).  gradient_kv skips row tiles by them.
//
// grid: tiles * groups, one tile per block.
// block: 32 threads.
// shared memory: none.
// tile sizes: TILE_COLUMNS is that of gradient_kv, from mpiattn/backends/cuda/tile_table.py.

#include "rows.cuh"

extern "C" __global__ void
__launch_bounds__(32)
hulls(const int* __restrict__ begin, const int* __restrict__ end, int4* __restrict__ hulls, int tokens) {
    const Share share(tokens * HEADS_PER_KV, TILE_COLUMNS);
    const int first = share.tile * TILE_COLUMNS, last = min(first + TILE_COLUMNS, tokens * HEADS_PER_KV);
    const Intervals intervals(begin, end, share.kv_head, tokens);
    const Hull hull = hull_of(intervals, Rows::token(first), Rows::token(last - 1) + 1);
    if (lane_index() == 0)
        hulls[blockIdx.x] = make_int4(hull.lo, hull.hi, hull.full_from, hull.full_to);
}
