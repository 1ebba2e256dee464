// Gradients dk and dv of a block, added to the arrays (formulas in gradient.cuh).
//
// A thread block owns TILE_ROWS keys of one KV head.  It loops over the tiles of TILE_COLUMNS packed rows that see any
// of these keys.  The rows include all query heads of the KV head, so no sum over blocks remains.
//
// Scores are computed transposed, with keys along rows: P^T and dS^T then leave one product in the register layout of
// the next product's left operand.  With COLUMN_WARPS > 1 a warp computes only its share of a tile's scores and of the
// columns of dk and dv, of more keys.  So it reads shared memory less often for a product.  P^T and dS^T go through
// shared memory, where the other warps of these keys read them.
//
// With -DKEY_SUMS=1 it also sums the gradient of a bias that is the same for all queries, by query head and key.  It
// then does one query head of the KV head after another, with HEADS_PER_KV 1.  key_sums is (splits * COLUMN_WARPS,
// heads, keys); add_key_sums (partials.cu) adds these up.
//
// With few keys the row tiles are split, so that all multiprocessors have work, and about the same under a causal mask.
// Each split then adds to arrays of its own, dk (splits, keys, kv_heads, HEAD_DIM) and dv likewise, which begin as
// zeros; add_splits (partials.cu) adds them up, always in the same order.
//
// grid: (key tiles * KV heads, PARTS, splits); each part computes its share of the columns of dk and dv.
// block: 32 * WARPS threads; each warp owns TILE_ROWS / (WARPS / COLUMN_WARPS) keys.
// shared memory: SHARED_BYTES, dynamic.  It holds K and V, or K alone, for the whole loop, and STAGES buffers for tiles
// of Q and dout and for lse, delta and interval of their rows; with COLUMN_WARPS > 1 a tile of P^T and of dS^T as well.
// tile sizes: TILE_ROWS x TILE_COLUMNS, WARPS, COLUMN_WARPS, STAGES and PARTS are constants from
// mpiattn/backends/cuda/tile_table.py.

#include "gradient.cuh"

#if KEY_SUMS
#define KEY_SUMS_ARGUMENTS , float* __restrict__ key_sums, int per_kv
#else
#define KEY_SUMS 0
#define KEY_SUMS_ARGUMENTS
constexpr float* key_sums = nullptr;
constexpr int per_kv = 1;
#endif

using T = ELEMENT;
constexpr int THREADS = 32 * WARPS;
constexpr int ROW_WARPS = WARPS / COLUMN_WARPS;
constexpr int M = TILE_ROWS / (16 * ROW_WARPS), N = TILE_COLUMNS / 8 / COLUMN_WARPS;
constexpr int DK = DEPTH / 8 / PARTS / COLUMN_WARPS, DV = SHARED_KV ? 1 : VALUE_DEPTH / 8 / PARTS / COLUMN_WARPS;
using KTile = Tile<T, TILE_ROWS, DEPTH>;
using VTile = Choice<SHARED_KV, KTile, Tile<T, TILE_ROWS, VALUE_DEPTH>>::Type;
using QTile = Tile<T, TILE_COLUMNS, DEPTH>;
using GTile =
    Tile<T, TILE_COLUMNS, SHARED_KV ? DEPTH : VALUE_DEPTH>;  // of dout; all of dk's columns, since it is added there
constexpr unsigned COLUMN_BYTES = TILE_COLUMNS * sizeof(float);
constexpr unsigned K_AT = 0, V_AT = SHARED_KV ? K_AT : KTile::BYTES, Q_AT = V_AT + VTile::BYTES;
constexpr unsigned G_AT = Q_AT + STAGES * QTile::BYTES;
constexpr unsigned LSE_AT = G_AT + STAGES * GTile::BYTES, DELTA_AT = LSE_AT + STAGES * COLUMN_BYTES;
constexpr unsigned BEGIN_AT = DELTA_AT + STAGES * COLUMN_BYTES, END_AT = BEGIN_AT + STAGES * COLUMN_BYTES;
constexpr bool UNROLL = COLUMN_WARPS > 1 && unrolls(DEPTH);  // else the sums leave too few registers
using WTile = Tile<T, TILE_ROWS, COLUMN_WARPS == 1 ? 64 : TILE_COLUMNS>;  // of P^T and of dS^T
constexpr unsigned P_AT = END_AT + STAGES * COLUMN_BYTES, DS_AT = P_AT + WTile::BYTES;
static_assert(TILE_COLUMNS <= THREADS && STAGES <= 2,
              "a thread copies what there is to know of a row; one tile is ahead");
static_assert((COLUMN_WARPS == 1 ? P_AT : DS_AT + WTile::BYTES) == SHARED_BYTES,
              "what mpiattn/backends/cuda/tile_table.py says");
