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

#ifdef __AVX512BF16__
#include "gradient_pairs.h"
#else
#include "gradient.h"
#endif
#include "work.h"

// Whether a KV head is so little work that a thread does it alone, reading the next one's rows meanwhile.
static int is_alone(const struct launch* of) { return is_small(of) && of->keys <= KEYS; }

// The rows in work, shared by the threads unless each has its own; tile is NULL where only the bytes are asked for.
static int64_t row_work(const struct launch* of, char* scratch, struct packed_rows** tile) {
    char* at = scratch;
    const long width = rounded_up(of->head_dim, NR), value_width = rounded_up(of->value_dim, NR);
    const long of_head = (most(rows_of(of), 1) + ROWS - 1) / ROWS;
    const long tiles = least(is_alone(of) ? of_head * of->threads : of_head, TILES);
    struct packed_rows *into = take(&at, tiles * sizeof *into), none;
    for (long t = 0; t < tiles; t++) {
        struct packed_rows* each = tile ? into + t : &none;
        each->q = take(&at, (ROWS * DEPTH(of->head_dim) + SLACK) * sizeof(operand));
        each->dout = take(&at, (ROWS * DEPTH(of->value_dim) + SLACK) * sizeof(operand));
        each->q_by_dim = take(&at, ROWS * width * sizeof(operand));
        each->dout_by_dim = take(&at, ROWS * value_width * sizeof(operand));
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

// Adds dq of a tile and of a block of keys where a row sees some of them.
static void add_dq(const struct launch* of, const struct backward_work* work, const struct rows* rows, long block,
                   long count) {
    const long width = rounded_up(of->head_dim, NR);
    for (long i = 0; i < rows->count; i++) {
        prefetch_row_at(rows, &of->dq, i, of->head_dim * sizeof(real));
        if (most(rows->from[i], block) < least(rows->to[i], block + count))
            add_scaled((real*)row_at(rows, &of->dq, i), of->scale, work->dq + i * width, 1, of->head_dim);
    }
}

struct backward_pieces {  // what threads share: rows of one KV head, at most TILES tiles
    int kv_head;
    long first, last, tiles;
    struct packed_rows* tile;
    char* scratch;
    int64_t bytes;  // of a thread's scratch memory
};

static void pack_tile(const struct launch* of, const struct backward_pieces* pieces, const struct backward_work* work,
                      long t) {
    struct packed_rows* tile = pieces->tile + t;
    const long at = pieces->first + t * ROWS;
    tile->turn = 0;
    look(of, pieces->kv_head, at, least(pieces->last - at, ROWS), 0, of->keys, &tile->rows);
    if (tile->rows.lowest >= tile->rows.highest)
        return;
    pack_rows(of, &work->ahead.from->q, of->head_dim, &tile->rows, of->scale, work->row, tile->q, tile->q_by_dim, ROWS,
              &tile->odd_q);
    pack_rows(of, &work->ahead.from->dout, of->value_dim, &tile->rows, 1, work->row, tile->dout, tile->dout_by_dim,
              ROWS, &tile->odd_dout);
    for (long i = 0; i < ROWS; i++) {
        const int some = i < tile->rows.count;
        const real lse = some ? *(real*)row_at(&tile->rows, &of->lse, i) : 0;
        tile->base[i] = lse == -INFINITY ? 0 : lse;
        tile->delta[i] = some ? *(real*)row_at(&tile->rows, &of->delta, i) : 0;
    }
}

static void pack_worker(struct job* job, int thread, void* with) {
    const struct backward_pieces* pieces = with;
    struct backward_work work;
    backward_work(job->of, pieces->scratch + thread * pieces->bytes, &work);
    for (long t; (t = take_piece(job)) < pieces->tiles;)
        pack_tile(job->of, pieces, &work, t);
}

// A block of keys with every tile of rows; returns whether to go on.
static int backward_block(struct job* job, int thread, const struct backward_pieces* pieces, struct backward_work* work,
                          long number) {
    const struct launch* of = job->of;
    const int kv_head = pieces->kv_head;
    const long block = number * KEYS, count = least(of->keys - block, KEYS);
    int packed = 0;
    for (long t = 0; t < pieces->tiles; t++) {
        struct packed_rows* tile = pieces->tile + t;
        const int work_to_do = most(tile->rows.lowest, block) < least(tile->rows.highest, block + count);
        if (work_to_do && !packed) {
            pack_keys(of, &work->ahead.from->k, kv_head, of->head_dim, block, count, work->row, work->keys,
                      work->keys_by_dim, KEYS, &work->odd_keys);
            pack_keys(of, &work->ahead.from->v, kv_head, of->value_dim, block, count, work->row, work->values, 0, 0, 0);
            clear_keys(of, work, count);
            packed = 1;
        }
        if (work_to_do)
            backward_tile(of, work, tile, block, count);
        while (__atomic_load_n(&tile->turn, __ATOMIC_ACQUIRE) != number) {
            if (give_up(job, thread))
                return 0;
            sched_yield();
        }
        if (work_to_do)
            add_dq(of, work, &tile->rows, block, count);
        __atomic_store_n(&tile->turn, number + 1, __ATOMIC_RELEASE);
        if (give_up(job, thread))
            return 0;
        count_done(job, count);
    }
    if (packed)
        add_keys(of, work, kv_head, block, count);
    return 1;
}

static void backward_worker(struct job* job, int thread, void* with) {
    const struct backward_pieces* pieces = with;
    struct backward_work work;
    backward_work(job->of, pieces->scratch + thread * pieces->bytes, &work);
    for (long block; (block = take_piece(job)) * KEYS < job->of->keys;)
        if (!backward_block(job, thread, pieces, &work, block))
            break;
}

// A KV head after the other, alone.
static void head_worker(struct job* job, int thread, void* with) {
    struct backward_pieces pieces = *(const struct backward_pieces*)with;
    const struct launch* of = job->of;
    struct backward_work work;
    pieces.tile += thread * pieces.tiles;
    backward_work(of, pieces.scratch + thread * pieces.bytes, &work);
    for (long head = take_piece(job), next; head < of->kv_heads; head = next) {
        next = take_piece(job);
        pieces.kv_head = head;
        for (long t = 0; t < pieces.tiles; t++)
            pack_tile(of, &pieces, &work, t);
        if (next < of->kv_heads)
            begin_ahead(&work.ahead, next, pieces.last);
        if (!backward_block(job, thread, &pieces, &work, 0))
            return;
        end_ahead(&work.ahead);
    }
}

static int32_t backward(const struct launch* of) {
    struct job job;
    struct backward_pieces pieces;
    struct backward_work none;
    const long rows = rows_of(of), tiles = (rows + ROWS - 1) / ROWS, blocks = (of->keys + KEYS - 1) / KEYS;
    pieces.scratch = of->scratch + row_work(of, of->scratch, &pieces.tile);
    pieces.bytes = backward_work(of, 0, &none);
    begin_job(&job, of, tiles * of->keys * of->kv_heads);
    if (is_alone(of)) {
        pieces.first = 0, pieces.last = rows, pieces.tiles = tiles;
        const double operations = 6.0 * (of->head_dim + of->value_dim) * rows * of->keys * of->kv_heads;
        return in_threads(&job, least(threads_for(of, operations, of->kv_heads), TILES / tiles), head_worker, &pieces);
    }
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
