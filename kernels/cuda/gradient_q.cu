// Gradient dq of a block, added to the array (formulas in gradient.cuh).
//
// A thread block owns TILE_ROWS packed rows of one KV head (rows.cuh).  It loops over the tiles of TILE_COLUMNS keys
// that any of its rows sees.
//
// With -DDBIAS= it adds the gradient of a bias as well.  Where heads or sequences share a bias, it does the same rows
// of each, one after another: every number has one writer, which adds in the same order in every run.  If query heads
// of a KV head share it, HEADS_PER_KV is 1, and `per_kv` query heads have the same keys.
//
// grid: (row tiles * KV heads, PARTS), with DBIAS (row tiles * owners, PARTS); each part computes its share of the
// columns of dq, and the first adds the gradient of the bias.
// block: 32 * WARPS threads; each warp owns TILE_ROWS / WARPS rows.
// shared memory: SHARED_BYTES, dynamic.  It holds Q, dout and a struct Row per row for the whole loop, and STAGES
// buffers for tiles of K and V, or of K alone.
// tile sizes: TILE_ROWS x TILE_COLUMNS, WARPS, STAGES and PARTS are constants from mpiattn/backends/cuda/tile_table.py.
// For bfloat16 and head dim 128 they are 64 x 64, 4 warps, 1 stage, 1 part, and on sm_90 and sm_100 128 x 32, 4 warps,
// 2 stages, 1 part.

#include "bias_gradient.cuh"
#include "gradient.cuh"

using T = ELEMENT;
constexpr int THREADS = 32 * WARPS;
constexpr int M = TILE_ROWS / (16 * WARPS), N = TILE_COLUMNS / 8, D = DEPTH / 8 / PARTS;
using QTile = Tile<T, TILE_ROWS, DEPTH>;
using GTile = Tile<T, TILE_ROWS, VALUE_DEPTH>;  // of dout
using KTile = Tile<T, TILE_COLUMNS, DEPTH>;
using VTile = Choice<SHARED_KV, KTile, Tile<T, TILE_COLUMNS, VALUE_DEPTH>>::Type;
constexpr unsigned Q_AT = 0, G_AT = QTile::BYTES, K_AT = G_AT + GTile::BYTES, V_AT = K_AT + STAGES * KTile::BYTES;
constexpr unsigned ROWS_AT = V_AT + (SHARED_KV ? 0 : STAGES * VTile::BYTES);
static_assert(8 * D * PARTS == DEPTH && D % 2 == 0, "every column belongs to one part, and pairs stay together");
static_assert(ROWS_AT + TILE_ROWS * sizeof(float4) == SHARED_BYTES, "what mpiattn/backends/cuda/tile_table.py says");

// Interval, lse in base 2 and delta of a row, in 16 bytes.
struct Row {
    Interval keys;
    float base, delta;
};