static_assert(8 * DK * PARTS * COLUMN_WARPS == DEPTH && DK % 2 == 0,
              "every column is one warp's, and pairs stay together");
static_assert(SHARED_KV || (8 * DV * PARTS * COLUMN_WARPS == VALUE_DEPTH && DV % 2 == 0), "the same of dv");
static_assert(COLUMN_WARPS == 1 || !SHARED_KV, "dk and dv have the same columns of dS and P");

// Leaves this warp's 16 * M x 8 * N numbers in shared memory for all warps of these keys.
template <class X>
__device__ __forceinline__ void publish(unsigned base, const float (&w)[M][N][4], int first_row, int first_column) {
    const unsigned lane = thread_index_anew() % 32;
    const unsigned at = WTile::at(base, first_row + lane / 4, first_column + lane % 4 * 2);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int n = 0; n < N; ++n)
                shared_at<unsigned>(WTile::right_of(at, n) + (16 * m + 8 * h) * WTile::PITCH) =
                    Element<X>::pack(w[m][n][2 * h], w[m][n][2 * h + 1]);
}

// The split of this block.  Later rows often see more keys: the splits that have them go first.
__device__ __forceinline__ int split_index() { return gridDim.z - 1 - block_z_anew(); }

// Iterates over the row tiles of this block's split that see any of the keys [first, last), by the tiles' hulls
// (hulls.cu).  Each lane tests one of 32 tiles at a time, so most steps read no memory.
struct RowTiles {
    static constexpr int NONE = 0, FULL = 1, MASKED = 2;

    const int4* hulls;
    int count, split_count, first, last;  // all tiles; those of a split
    int base;  // bit i of the masks stands for tile base + i
    unsigned touching = 0, covered = 0;  // tiles still to do; tiles whose rows all see all of the keys

    __device__ __forceinline__ RowTiles(const int4* hulls_, int count_, int split_count_, int first_, int last_)
        : hulls(hulls_),
          count(count_),
          split_count(split_count_),
          first(first_),
          last(last_),
          base(split_index() * split_count_ - 32) {
        find_next();
    }
    __device__ __forceinline__ int tile() const { return base + __ffs(touching) - 1; }
    __device__ __forceinline__ int state() const {
        return !touching ? NONE : covered & touching & -touching ? FULL : MASKED;
    }
    __device__ __forceinline__ void advance() {
        touching &= touching - 1;
        find_next();
    }
    // The end of the split's tiles is computed again each time: it would take a register.
    __device__ __forceinline__ int end() const { return min(count, (split_index() + 1) * split_count); }
    __device__ __forceinline__ void find_next() {
        while (!touching && base + 32 < end()) {
            base += 32;
            const int candidate = base + lane_index();
            const int4 of = candidate < end() ? hulls[candidate] : make_int4(NO_KEY, 0, NO_KEY, 0);
            const Hull hull = {of.x, of.y, of.z, of.w};
            touching = __ballot_sync(ALL_LANES, hull.touches(first, last));
            covered = __ballot_sync(ALL_LANES, hull.covers(first, last));
        }
    }
};

// The sum that dv is added up in: that of dk, if keys hold the values.
template <class K, class V>
__device__ __forceinline__ auto& sum_of_values(K& acc_k, V& acc_v) {
    if constexpr (SHARED_KV)
        return acc_k;
    else
        return acc_v;
}

