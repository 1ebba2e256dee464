// Gradients of a block whose rows see several intervals: tile by tile, with the columns of each.
//
// A thread has a tile of rows of a KV head, whose dQ no other adds to.  dK and dV of a key are added to in the order of
// the tiles: a thread waits until no tile before its own has yet to add to keys among those that it adds to.  The last
// columns are first, so that the tiles of a grid seldom wait for the one before.

#pragma once

#include "backward_tile.h"

#define TURNS (2 * MAX_THREADS)

// The piece of work, a tile of a KV head, and the keys [lowest, highest) to which it has yet to add.
struct turn {
    long piece, lowest, highest;
};

struct column_turns {  // what threads share
    struct order order;
    long tiles, places;  // of a KV head; of turns, by piece modulo `places`
    struct turn turn[TURNS];
    int64_t bytes;  // of a thread's scratch memory
};

static int64_t column_row_work(const struct launch* of, char* scratch, struct backward_work* work,
                               struct columns* columns, struct packed_rows* tile) {
    char* at = scratch + rounded_up(backward_work(of, scratch, work), 64);
    columns_work(&at, columns);
    take_rows(of, &at, tile);
    return at - scratch;
}

static int64_t column_row_bytes(const struct launch* of) {
    struct backward_work work;
    struct columns columns;
    struct packed_rows tile;
    return column_row_work(of, 0, &work, &columns, &tile);
}

// Waits until no piece before this one, of the same KV head or, if `all`, of any, has yet to add to the keys
// [from, to); returns whether to go on.  Other pieces have begun then, and so those that were in their places are done.
static int wait_for_keys(struct job* job, int thread, const struct column_turns* turns, long piece, int all, long from,
                         long to) {
    const long kv_heads = job->of->kv_heads;
    for (long before = piece - 1; before >= 0 && before > piece - turns->places; before--) {
        const struct turn* turn = turns->turn + before % turns->places;
        const int alike = all || (piece - before) % kv_heads == 0;
        for (;;) {
            const long number = load_acquire(&turn->piece);
            if (number > before || (number == before && !alike) ||
                (number == before && (load_acquire(&turn->lowest) >= to || load_acquire(&turn->highest) <= from)))
                break;
            if (give_up(job, thread))
                return 0;
            sched_yield();
        }
    }
    return 1;
}

// The columns in work, from the last block of them to the first; returns whether to go on.
static int backward_taken(struct job* job, int thread, struct column_turns* turns, struct backward_work* work,
                          const struct columns* columns, struct packed_rows* tile, long piece, int kv_head) {
    const struct launch* of = job->of;
    const struct sharing sharing = sharing_of(of);
    for (long block = (columns->count - 1) / KEYS * KEYS; block >= 0; block -= KEYS) {
        const long count = min(columns->count - block, KEYS);
        const int32_t* key = columns->key + block;
        pack_keys(of, &of->k, kv_head, of->head_dim, 0, count, work->row, work->keys, work->keys_by_dim, KEYS,
                  &work->odd_keys, key);
        pack_keys(of, &of->v, kv_head, of->value_dim, 0, count, work->row, work->values, 0, 0, 0, key);
        clear_keys(of, work, count);
        if (sharing.any && !wait_for_keys(job, thread, turns, piece, size_of(&sharing) > 1, key[0], key[count - 1] + 1))
            return 0;
        backward_tile(of, work, tile, block, count);
        add_dq(of, work, &tile->rows, block, count);
        if (!wait_for_keys(job, thread, turns, piece, 0, key[0], key[count - 1] + 1))
            return 0;
        add_keys(of, work, kv_head, 0, count, key);
        set(&turns->turn[piece % turns->places].highest, key[0]);
        if (give_up(job, thread))
            return 0;
    }
    return 1;
}

// A tile of a KV head; returns whether to go on.
static int backward_piece(struct job* job, int thread, struct column_turns* turns, struct backward_work* work,
                          struct columns* columns, struct packed_rows* tile, long piece) {
    const struct launch* of = job->of;
    const int kv_head = piece % of->kv_heads;
    struct turn* turn = turns->turn + piece % turns->places;
    long from, to;
    place_rows(of, &turns->order, piece / of->kv_heads, kv_head, &tile->rows);
    pack_found(of, work, tile);
    find_hull(of, &tile->rows, &from, &to);
    find_shifts(of, &tile->rows, columns);
    if (!wait_for(job, thread, &turn->piece, piece - turns->places) || !wait_for(job, thread, &turn->lowest, LONG_MAX))
        return 0;
    set(&turn->highest, to);
    set(&turn->lowest, from);
    set(&turn->piece, piece);
    for (long window = (to - from + WINDOW_KEYS - 1) / WINDOW_KEYS; window-- > 0;) {
        begin_columns(of, from + window * WINDOW_KEYS, columns);
        join_columns(of, &tile->rows, columns);
        const long all = count_columns(of, columns);
        for (long part = (all + COLUMNS - 1) / COLUMNS; part-- > 0;) {
            take_columns(of, part * COLUMNS, all, columns);
            find_seen_columns(of, all, columns, &tile->rows);
            if (!backward_taken(job, thread, turns, work, columns, tile, piece, kv_head))
                return 0;
        }
    }
    set(&turn->lowest, LONG_MAX);
    return 1;
}

static void column_row_worker(struct job* job, int thread, void* with) {
    struct column_turns* turns = with;
    const struct launch* of = job->of;
    struct backward_work work;
    struct columns columns;
    struct packed_rows tile;
    column_row_work(of, of->scratch + thread * turns->bytes, &work, &columns, &tile);
    for (long piece; (piece = take_piece(job)) < turns->tiles * of->kv_heads && !is_stopped(job);) {
        if (!backward_piece(job, thread, turns, &work, &columns, &tile, piece))
            return;
        count_done(job, 1);
    }
}

static int32_t backward_of_columns(const struct launch* of) {
    struct job job;
    struct column_turns turns;
    const double operations = 6.0 * (of->head_dim + of->value_dim) * rows_of(of) * of->keys * of->kv_heads;
    turns.order = find_order(of, ROWS), turns.tiles = tiles_of(&turns.order);
    turns.bytes = column_row_bytes(of);
    const int threads = threads_for(of, operations, turns.tiles * of->kv_heads);
    turns.places = 2 * threads;
    for (long n = 0; n < turns.places; n++)
        turns.turn[n] = (struct turn){n - turns.places, LONG_MAX, 0};
    begin_job(&job, of, turns.tiles * of->kv_heads);
    return in_threads(&job, threads, column_row_worker, &turns);
}
