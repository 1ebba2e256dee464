// Gradients of a block, added to dq, dk and dv.  With the scores S after scale and softcap, P = exp(S - lse) and
// dP = dout V^T:
//     dV = P^T dout    dS = P (dP - delta)    dQ = scale dS K    dK = scale dS^T Q
// A softcap multiplies dS by 1 - tanh^2.
//
// The rows of a KV head are packed, TILES tiles of ROWS at a time.  Then, for each block of KEYS keys, every tile that
// sees some of them makes P and dS, which stay in the L2 cache for the other three products: dV and dK are sums over
// the tiles, and dQ is added to row by row.  A thread has a block of keys; blocks are added to the dQ of a tile in
// their order. So every sum has one order, and the same inputs give the same bits on any number of threads.

#pragma once

#include "pack.h"
#include "product.h"
#include "work.h"

#define ROWS 96
#define KEYS 192
#define TILES 16

struct packed_rows {
    struct rows rows;
    real *q, *dout;                                     // in panels; q times scale
    real *q_by_dim, *dout_by_dim;
    struct odd odd_q, odd_dout;
    long turn;                                          // block of keys that may be added to dq next
};

struct backward_work {                                 // of a thread
    real *keys, *values, *keys_by_dim;                  // of a block: by key, and the keys by dim as well
    struct odd odd_keys;
    real *weight, *dweight;                             // P and dS of a tile, [ROWS][KEYS]
    real *dq, *dk, *dv, *row;
};

static int64_t backward_work(const struct launch* of, char* scratch, struct backward_work* work) {
    char* at = scratch;
    const long dim = of->head_dim, value_dim = of->value_dim, width = rounded_up(dim, NR);
    work->keys = take(&at, KEYS * dim * sizeof(real));
    work->values = take(&at, KEYS * value_dim * sizeof(real));
    work->keys_by_dim = take(&at, KEYS * width * sizeof(real));
    work->odd_keys.row = take(&at, KEYS * sizeof(int32_t));
    work->weight = take(&at, ROWS * KEYS * sizeof(real));
    work->dweight = take(&at, ROWS * KEYS * sizeof(real));
    work->dq = take(&at, ROWS * width * sizeof(real));
    work->dk = take(&at, KEYS * width * sizeof(real));
    work->dv = take(&at, KEYS * rounded_up(value_dim, NR) * sizeof(real));
    work->row = take(&at, most(NR, MR) * most(dim, value_dim) * sizeof(real));
    return at - scratch;
}

// The rows in work, shared by the threads; tile is NULL where only the bytes are asked for.
static int64_t row_work(const struct launch* of, char* scratch, struct packed_rows** tile) {
    char* at = scratch;
    const long width = rounded_up(of->head_dim, NR), value_width = rounded_up(of->value_dim, NR);
    const long tiles = least((most(rows_of(of), 1) + ROWS - 1) / ROWS, TILES);
    struct packed_rows *into = take(&at, tiles * sizeof *into), none;
    for (long t = 0; t < tiles; t++) {
        struct packed_rows* each = tile ? into + t : &none;
        each->q = take(&at, ROWS * of->head_dim * sizeof(real));
        each->dout = take(&at, ROWS * of->value_dim * sizeof(real));
        each->q_by_dim = take(&at, ROWS * width * sizeof(real));
        each->dout_by_dim = take(&at, ROWS * value_width * sizeof(real));
        each->odd_q.row = take(&at, ROWS * sizeof(int32_t));
        each->odd_dout.row = take(&at, ROWS * sizeof(int32_t));
    }
    if (tile)
        *tile = into;
    return at - scratch;
}

static int64_t backward_bytes(const struct launch* of) {
    struct backward_work work;
    return row_work(of, 0, 0) + of->threads * backward_work(of, 0, &work);
}

