// Attention of query rows to a block of keys, added to the rows' partial (out, lse).
//
// With -DSHARED_KV=1 a value is the first VALUE_DIM numbers of its key: there is no v, and the product with V reads the
// tile of K.  Rows of 576 numbers leave room for few rows and much of a thread's registers to sums.  So PARTS groups of
// warps divide the columns of out: each computes the scores of the block's rows again, but tiles are copied once.
//
// The algorithm is FlashAttention-2 with row intervals.  A thread block owns TILE_ROWS packed rows of one KV head
// (rows.cuh).  It loops over the tiles of TILE_COLUMNS keys that any of its rows sees.  Scores and sums stay in
// registers.  K of a later tile is copied during the softmax and the product with V, and V during the product with K.
//
// grid: (row tiles * KV heads, splits); with pages (row tiles * KV heads * items).
// block: 32 * WARPS threads; each warp of a group owns as many of the TILE_ROWS rows.
// shared memory: SHARED_BYTES, dynamic.  It holds Q and the rows' intervals for the whole loop, and STAGES buffers each
// for tiles of K and V, or of K alone.
// tile sizes: TILE_ROWS x TILE_COLUMNS, WARPS and STAGES are constants from mpiattn/backends/cuda/tile_table.py.  For
// bfloat16 and head dim 128 they are 128 x 64, 4 warps, 1 stage, and for decoding 16 x 32, 1 warp, 2 stages.
//
// With few row tiles the keys are split.  Each split then takes its share of the keys and writes a partial of its own,
// out (splits, tokens, heads, VALUE_DIM) and lse (splits, tokens, heads); merge_parts (partials.cu) merges them.
//
// If PAGE_SIZE is not 0, the keys lie in pages (keys.cuh), there are several sequences with `tokens` queries each,
// stored one after another, and `work` lists what there is to do: items (sequence, first key, end of the keys, part).
// Sequences may differ much in length, so a long one has many items (mpiattn/backends/cuda/decode_work.py).  An item
// that has all keys of its sequence, with part -1, sets (out, lse).  The others write partials number `part` of the
// same form as a split's. `pages` begins with an index for each sequence: where its table begins in `pages`.  `begin`
// holds the ends as well, after the beginnings of all queries.
//
// Last come the arguments of a bias and of dropout, if there is one (bias.cuh, dropout.cuh).

#include "bias.cuh"
#include "columns.cuh"
#include "dropout.cuh"
#include "keys.cuh"
#include "product.cuh"
#include "rows.cuh"
#include "softmax.cuh"

using T = ELEMENT;
constexpr int THREADS = 32 * WARPS;
constexpr int ROW_WARPS = WARPS / PARTS;
constexpr int M = TILE_ROWS / (16 * ROW_WARPS), N = TILE_COLUMNS / 8;
constexpr int D = padded(VALUE_DIM, SHARED_KV ? 16 * PARTS : 32) / 8 / PARTS;
constexpr int DEPTH = padded(HEAD_DIM, SHARED_KV ? 64 : 32);
using QTile = Tile<T, TILE_ROWS, DEPTH>;
using KTile = Tile<T, TILE_COLUMNS, DEPTH>;
using VTile = Choice<SHARED_KV, KTile, Tile<T, TILE_COLUMNS, padded(VALUE_DIM)>>::Type;
constexpr unsigned Q_AT = 0, K_AT = QTile::BYTES, V_AT = K_AT + STAGES * KTile::BYTES;
constexpr unsigned SEEN_AT = V_AT + (SHARED_KV ? 0 : STAGES * VTile::BYTES);
static_assert(SEEN_AT + TILE_ROWS * sizeof(int2) == SHARED_BYTES, "what mpiattn/backends/cuda/tile_table.py says");
static_assert(TILE_ROWS % (16 * ROW_WARPS) == 0 && TILE_COLUMNS % 16 == 0, "tiles are made of 16 rows and 16 keys");
static_assert(PARTS == 1 || (SHARED_KV && PARTS * D * 8 <= KTile::COLUMNS), "parts are columns of the keys' tile");

// Sets the scores outside the rows' intervals to -inf; `first` is the first key of the tile.
template <class Seen>
__device__ __forceinline__ void hide_unseen(float (&score)[M][N][4], Seen seen, int first) {
    const int column = first + lane_index() % 4 * 2;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Interval keys = seen(m, h);
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (!keys.sees(column + 8 * n + e))
                        score[m][n][2 * h + e] = minus_infinity();
        }
}

