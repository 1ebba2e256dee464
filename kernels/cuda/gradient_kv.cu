// Adds what a block contributes to dk and dv: TILE_ROWS keys of one KV head, which go through the tiles of TILE_COLUMNS packed rows
// that see any of them (gradient.cuh).  All of a KV head's query heads are among the rows, so that nothing is left to add up.
//
// Scores are made transposed, keys along rows: P^T and dS^T come out of one product spread as the next one wants its left operand.
// K and V stay in shared memory; Q, dout, lse and delta pass through STAGES buffers.
//
// grid: (tiles of keys, KV heads, PARTS); each part makes its share of the columns of dk and dv.

#include "gradient.cuh"

using T = ELEMENT;
constexpr int THREADS = 32 * WARPS;
constexpr int M = TILE_ROWS / (16 * WARPS), N = TILE_COLUMNS / 8;
constexpr int DK = padded(HEAD_DIM) / 8 / PARTS, DV = padded(VALUE_DIM) / 8 / PARTS;
using KTile = Tile<T, TILE_ROWS, padded(HEAD_DIM)>;
using VTile = Tile<T, TILE_ROWS, padded(VALUE_DIM)>;
using QTile = Tile<T, TILE_COLUMNS, padded(HEAD_DIM)>;
using GTile = Tile<T, TILE_COLUMNS, padded(VALUE_DIM)>;              // of dout
constexpr unsigned COLUMN_BYTES = TILE_COLUMNS * sizeof(float);
constexpr unsigned K_AT = 0, V_AT = KTile::BYTES, Q_AT = V_AT + VTile::BYTES, G_AT = Q_AT + STAGES * QTile::BYTES;
constexpr unsigned LSE_AT = G_AT + STAGES * GTile::BYTES, DELTA_AT = LSE_AT + STAGES * COLUMN_BYTES;
static_assert(DELTA_AT + STAGES * COLUMN_BYTES == SHARED_BYTES, "what mpiattn/backends/kernel_tiles.py says");

// The tiles of rows, by their hulls (hulls.cu).
struct RowTiles {
    const int4* hulls;
    int count;