// From the scores and dP of a row, of the columns [start, stop), to P and dS / scale.  Both are 0 where it does not
// see.
static void differentiate(const struct launch* of, const struct rows* rows, long i, real base, real delta, int masked,
                          long block, long start, long stop, real* weight, real* dweight) {
    const integer from = rows->from[i] - block, to = rows->to[i] - block;
    const real inverse = of->softcap ? 1 / of->softcap : 0, cap = of->softcap;
    ivec column;
    for (int lane = 0; lane < LANES; lane++)
        column[lane] = start + lane;
    for (long j = start; j < stop; j += LANES, column += LANES) {
        vec score = load(weight + j), slope = splat(1);
        if (cap) {
            const vec bent = hyperbolic_tangent(score * inverse);
            score = bent * cap, slope = 1 - bent * bent;
        }
        vec p = exponential(limited(score - base)), ds = p * (load(dweight + j) - delta);
        if (cap)
            ds *= slope;
        if (masked) {
            const ivec seen = (column >= from) & (column < to);
            p = (vec)((ivec)p & seen), ds = (vec)((ivec)ds & seen);
        }
        store(weight + j, p);
        store(dweight + j, ds);
    }
}

// to[c] += factor * from[c * step]
INLINE void add_scaled(real* to, real factor, const real* from, long step, long count) {
    for (long c = 0; c < count; c++)
        to[c] += factor * from[c * step];
}

// What rows and keys that are not finite, which the packed ones leave out, give to those that see them.
static void add_odd(const struct launch* of, const struct backward_work* work, const struct packed_rows* tile,
                    long block, long width, long value_width) {
    const struct rows* rows = &tile->rows;
    const int dim = of->head_dim, value_dim = of->value_dim;
    for (int which = 0; which < 2; which++) {
        const struct odd* odd = which ? &tile->odd_dout : &tile->odd_q;
        for (long n = 0; n < odd->count; n++) {
            const long i = odd->row[n];
            for (long j = most(rows->from[i] - block, 0); j < least(rows->to[i] - block, KEYS); j++)
                if (which)
                    add_scaled(work->dv + j * value_width, work->weight[i * KEYS + j],
                               tile->dout + i / MR * MR * value_dim + i % MR, MR, value_dim);
                else
                    add_scaled(work->dk + j * width, work->dweight[i * KEYS + j], tile->q + i / MR * MR * dim + i % MR,
                               MR, dim);
        }
    }
    for (long n = 0; n < work->odd_keys.count; n++) {
        const long j = work->odd_keys.row[n];
        for (long i = 0; i < rows->count; i++)
            if (rows->from[i] <= block + j && block + j < rows->to[i])
                add_scaled(work->dq + i * width, work->dweight[i * KEYS + j], work->keys + j / NR * NR * dim + j % NR,
                           NR, dim);
    }
}