// Normalizes acc by the sums and merges the result into the rows' partial; with `fresh` it replaces that partial.
// acc holds the columns of out from first_column on.
__device__ __forceinline__ void store(const float (&acc)[M][D][4], const Softmax<M>& softmax, const Rows& rows,
                                      int first_row, int first_column, float* out, float* lse, bool fresh) {
    float sum[M][2], held[M][2];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_row + 16 * m + 8 * h;
            sum[m][h] = quad_sum(softmax.sum[m][h]);
            held[m][h] = fresh || row >= rows.count ? minus_infinity() : lse[rows.index(row)];
        }
    if (PARTS == 1)
        __syncwarp();  // one lane of a quad writes what all four read
    else
        __syncthreads();  // and what all parts read
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_row + 16 * m + 8 * h;
            const bool empty = sum[m][h] == 0;
            if (row >= rows.count || (empty && !fresh))  // a row that saw no key keeps its partial
                continue;
            const long long at = rows.index(row);
            const float own_lse = empty ? minus_infinity() : softmax.top[m][h] * LN_2 + logf(sum[m][h]);
            const float weight = merge_weight(held[m][h], own_lse), factor = empty ? 0 : weight / sum[m][h];
            add_columns<VALUE_DIM>(out + at * VALUE_DIM, acc[m], h, held[m][h] != minus_infinity(), 1 - weight, factor,
                                   first_column);
            if (lane_index() % 4 == 0 && first_column == 0)
                lse[at] = merge_lse(held[m][h], own_lse);
        }
}