extern "C" __global__ void
__launch_bounds__(THREADS, 1)
gradient_kv(const T* __restrict__ q, const T* __restrict__ dout, const float* __restrict__ lse,
            const float* __restrict__ delta, const T* __restrict__ k, const T* __restrict__ v,
            const int* __restrict__ begin, const int* __restrict__ end, const int4* __restrict__ hulls,
            float* __restrict__ dk, float* __restrict__ dv, int tokens, int keys, int kv_heads, int groups, float inner,
            float factor, float scale, int split_tiles BIAS_ARGUMENTS KEY_SUMS_ARGUMENTS DROPOUT_ARGUMENTS) {
    const Share candidate(keys, TILE_ROWS);
    const int kv_head = candidate.kv_head, group = kv_head / (kv_heads / groups);
    Rows rows(tokens, kv_heads * per_kv, kv_head * per_kv);
    const Intervals intervals(begin, end, group, tokens);
    const int first_key = candidate.tile * TILE_ROWS, last_key = min(first_key + TILE_ROWS, keys);
    const int all = (rows.count + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int row_warp = warp_index() / COLUMN_WARPS, column_warp = warp_index() % COLUMN_WARPS;
    const int share_index = part_index() * COLUMN_WARPS + column_warp;
    const int part_k = share_index * 8 * DK, part_v = SHARED_KV ? part_k : share_index * 8 * DV;
    RowTiles ahead(hulls + (long long)group * all, all, split_tiles, first_key, last_key);  // the next tile to load
    int state = ahead.state(), next_row = ahead.tile() * TILE_COLUMNS;  // of the current tile, and its first row
    if (!KEY_SUMS && state == RowTiles::NONE)
        return;
    int loaded = 0;                                                  // the slot of the next tile
    const auto load = [&] {
        if (ahead.state() != RowTiles::NONE) {
            const int first = ahead.tile() * TILE_COLUMNS, slot = loaded;
            loaded = STAGES - 1 - loaded;
            rows.copy<QTile, HEAD_DIM, THREADS>(Q_AT + slot * QTile::BYTES, q, first);
            rows.copy<GTile, VALUE_DIM, THREADS>(G_AT + slot * GTile::BYTES, dout, first);
            const int i = thread_index_anew();
            if (i < TILE_COLUMNS) {
                const bool valid = first + i < rows.count;
                const long long at = valid ? rows.index(first + i) : 0;
                copy_async_4(LSE_AT + slot * COLUMN_BYTES + i * sizeof(float), lse + at, valid);
                copy_async_4(DELTA_AT + slot * COLUMN_BYTES + i * sizeof(float), delta + at, valid);
                const int token = valid ? Rows::token(first + i) : 0;
                copy_async_4(BEGIN_AT + slot * COLUMN_BYTES + i * sizeof(int), intervals.begin + token, valid);
                copy_async_4(END_AT + slot * COLUMN_BYTES + i * sizeof(int), intervals.end + token, valid);
            }
            ahead.advance();
        }
        commit_copies();
    };

    const int warp_row = row_warp * 16 * M, warp_column = column_warp * 8 * N;
    const int my_key = first_key + warp_row + lane_index() / 4;
    float acc_k[M][DK][4], acc_v[M][DV][4];
    set_zero(acc_k);
    set_zero(acc_v);
    const Keys chunk = {nullptr, keys, 0, kv_heads, kv_head};
    chunk.copy<KTile, HEAD_DIM, THREADS>(K_AT, k, first_key);
    if (!SHARED_KV)
        chunk.copy<VTile, VALUE_DIM, THREADS>(V_AT, v, first_key);
    for (int head = 0;;) {  // each query head with KEY_SUMS, else all at once
#pragma unroll
        for (int stage = 0; stage + 1 < STAGES; ++stage)
            load();
        const int sequence = rows.first_head / bias_heads, of_head = rows.first_head % bias_heads;
        const Bias bias(bias_numbers, bias_sequence, bias_head, bias_token, sequence, of_head);
        const Dropout dropout = {drop_rows, drop_keys, drop_heads + rows.first_head, rows.count, keys,
                                 drop_below, drop_factor, seed_low, seed_high};
        float key_sum[M][2] = {};

        // A turn is counted or toggles, whichever form takes fewer registers.
        for (int turn = 0; state != RowTiles::NONE; turn = COLUMN_WARPS == 1 ? turn + 1 : STAGES - 1 - turn) {
            const int slot = COLUMN_WARPS == 1 ? turn % STAGES : turn;
            const bool masked = state == RowTiles::MASKED;
            const int first_row = next_row;
            const unsigned queries_at = Q_AT + slot * QTile::BYTES, grads_at = G_AT + slot * GTile::BYTES;
            float score[M][N][4], product[M][N][4];
            if constexpr (BIAS_FIRST) {
                set_zero(score);
                add_bias_of_keys(score, bias, first_row + warp_column, rows.count, my_key, keys, bias_unit);
            }
            if constexpr (STAGES == 1) {
                __syncthreads();                                         // the previous tile's buffers are free
                load();
            }
            wait_copies<(STAGES > 1 ? STAGES - 2 : 0)>();
            const bool careful = __syncthreads_or(masked && (copied_not_finite<QTile, THREADS>(queries_at)
                                                             || copied_not_finite<GTile, THREADS>(grads_at)));
            state = ahead.state(), next_row = ahead.tile() * TILE_COLUMNS;  // of the next tile
            if constexpr (STAGES > 1)
                load();

            if constexpr (!BIAS_FIRST)
                set_zero(score);
            set_zero(product);
            Product<T>::template with_rows<KTile, QTile, DEPTH, UNROLL>(score, K_AT, warp_row, queries_at, warp_column);
            Product<T>::template with_rows<VTile, GTile, VALUE_DEPTH, UNROLL>(product, V_AT, warp_row, grads_at, warp_column);
            const auto seen_by = [&](int j) {
                const unsigned at = slot * COLUMN_BYTES + j * sizeof(int);
                return Interval{shared_at<int>(BEGIN_AT + at), shared_at<int>(END_AT + at)};
            };
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int column = warp_column + 8 * n + lane_index() % 4 * 2;
                const unsigned at = slot * COLUMN_BYTES + column * sizeof(float);
                const float2 lses = shared_at<float2>(LSE_AT + at), minus = shared_at<float2>(DELTA_AT + at);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float base = base_of(e ? lses.y : lses.x);
                    const int row = first_row + column + e;
                    float gradient[M][2];
#pragma unroll
                    for (int m = 0; m < M; ++m)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const int key = my_key + 16 * m + 8 * h;
                            float of_bias = 0, kept = 1;
                            if constexpr (BIAS_LAST)
                                of_bias = number_of_key(bias, row, rows.count, key, keys) * bias_unit;
                            if constexpr (DROPOUT)
                                kept = dropout.of(row, dropout.key(key));
                            gradient[m][h] = differentiate(score[m][n][2 * h + e], product[m][n][2 * h + e], base,
                                                           e ? minus.y : minus.x, inner, factor, of_bias, kept);
                        }
                    if (masked) {
                        const Interval seen = seen_by(column + e);
#pragma unroll
                        for (int m = 0; m < M; ++m)
#pragma unroll
                            for (int h = 0; h < 2; ++h)
                                if (!seen.sees(my_key + 16 * m + 8 * h))
                                    score[m][n][2 * h + e] = product[m][n][2 * h + e] = gradient[m][h] = 0;
                    }
                    if constexpr (KEY_SUMS)
#pragma unroll
                        for (int m = 0; m < M; ++m)
#pragma unroll
                            for (int h = 0; h < 2; ++h)
                                key_sum[m][h] += gradient[m][h];
                }
            }
            if constexpr (SHARED_KV)                                     // one sum: both have its factor
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int n = 0; n < N; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            product[m][n][i] *= scale;
            auto& sum_v = sum_of_values(acc_k, acc_v);
            const auto sees = [&](int m, int h, int j) { return seen_by(j).sees(my_key + 16 * m + 8 * h); };
            const auto add = [&](auto element) {                         // generic: only one branch has to compile
                using X = decltype(element);
                if constexpr (COLUMN_WARPS > 1) {
                    publish<X>(P_AT, score, warp_row, warp_column);
                    publish<X>(DS_AT, product, warp_row, warp_column);
                    __syncthreads();
                    if (careful) {
                        product_of_seen_tiles<WTile, GTile>(sum_v, P_AT, warp_row, grads_at, part_v, sees);
                        product_of_seen_tiles<WTile, QTile>(acc_k, DS_AT, warp_row, queries_at, part_k, sees);
                    } else {
                        Product<X>::template of_tiles<WTile, GTile>(sum_v, P_AT, warp_row, grads_at, part_v);
                        Product<X>::template of_tiles<WTile, QTile>(acc_k, DS_AT, warp_row, queries_at, part_k);
                    }
                } else if (careful) {
                    product_of_seen<GTile>(sum_v, score, grads_at, part_v, sees);
                    product_of_seen<QTile>(acc_k, product, queries_at, part_k, sees);
                } else {
                    Product<X>::template with_columns<GTile>(sum_v, score, grads_at, part_v);
                    Product<X>::template with_columns<QTile>(acc_k, product, queries_at, part_k);
                }
            };
            add(T{});
        }
        if constexpr (!KEY_SUMS)
            break;
        if (part_index() == 0)
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float sum = quad_sum(key_sum[m][h]);
                    const int key = my_key + 16 * m + 8 * h;
                    const long long before = split_index() * COLUMN_WARPS + column_warp;
                    if (lane_index() % 4 == 0 && key < keys)
                        key_sums[(before * rows.heads + rows.first_head) * keys + key] = sum;
                }
        if (++head == per_kv)
            break;
        __syncthreads();                                                 // the last tile's buffers are free
        rows = Rows(tokens, kv_heads * per_kv, kv_head * per_kv + head);
        ahead = RowTiles(hulls + (long long)group * all, all, split_tiles, first_key, last_key);
        state = ahead.state(), next_row = ahead.tile() * TILE_COLUMNS, loaded = 0;
    }
    if constexpr (KEY_SUMS) {                                        // which no tile may have waited for
        commit_copies();
        wait_copies<0>();
    }
    const long long before = (long long)split_index() * keys * kv_heads;                 // rows of the splits before
    add_rows<HEAD_DIM>(dk + before * HEAD_DIM, acc_k, SHARED_KV ? 1 : scale, part_k, [&](int m, int h) {
        return key_start<HEAD_DIM>(my_key + 16 * m + 8 * h, keys, kv_heads, kv_head);
    });
    if constexpr (!SHARED_KV)
        add_rows<VALUE_DIM>(dv + before * VALUE_DIM, acc_v, 1, part_v, [&](int m, int h) {
            return key_start<VALUE_DIM>(my_key + 16 * m + 8 * h, keys, kv_heads, kv_head);
        });
}
