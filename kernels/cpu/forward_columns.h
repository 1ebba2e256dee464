// Attention of a block whose rows see several intervals: tile by tile, with the columns of each.

#pragma once

#include "forward_tile.h"
#include "work.h"

#define CACHED_BYTES (1 << 19)  // of keys and values

// A piece of work is a tile of rows, of some KV heads whose rows see the same.
struct column_pieces {
    struct order order;
    long tiles, heads;  // of a KV head's rows; KV heads of a piece
    int64_t bytes;      // of a thread's scratch memory
};

static int64_t column_work(const struct launch* of, char* scratch, struct forward_work* work, struct columns* columns) {
    char* at = scratch + rounded_up(forward_work(of, scratch, work), 64);
    columns_work(&at, columns);
    return at - scratch;
}

static int64_t column_thread_bytes(const struct launch* of) {
    struct forward_work work;
    struct columns columns;
    return column_work(of, 0, &work, &columns);
}

// The columns in work, of the KV heads from `kv_head` on; returns whether to go on.
static int forward_taken(struct job* job, int thread, struct forward_work* work, const struct column_pieces* pieces,
                         const struct columns* columns, int kv_head, struct rows* rows) {
    const struct launch* of = job->of;
    for (long head = kv_head; head < kv_head + pieces->heads; head++) {
        for (long i = 0; head > kv_head && i < rows->count; i++) {
            rows->place[i].head += of->heads / of->kv_heads;
            rows->place[i].sequence = sequence_of(of, rows->place[i].head);
        }
        pack_keys(of, &of->k, head, of->head_dim, 0, columns->count, work->row, work->keys, 0, 0, 0, columns->key);
        pack_keys(of, &of->v, head, of->value_dim, 0, columns->count, work->row, 0, work->values, work->pitch,
                  &work->odd, columns->key);
        forward_tile(job, thread, work, head, 0, rows);
        if (give_up(job, thread))
            return 0;
    }
    return 1;
}

static void column_worker(struct job* job, int thread, void* with) {
    const struct column_pieces* pieces = with;
    const struct launch* of = job->of;
    struct forward_work work;
    struct columns columns;
    struct rows rows;
    column_work(of, of->scratch + thread * pieces->bytes, &work, &columns);
    for (long piece; (piece = take_piece(job)) < pieces->tiles * (of->kv_heads / pieces->heads) && !is_stopped(job);) {
        const long tile = piece % pieces->tiles, kv_head = piece / pieces->tiles * pieces->heads;  // near tiles in turn
        long from, to;
        place_rows(of, &pieces->order, tile, kv_head, &rows);
        find_hull(of, &rows, &from, &to);
        find_shifts(of, &rows, &columns);
        for (long key = from; key < to; key += WINDOW_KEYS) {
            const long all = find_columns(of, &rows, key, &columns);
            for (long column = 0; column < all; column += COLUMNS) {
                place_rows(of, &pieces->order, tile, kv_head, &rows);
                take_columns(of, column, all, &columns);
                find_seen_columns(of, all, &columns, &rows);
                if (!forward_taken(job, thread, &work, pieces, &columns, kv_head, &rows))
                    return;
            }
        }
        count_done(job, pieces->heads);
    }
}

// KV heads of a piece, whose rows see the same: so few that their rows stay in the L2 cache from one piece to the next,
// and that there are enough pieces for all threads.
static long heads_of_piece(const struct launch* of, long tiles) {
    const long bytes = COLUMNS / 2 * element_bytes[of->element] * (of->head_dim + of->value_dim);
    const long most = min(max(CACHED_BYTES / bytes, 1), max(tiles * of->kv_heads / (4 * of->threads), 1));
    const long alike = of->kv_heads % of->groups ? 1 : of->kv_heads / of->groups;
    long heads = min(alike, most);
    while (alike % heads)
        heads--;
    return heads;
}

static int32_t forward_of_columns(const struct launch* of) {
    struct job job;
    struct column_pieces pieces;
    const double operations = 2.0 * (of->head_dim + of->value_dim) * rows_of(of) * of->keys * of->kv_heads;
    pieces.order = find_order(of, MAX_ROWS), pieces.tiles = tiles_of(&pieces.order);
    pieces.heads = heads_of_piece(of, pieces.tiles), pieces.bytes = column_thread_bytes(of);
    begin_job(&job, of, pieces.tiles * of->kv_heads);
    return in_threads(&job, threads_for(of, operations, pieces.tiles * of->kv_heads / pieces.heads), column_worker,
                      &pieces);
}
