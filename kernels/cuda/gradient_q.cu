// Adds what a block contributes to dq: TILE_ROWS packed rows of one KV head, which go through the tiles of TILE_COLUMNS keys that any
// of them sees (gradient.cuh).  Q and dout stay in shared memory, K and V pass through STAGES buffers.
//
// grid: (tiles of rows, KV heads, PARTS); each part makes its share of the columns of dq.

#include "gradient.cuh"

using T = ELEMENT;
constexpr int THREADS = 32 * WARPS;
constexpr int M = TILE_ROWS / (16 * WARPS), N = TILE_COLUMNS / 8, D = padded(HEAD_DIM) / 8 / PARTS;
using QTile = Tile<T, TILE_ROWS, padded(HEAD_DIM)>;
using GTile = Tile<T, TILE_ROWS, padded(VALUE_DIM)>;                 // of dout
using KTile = Tile<T, TILE_COLUMNS, padded(HEAD_DIM)>;
using VTile = Tile<T, TILE_COLUMNS, padded(VALUE_DIM)>;
constexpr unsigned Q_AT = 0, G_AT = QTile::BYTES, K_AT = G_AT + GTile::BYTES, V_AT = K_AT + STAGES * KTile::BYTES;
static_assert(V_AT + STAGES * VTile::BYTES == SHARED_BYTES, "what mpiattn/backends/kernel_tiles.py says");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gradient_q(const T* __restrict__ q, const T* __restrict__ dout, const float* __restrict__ lse,
           const float* __restrict__ delta, const T* __restrict__ k, const T* __restrict__ v,
           const int* __restrict__ begin, const int* __restrict__ end, float* __restrict__ dq, int tokens, int keys,
           int kv_heads, int groups, float inner, float factor, float scale) {
    const int kv_head = blockIdx.y;
    const Rows rows(tokens, kv_heads, kv_head);
    const Intervals intervals(begin, end, kv_head * groups / kv_heads, tokens);
    const int first_row = (gridDim.x - 1 - blockIdx.x) * TILE_ROWS;
    const int last_row = min(first_row + TILE_ROWS, rows.count);
    const Hull hull = hull_of(intervals, Rows::token(first_row), Rows::token(last_row - 1) + 1);
    if (hull.empty())
        return;
    const int tiles = (hull.hi - hull.lo + TILE_COLUMNS - 1) / TILE_COLUMNS;

    const auto load = [&](int tile) {
        if (tile < tiles) {
            const int first = hull.lo + tile * TILE_COLUMNS, slot = tile % STAGES;
            copy_rows<KTile, HEAD_DIM, THREADS>(K_AT + slot * KTile::BYTES, k, [&](int j) {
                return key_start<HEAD_DIM>(first + j, keys, kv_heads, kv_head);
            });
            copy_rows<VTile, VALUE_DIM, THREADS>(V_AT + slot * VTile::BYTES, v, [&](int j) {
                return key_start<VALUE_DIM>(first + j, keys, kv_heads, kv_head);
            });
        }
        commit_copies();
    };

    const int warp_row = warp_index() * 16 * M, my_row = first_row + warp_row + lane_index() / 4;
    const auto row_of = [&](int m, int h) { return min(my_row + 16 * m + 8 * h, rows.count - 1); };
    float base[M][2], minus[M][2], acc[M][D][4];
    set_zero(acc);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            base[m][h] = base_of(lse[rows.index(row_of(m, h))]);
            minus[m][h] = delta[rows.index(row_of(m, h))];
        }
    copy_rows<QTile, HEAD_DIM, THREADS>(Q_AT, q, [&](int i) { return row_start<HEAD_DIM>(rows, first_row + i); });
    copy_rows<GTile, VALUE_DIM, THREADS>(G_AT, dout, [&](int i) { return row_start<VALUE_DIM>(rows, first_row + i); });
#pragma unroll
    for (int stage = 0; stage + 1 < STAGES; ++stage)
        load(stage);

    for (int tile = 0; tile < tiles; ++tile) {
        const int first = hull.lo + tile * TILE_COLUMNS;
        const bool masked = !hull.covers(first, first + TILE_COLUMNS);
        const unsigned keys_at = K_AT + tile % STAGES * KTile::BYTES, values_at = V_AT + tile % STAGES * VTile::BYTES;
        if constexpr (STAGES == 1) {
            __syncthreads();                                         // the last tile is done with
            load(tile);
        }
        wait_copies<(STAGES > 1 ? STAGES - 2 : 0)>();
        const bool careful = __syncthreads_or(masked && copied_not_finite<KTile, THREADS>(keys_at));
        if constexpr (STAGES > 1)
            load(tile + STAGES - 1);

        float score[M][N][4], product[M][N][4];
        set_zero(score);
        set_zero(product);
        Product<T>::template with_rows<QTile, KTile>(score, Q_AT, warp_row, keys_at);
        Product<T>::template with_rows<GTile, VTile>(product, G_AT, warp_row, values_at);
        const auto sees = [&](int m, int h, int j) { return intervals.of(Rows::token(row_of(m, h))).sees(first + j); };
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Interval seen = masked ? intervals.of(Rows::token(row_of(m, h))) : Interval{0, NO_KEY};
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        differentiate(score[m][n][2 * h + e], product[m][n][2 * h + e], base[m][h], minus[m][h], inner, factor,
                                      seen.sees(first + 8 * n + lane_index() % 4 * 2 + e));
            }
        const int part = blockIdx.z * 8 * D;
        if (careful)
            product_of_seen<KTile>(acc, product, keys_at, part, sees);
        else
            Product<T>::template with_columns<KTile>(acc, product, keys_at, part);
    }
    add_rows<HEAD_DIM>(dq, acc, scale, blockIdx.z * 8 * D, [&](int m, int h) {
        return row_start<HEAD_DIM>(rows, my_row + 16 * m + 8 * h);
    });
}