    __device__ __forceinline__ Hull hull(int tile) const {
        const int4 of = hulls[tile];
        return {of.x, of.y, of.z, of.w};
    }
    // The first tile from `tile` on that sees any of the keys [first, last); `count` if none does.
    __device__ __forceinline__ int next(int tile, int first, int last) const {
        for (; tile < count; tile += 32) {
            const int mine = tile + lane_index();
            const unsigned votes = __ballot_sync(ALL_LANES, mine < count && hull(mine).touches(first, last));
            if (votes)
                return tile + __ffs(votes) - 1;
        }
        return count;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gradient_kv(const T* __restrict__ q, const T* __restrict__ dout, const float* __restrict__ lse,
            const float* __restrict__ delta, const T* __restrict__ k, const T* __restrict__ v,
            const int* __restrict__ begin, const int* __restrict__ end, const int4* __restrict__ hulls,
            float* __restrict__ dk, float* __restrict__ dv, int tokens, int keys, int kv_heads, int groups, float inner,
            float factor, float scale) {
    const int kv_head = blockIdx.y, group = kv_head * groups / kv_heads;
    const Rows rows(tokens, kv_heads, kv_head);
    const Intervals intervals(begin, end, group, tokens);
    const int first_key = blockIdx.x * TILE_ROWS, last_key = min(first_key + TILE_ROWS, keys);
    const int all = (rows.count + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const RowTiles tiles = {hulls + (long long)group * all, all};

    int ahead = tiles.next(0, first_key, last_key), loaded = 0;      // the next tile to load, and how many are
    int tile = ahead;
    if (tile == all)
        return;
    const auto load = [&] {
        if (ahead < all) {
            const int first = ahead * TILE_COLUMNS, slot = loaded++ % STAGES;
            copy_rows<QTile, HEAD_DIM, THREADS>(Q_AT + slot * QTile::BYTES, q, [&](int j) {
                return row_start<HEAD_DIM>(rows, first + j);
            });
            copy_rows<GTile, VALUE_DIM, THREADS>(G_AT + slot * GTile::BYTES, dout, [&](int j) {
                return row_start<VALUE_DIM>(rows, first + j);
            });
            for (int i = threadIdx.x; i < TILE_COLUMNS; i += THREADS) {
                const bool valid = first + i < rows.count;
                const long long at = valid ? rows.index(first + i) : 0;
                copy_async_4(LSE_AT + slot * COLUMN_BYTES + i * sizeof(float), lse + at, valid);
                copy_async_4(DELTA_AT + slot * COLUMN_BYTES + i * sizeof(float), delta + at, valid);
            }
            ahead = tiles.next(ahead + 1, first_key, last_key);
        }
        commit_copies();
    };

    const int warp_row = warp_index() * 16 * M, my_key = first_key + warp_row + lane_index() / 4;
    float acc_k[M][DK][4], acc_v[M][DV][4];
    set_zero(acc_k);
    set_zero(acc_v);
    copy_rows<KTile, HEAD_DIM, THREADS>(K_AT, k, [&](int i) {
        return key_start<HEAD_DIM>(first_key + i, keys, kv_heads, kv_head);
    });
    copy_rows<VTile, VALUE_DIM, THREADS>(V_AT, v, [&](int i) {
        return key_start<VALUE_DIM>(first_key + i, keys, kv_heads, kv_head);
    });
#pragma unroll
    for (int stage = 0; stage + 1 < STAGES; ++stage)
        load();

    for (int step = 0; tile < all; ++step, tile = tiles.next(tile + 1, first_key, last_key)) {
        const int first = tile * TILE_COLUMNS, slot = step % STAGES;
        const bool masked = !tiles.hull(tile).covers(first_key, last_key);
        const unsigned queries_at = Q_AT + slot * QTile::BYTES, grads_at = G_AT + slot * GTile::BYTES;
        if constexpr (STAGES == 1) {
            __syncthreads();                                         // the last tile is done with
            load();
        }
        wait_copies<(STAGES > 1 ? STAGES - 2 : 0)>();
        const bool careful = __syncthreads_or(masked && (copied_not_finite<QTile, THREADS>(queries_at)
                                                         || copied_not_finite<GTile, THREADS>(grads_at)));
        if constexpr (STAGES > 1)
            load();

        float score[M][N][4], product[M][N][4];
        set_zero(score);
        set_zero(product);
        Product<T>::template with_rows<KTile, QTile>(score, K_AT, warp_row, queries_at);
        Product<T>::template with_rows<VTile, GTile>(product, V_AT, warp_row, grads_at);
        const auto seen_by = [&](int j) { return intervals.of(Rows::token(min(first + j, rows.count - 1))); };
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int column = 8 * n + lane_index() % 4 * 2;
            const unsigned at = slot * COLUMN_BYTES + column * sizeof(float);
            const float2 lses = shared_at<float2>(LSE_AT + at), minus = shared_at<float2>(DELTA_AT + at);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const Interval seen = masked ? seen_by(column + e) : Interval{0, NO_KEY};
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        differentiate(score[m][n][2 * h + e], product[m][n][2 * h + e], base_of(e ? lses.y : lses.x),
                                      e ? minus.y : minus.x, inner, factor, seen.sees(my_key + 16 * m + 8 * h));
            }
        }
        const int part_k = blockIdx.z * 8 * DK, part_v = blockIdx.z * 8 * DV;
        if (careful) {
            const auto sees = [&](int m, int h, int j) { return seen_by(j).sees(my_key + 16 * m + 8 * h); };
            product_of_seen<GTile>(acc_v, score, grads_at, part_v, sees);
            product_of_seen<QTile>(acc_k, product, queries_at, part_k, sees);
        } else {
            Product<T>::template with_columns<GTile>(acc_v, score, grads_at, part_v);
            Product<T>::template with_columns<QTile>(acc_k, product, queries_at, part_k);
        }
    }
    add_rows<HEAD_DIM>(dk, acc_k, scale, blockIdx.z * 8 * DK, [&](int m, int h) {
        return key_start<HEAD_DIM>(my_key + 16 * m + 8 * h, keys, kv_heads, kv_head);
    });
    add_rows<VALUE_DIM>(dv, acc_v, 1, blockIdx.z * 8 * DV, [&](int m, int h) {
        return key_start<VALUE_DIM>(my_key + 16 * m + 8 * h, keys, kv_heads, kv_head);
    });
}