// A tile of rows with a block of `count` keys from `block` on.
static void backward_tile(const struct launch* of, struct backward_work* work, const struct packed_rows* tile,
                          int kv_head, long block, long count) {
    const struct rows* rows = &tile->rows;
    const long dim = of->head_dim, value_dim = of->value_dim;
    const long width = rounded_up(dim, NR), value_width = rounded_up(value_dim, NR);
    const long panels = (rows->count + MR - 1) / MR, columns = rounded_up(rounded_up(count, NR), MR);
    long from[ROWS / MR], to[ROWS / MR];                // columns that a panel sees
    for (long panel = 0; panel < panels; panel++) {
        from[panel] = most(rows->panel[panel].from - block, 0) / NR * NR;
        to[panel] = least(rounded_up(rows->panel[panel].to - block, NR), KEYS);
        real *weight = work->weight + panel * MR * KEYS, *dweight = work->dweight + panel * MR * KEYS;
        if (from[panel] >= to[panel])
            from[panel] = to[panel] = 0;
        for (long j = from[panel]; j < to[panel]; j += NR) {
            product(0, tile->q + panel * MR * dim, 1, MR, work->keys + j * dim, dim, weight + j, KEYS);
            product(0, tile->dout + panel * MR * value_dim, 1, MR, work->values + j * value_dim, value_dim, dweight + j,
                    KEYS);
        }
        const int masked =
            rows->panel[panel].full_from > block + from[panel] || rows->panel[panel].full_to < block + to[panel];
        for (long i = 0; i < MR; i++) {
            const long row = panel * MR + i;
            real base = 0, delta = 0;
            if (row < rows->count) {
                base = *(real*)row_at(of, &of->lse, kv_head, rows->first + row);
                delta = *(real*)row_at(of, &of->delta, kv_head, rows->first + row);
                base = base == -INFINITY ? 0 : base;
            }
            for (real* each = weight + i * KEYS;; each = dweight + i * KEYS) {  // zeros where no row of the panel sees
                memset(each, 0, from[panel] * sizeof(real));
                if (to[panel] < columns)
                    memset(each + to[panel], 0, (columns - to[panel]) * sizeof(real));
                if (each == dweight + i * KEYS)
                    break;
            }
            differentiate(of, rows, row, base, delta, masked || row >= rows->count, block, from[panel], to[panel],
                          weight + i * KEYS, dweight + i * KEYS);
        }
    }
    for (long j = 0; j < count; j += MR) {
        long first = 0, last = panels;  // panels that see some of the keys [j, j + MR)
        while (first < last && (to[first] <= j || from[first] >= j + MR))
            first++;
        while (first < last && (to[last - 1] <= j || from[last - 1] >= j + MR))
            last--;
        if (first == last)
            continue;
        const long at = first * MR, deep = (last - first) * MR;
        for (long c = 0; c < value_width; c += NR)
            product(1, work->weight + at * KEYS + j, 1, KEYS, tile->dout_by_dim + c * ROWS + at * NR, deep,
                    work->dv + j * value_width + c, value_width);
        for (long c = 0; c < width; c += NR)
            product(1, work->dweight + at * KEYS + j, 1, KEYS, tile->q_by_dim + c * ROWS + at * NR, deep,
                    work->dk + j * width + c, width);
    }
    for (long panel = 0; panel < panels; panel++)
        for (long c = 0; c < width; c += NR)
            product(0, work->dweight + panel * MR * KEYS + from[panel], KEYS, 1,
                    work->keys_by_dim + c * KEYS + from[panel] * NR, to[panel] - from[panel],
                    work->dq + panel * MR * width + c, width);
    if (tile->odd_q.count || tile->odd_dout.count || work->odd_keys.count)
        add_odd(of, work, tile, block, width, value_width);
}

// Adds dq of a tile and of a block of keys where a row sees some of them.
static void add_dq(const struct launch* of, const struct backward_work* work, const struct rows* rows, int kv_head,
                   long block, long count) {
    const long width = rounded_up(of->head_dim, NR);
    for (long i = 0; i < rows->count; i++)
        if (most(rows->from[i], block) < least(rows->to[i], block + count))
            add_scaled((real*)row_at(of, &of->dq, kv_head, rows->first + i), of->scale, work->dq + i * width, 1,
                       of->head_dim);
}

struct backward_pieces {  // what threads share: rows of one KV head, at most TILES tiles
    int kv_head;
    long first, last, tiles;
    struct packed_rows* tile;
    char* scratch;
    int64_t bytes;  // of a thread's scratch memory
};

// Packs a tile of rows after the other.
static void pack_worker(struct job* job, int thread, void* with) {
    const struct backward_pieces* pieces = with;
    const struct launch* of = job->of;
    struct backward_work work;
    backward_work(of, pieces->scratch + thread * pieces->bytes, &work);
    for (long t; (t = take_piece(job)) < pieces->tiles;) {
        struct packed_rows* tile = pieces->tile + t;
        const long at = pieces->first + t * ROWS;
        tile->turn = 0;
        look(of, pieces->kv_head, at, least(pieces->last - at, ROWS), 0, of->keys, &tile->rows);
        if (tile->rows.lowest < tile->rows.highest) {
            pack_rows(of, &of->q, pieces->kv_head, of->head_dim, &tile->rows, of->scale, work.row, tile->q,
                      tile->q_by_dim, ROWS, &tile->odd_q);
            pack_rows(of, &of->dout, pieces->kv_head, of->value_dim, &tile->rows, 1, work.row, tile->dout,
                      tile->dout_by_dim, ROWS, &tile->odd_dout);
        }
    }
}