extern "C" __global__ void
__launch_bounds__(THREADS, 1)
gradient_q(const T* __restrict__ q, const T* __restrict__ dout, const float* __restrict__ lse,
           const float* __restrict__ delta, const T* __restrict__ k, const T* __restrict__ v,
           const int* __restrict__ begin, const int* __restrict__ end, float* __restrict__ dq, int tokens, int keys,
           int kv_heads, int groups, float inner, float factor, float scale BIAS_ARGUMENTS DBIAS_ARGUMENTS
               DROPOUT_ARGUMENTS) {
    const Share mine(tokens * HEADS_PER_KV, TILE_ROWS);
    const int part = part_index() * 8 * D;
    for (int turn = 0; turn < sharers; ++turn) {
        if (DBIAS && turn)
            __syncthreads();  // the rows before are done, in shared memory and in global
        const int of_rows = mine.kv_head * owners_apart + turn * sharers_apart, kv_head = of_rows / per_kv;
        const Rows rows(tokens, kv_heads * per_kv, of_rows);
        const Intervals intervals(begin, end, kv_head / (kv_heads / groups), tokens);
        const int first_row = (mine.tiles - 1 - mine.tile) * TILE_ROWS;
        const int last_row = min(first_row + TILE_ROWS, rows.count);
        Hull hull = hull_of(intervals, Rows::token(first_row), Rows::token(last_row - 1) + 1);
        if (hull.empty())
            continue;
        hull.begin_even();
        const int tiles = (hull.hi - hull.lo + TILE_COLUMNS - 1) / TILE_COLUMNS;

        const Keys chunk = {nullptr, keys, 0, kv_heads, kv_head};
        const auto load = [&](int tile) {
            if (tile < tiles) {
                const int first = hull.lo + tile * TILE_COLUMNS, slot = tile % STAGES;
                chunk.copy<KTile, HEAD_DIM, THREADS>(K_AT + slot * KTile::BYTES, k, first);
                if (!SHARED_KV)
                    chunk.copy<VTile, VALUE_DIM, THREADS>(V_AT + slot * VTile::BYTES, v, first);
            }
            commit_copies();
        };

        const int warp_row = warp_index() * 16 * M, my_row = first_row + warp_row + lane_index() / 4;
        for (int i = threadIdx.x; i < TILE_ROWS; i += THREADS) {
            const int row = min(first_row + i, rows.count - 1);
            const long long at = rows.index(row);
            shared_at<Row>(ROWS_AT + i * sizeof(Row)) = {intervals.of(Rows::token(row)), base_of(lse[at]), delta[at]};
        }
        const auto row_at = [&](int m, int h) -> Row {
            return shared_at<Row>(ROWS_AT + (warp_row + lane_index() / 4 + 16 * m + 8 * h) * sizeof(Row));
        };
        const int sequence = rows.first_head / bias_heads, of_head = rows.first_head % bias_heads;
        const Bias bias(bias_numbers, bias_sequence, bias_head, bias_token, sequence, of_head);
        const Numbers<float> dbias(dbias_numbers, dbias_sequence, dbias_head, dbias_token, sequence, of_head);
        const Dropout dropout = {drop_rows, drop_keys, drop_heads + rows.first_head, rows.count, keys,
                                 drop_below, drop_factor, seed_low, seed_high};
        float acc[M][D][4];
        set_zero(acc);
        rows.copy<QTile, HEAD_DIM, THREADS>(Q_AT, q, first_row);
        rows.copy<GTile, VALUE_DIM, THREADS>(G_AT, dout, first_row);
#pragma unroll
        for (int stage = 0; stage + 1 < STAGES; ++stage)
            load(stage);

        for (int tile = 0; tile < tiles; ++tile) {
            const int first = hull.lo + tile * TILE_COLUMNS;
            const bool masked = !hull.covers(first, first + TILE_COLUMNS);
            const unsigned keys_at = K_AT + tile % STAGES * KTile::BYTES;
            const unsigned values_at = SHARED_KV ? keys_at : V_AT + tile % STAGES * VTile::BYTES;
            if constexpr (STAGES == 1) {
                __syncthreads();                                         // the previous tile's buffers are free
                load(tile);
            }
            float score[M][N][4], product[M][N][4];
            wait_copies<(STAGES > 1 ? STAGES - 2 : 0)>();
            const bool careful = __syncthreads_or(masked && copied_not_finite<KTile, THREADS>(keys_at));
            if constexpr (STAGES > 1)
                load(tile + STAGES - 1);

            set_zero(score);
            if constexpr (BIAS_FIRST)
                add_bias(score, bias, row_anew<M, WARPS>(first_row), rows.count, first, keys, bias_unit);
            set_zero(product);
            Product<T>::template with_rows<QTile, KTile>(score, Q_AT, warp_row, keys_at);
            Product<T>::template with_rows<GTile, VTile>(product, G_AT, warp_row, values_at);
            const auto sees = [&](int m, int h, int j) { return row_at(m, h).keys.sees(first + j); };
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const Row row = row_at(m, h);
                    const int column = first + lane_index() % 4 * 2;
                    const int number = row_anew<M, WARPS>(first_row) + 16 * m + 8 * h;
                    float2 of_bias[N] = {}, gradient[N];
                    if constexpr (BIAS_LAST)
                        read_row(of_bias, bias.row(min(number, rows.count - 1)), first, keys);
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        float2 kept = {1, 1};
                        if constexpr (DROPOUT)
                            kept = dropout.of(number, dropout.key(column + 8 * n), dropout.key(column + 8 * n + 1));
                        gradient[n].x = differentiate(score[m][n][2 * h], product[m][n][2 * h], row.base, row.delta, inner,
                                                      factor, of_bias[n].x * bias_unit, kept.x);
                        gradient[n].y = differentiate(score[m][n][2 * h + 1], product[m][n][2 * h + 1], row.base, row.delta,
                                                      inner, factor, of_bias[n].y * bias_unit, kept.y);
                    }
                    if (masked)
#pragma unroll
                        for (int n = 0; n < N; ++n)
#pragma unroll
                            for (int e = 0; e < 2; ++e)
                                if (!row.keys.sees(column + 8 * n + e))
                                    product[m][n][2 * h + e] = (e ? gradient[n].y : gradient[n].x) = 0;
                    if (DBIAS && part == 0 && number < rows.count)
                        add_to_row(dbias.row(number), gradient, first, keys);
                }
            if (careful)
                product_of_seen<KTile>(acc, product, keys_at, part, sees);
            else
                Product<T>::template with_columns<KTile>(acc, product, keys_at, part);
        }
        add_rows<HEAD_DIM>(dq, acc, scale, part, [&](int m, int h) {
            return rows.start<HEAD_DIM>(my_row + 16 * m + 8 * h);
        });
    }
}