extern "C" __global__ void
__launch_bounds__(THREADS, 1)
#if PAGE_SIZE
forward(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const int4* __restrict__ work,
        const int* __restrict__ begin, const int* __restrict__ pages, float* __restrict__ out, float* __restrict__ lse,
        float* __restrict__ out_parts, float* __restrict__ lse_parts, int tokens, int slots, int kv_heads, int sequences,
        float inner, float factor BIAS_ARGUMENTS) {
    const int* end = begin + (long long)sequences * tokens;
    const Share own_lse(tokens * HEADS_PER_KV, TILE_ROWS);
    const int4 item = work[own_lse.kv_head / kv_heads];
    const int kv_head = own_lse.kv_head % kv_heads, group = item.x;
    const long long heads = kv_heads * HEADS_PER_KV, rows_before = group * heads * tokens;
    q += rows_before * HEAD_DIM, pages += pages[group];
    const bool fresh = true;
    const long long partial = item.w < 0 ? rows_before : item.w * heads * tokens;
    if (item.w >= 0)
        out = out_parts, lse = lse_parts;
    const int sequence = group, count = bias_head;                   // a row of the bias has numbers for so many keys
#else
forward(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const int* __restrict__ begin,
        const int* __restrict__ end, float* __restrict__ out, float* __restrict__ lse, int tokens, int count, int kv_heads,
        int groups, float inner, float factor BIAS_ARGUMENTS DROPOUT_ARGUMENTS) {
    const int splits = gridDim.y;
    const Share own_lse(tokens * HEADS_PER_KV, TILE_ROWS);
    const int kv_head = own_lse.kv_head, group = kv_head / (kv_heads / groups);
    const int sequence = kv_head * HEADS_PER_KV / bias_heads;        // of the bias
    const bool fresh = splits > 1;
    const long long partial = (long long)blockIdx.y * tokens * kv_heads * HEADS_PER_KV;
#endif
    out += partial * VALUE_DIM, lse += partial;
    const Rows rows(tokens, kv_heads, kv_head);
    const Intervals intervals(begin, end, group, tokens);
    // Later rows often see more keys.  They go first, so that no long tile runs alone at the end.
    const int first_row = (own_lse.tiles - 1 - own_lse.tile) * TILE_ROWS;
    const int last_row = min(first_row + TILE_ROWS, rows.count);
    Hull hull = hull_of(intervals, Rows::token(first_row), Rows::token(last_row - 1) + 1);
    hull.begin_even();
#if PAGE_SIZE
    hull.cut(item.y, item.z);
#endif

    // Keys after the last one seen may hold anything, but results must not depend on them: they are loaded as zeros.
#if PAGE_SIZE
    const Keys keys = {pages, hull.hi, slots, kv_heads, kv_head};
    const int first_key = hull.lo, tiles = hull.empty() ? 0 : (hull.hi - hull.lo + TILE_COLUMNS - 1) / TILE_COLUMNS;
#else
    const Keys keys = {nullptr, min(count, hull.hi), 0, kv_heads, kv_head};
    const int all = hull.empty() ? 0 : (hull.hi - hull.lo + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int share = (all + splits - 1) / splits, skipped = min(all, int(blockIdx.y) * share);
    const int tiles = min(share, all - skipped), first_key = hull.lo + skipped * TILE_COLUMNS;
#endif

    const auto load_k = [&](int tile) {
        if (tile < tiles)
            keys.copy<KTile, HEAD_DIM, THREADS>(K_AT + tile % STAGES * KTile::BYTES, k, first_key + tile * TILE_COLUMNS);
        commit_copies();
    };
    const auto load_v = [&](int tile) {
        if (tile < tiles)
            keys.copy<VTile, VALUE_DIM, THREADS>(V_AT + tile % STAGES * VTile::BYTES, v, first_key + tile * TILE_COLUMNS);
        commit_copies();
    };

    const int row_warp = PARTS == 1 ? warp_index() : warp_index() % ROW_WARPS;
    const int first_column = PARTS == 1 ? 0 : warp_index() / ROW_WARPS * 8 * D;
    const int warp_row = row_warp * 16 * M, my_row = first_row + warp_row + lane_index() / 4;
    for (int i = threadIdx.x; i < TILE_ROWS; i += THREADS) {
        Interval of = intervals.of(Rows::token(min(first_row + i, rows.count - 1)));
#if PAGE_SIZE
        of = {max(of.begin, item.y), min(of.end, item.z)};
#endif
        shared_at<int2>(SEEN_AT + i * sizeof(int2)) = make_int2(of.begin, of.end);
    }
    const auto seen = [&](int m, int h) {
        const int2 of = shared_at<int2>(SEEN_AT + (warp_row + lane_index() / 4 + 16 * m + 8 * h) * sizeof(int2));
        return Interval{of.x, of.y};
    };
    const Bias bias(bias_numbers, bias_sequence, bias_head, bias_token, sequence, rows.first_head % bias_heads);
    const Dropout dropout = {drop_rows, drop_keys, drop_heads + rows.first_head, rows.count, count,
                             drop_below, drop_factor, seed_low, seed_high};
    float acc[M][D][4];
    set_zero(acc);
    Softmax<M> softmax;
    if (tiles > 0) {
        rows.copy<QTile, HEAD_DIM, THREADS>(Q_AT, q, first_row);
        load_k(0);
#pragma unroll
        for (int stage = 1; stage < STAGES; ++stage) {
            if (!SHARED_KV)
                load_v(stage - 1);
            load_k(stage);
        }
    }
    // At the top of the loop, with a V, 2 * STAGES - 1 copy groups are committed: K and V of the tiles up to `tile` + STAGES - 1,
    // except the last V.
    for (int tile = 0; tile < tiles; ++tile) {
        const int first = first_key + tile * TILE_COLUMNS;
        const bool masked = !hull.covers(first, first + TILE_COLUMNS);
        const unsigned keys_at = K_AT + tile % STAGES * KTile::BYTES;
        float score[M][N][4];
        if constexpr (BIAS_FIRST) {
            set_zero(score);
            add_bias(score, bias, row_anew<M, ROW_WARPS>(first_row), rows.count, first, count, bias_unit);
        }
        wait_copies<SHARED_KV ? STAGES - 1 : 2 * STAGES - 2>();
        __syncthreads();                                             // K has arrived; V of the previous tile is free
        if (!SHARED_KV)
            load_v(tile + STAGES - 1);

        if constexpr (!BIAS_FIRST)
            set_zero(score);
        Product<T>::template with_rows<QTile, KTile>(score, Q_AT, warp_row, keys_at);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    score[m][n][i] = transform(score[m][n][i], inner);
        if constexpr (BIAS_LAST)
            add_bias(score, bias, row_anew<M, ROW_WARPS>(first_row), rows.count, first, count, bias_unit);
        if (masked)
            hide_unseen(score, seen, first);

        const unsigned values = SHARED_KV ? keys_at : V_AT + tile % STAGES * VTile::BYTES;
        if (!SHARED_KV)
            wait_copies<2 * STAGES - 2>();
        const bool careful = __syncthreads_or(masked && copied_not_finite<VTile, THREADS>(values));
        if (!SHARED_KV)
            load_k(tile + STAGES);                                   // V has arrived; K is free
        softmax.weigh(score, acc, factor);
        if constexpr (DROPOUT)
            drop(score, dropout, row_anew<M, ROW_WARPS>(first_row), first);
        if (careful)
            product_of_seen<VTile>(acc, score, values, first_column,
                                    [&](int m, int h, int j) { return seen(m, h).sees(first + j); });
        else
            Product<T>::template with_columns<VTile>(acc, score, values, first_column);
        if (SHARED_KV) {
            __syncthreads();                                         // K is free
            load_k(tile + STAGES);
        }
    }
    store(acc, softmax, rows, my_row, first_column, out, lse, fresh);
}