// A block of keys with every tile of rows; returns whether to go on.
static int backward_block(struct job* job, int thread, const struct backward_pieces* pieces, struct backward_work* work,
                          long number) {
    const struct launch* of = job->of;
    const int kv_head = pieces->kv_head;
    const long width = rounded_up(of->head_dim, NR), value_width = rounded_up(of->value_dim, NR);
    const long block = number * KEYS, count = least(of->keys - block, KEYS);
    int packed = 0;
    for (long t = 0; t < pieces->tiles; t++) {
        struct packed_rows* tile = pieces->tile + t;
        const int work_to_do = most(tile->rows.lowest, block) < least(tile->rows.highest, block + count);
        if (work_to_do && !packed) {
            pack_keys(of, &of->k, kv_head, of->head_dim, block, count, work->row, work->keys, work->keys_by_dim, KEYS,
                      &work->odd_keys);
            pack_keys(of, &of->v, kv_head, of->value_dim, block, count, work->row, work->values, 0, 0, 0);
            memset(work->dk, 0, KEYS * width * sizeof(real));
            memset(work->dv, 0, KEYS * value_width * sizeof(real));
            packed = 1;
        }
        if (work_to_do)
            backward_tile(of, work, tile, kv_head, block, count);
        while (__atomic_load_n(&tile->turn, __ATOMIC_ACQUIRE) != number) {
            if (give_up(job, thread))
                return 0;
            sched_yield();
        }
        if (work_to_do)
            add_dq(of, work, &tile->rows, kv_head, block, count);
        __atomic_store_n(&tile->turn, number + 1, __ATOMIC_RELEASE);
        if (give_up(job, thread))
            return 0;
        count_done(job, count);
    }
    for (long j = 0; packed && j < count; j++) {
        add_scaled((real*)(of->dk.data + (block + j) * of->dk.token + kv_head * of->dk.head), 1, work->dk + j * width,
                   1, of->head_dim);
        add_scaled((real*)(of->dv.data + (block + j) * of->dv.token + kv_head * of->dv.head), 1,
                   work->dv + j * value_width, 1, of->value_dim);
    }
    return 1;
}

static void backward_worker(struct job* job, int thread, void* with) {
    const struct backward_pieces* pieces = with;
    struct backward_work work;
    backward_work(job->of, pieces->scratch + thread * pieces->bytes, &work);
    for (long block; (block = take_piece(job)) * KEYS < job->of->keys;)
        if (!backward_block(job, thread, pieces, &work, block))
            return;
}

static int32_t backward(const struct launch* of) {
    struct job job;
    struct backward_pieces pieces;
    struct backward_work none;
    const long rows = rows_of(of), tiles = (rows + ROWS - 1) / ROWS, blocks = (of->keys + KEYS - 1) / KEYS;
    pieces.scratch = of->scratch + row_work(of, of->scratch, &pieces.tile);
    pieces.bytes = backward_work(of, 0, &none);
    begin_job(&job, of, tiles * of->keys * of->kv_heads);
    for (pieces.kv_head = 0; pieces.kv_head < of->kv_heads; pieces.kv_head++)
        for (pieces.first = 0; pieces.first < rows; pieces.first += ROWS * TILES) {
            pieces.last = least(pieces.first + ROWS * TILES, rows);
            pieces.tiles = (pieces.last - pieces.first + ROWS - 1) / ROWS;
            const double operations = 6.0 * (of->head_dim + of->value_dim) * (pieces.last - pieces.first) * of->keys;
            const int threads = threads_for(of, operations, blocks);
            if (in_threads(&job, threads_for(of, operations, pieces.tiles), pack_worker, &pieces) ||
                in_threads(&job, threads, backward_worker, &pieces))
                return 1;
        }
    return 0;
}
