// Attention of a block whose rows see several intervals: tile by tile, with the columns of each.

#pragma once

#include "forward_tile.h"
#include "work.h"

#define CACHED_BYTES (1 << 19)  // of keys and values

#define MOST_TILES 8        // of a piece
#define MANY_PIECES 64      // of which there should be as many: results must not depend on the number of threads

// A piece of work is some tiles of rows, whose columns are packed once, of some KV heads whose rows see the same.
struct column_pieces {
    struct order order;
    long tiles, step, heads;  // tiles of a piece, at most; from one to the next; KV heads of a piece
    long of_head;             // pieces of a KV head
    int64_t bytes;            // of a thread's scratch memory
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

// The tiles first, first + step and so on before `stop`.
struct tiles {
    long first, step, stop;
};

// The tiles of a piece.  Patches are stacked across periods, and tiles of tokens in their own order follow one another.
// Those after the last period are pieces of their own.
static struct tiles tiles_of_piece(const struct column_pieces* pieces, long piece) {
    const long tiles = tiles_of(&pieces->order), of_patches = tiles - pieces->order.rest * pieces->order.parts;
    const long step = pieces->step, stack = pieces->tiles * step, stacks = (of_patches + stack - 1) / stack * step;
    const long first = piece / step * stack + piece % step;
    if (piece >= stacks)
        return (struct tiles){of_patches + piece - stacks, 1, of_patches + piece - stacks + 1};
    return (struct tiles){first, step, min(first + stack, of_patches)};
}

// The columns in work, of a KV head; returns whether to go on.  all: columns of the window.
static int forward_taken(struct job* job, int thread, struct forward_work* work, const struct column_pieces* pieces,
                         struct columns* columns, long all, struct tiles tiles, int kv_head, struct rows* rows) {
    const struct launch* of = job->of;
    pack_keys(of, &of->k, kv_head, of->head_dim, 0, columns->count, work->row, work->keys, 0, 0, 0, columns->key);
    pack_keys(of, &of->v, kv_head, of->value_dim, 0, columns->count, work->row, 0, work->values, work->pitch,
              &work->odd, columns->key);
    for (long tile = tiles.first; tile < tiles.stop; tile += tiles.step) {
        place_rows(of, &pieces->order, tile, kv_head, rows);
        find_shifts(of, rows, columns);
        find_seen_columns(of, all, columns, rows);
        forward_tile(job, thread, work, kv_head, 0, rows);
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
    const long all_pieces = pieces->of_head * (of->kv_heads / pieces->heads);
    for (long piece; (piece = take_piece(job)) < all_pieces && !is_stopped(job);) {
        const long kv_head = piece / pieces->of_head * pieces->heads;  // pieces near each other in turn
        const struct tiles tiles = tiles_of_piece(pieces, piece % pieces->of_head);
        long from = of->keys, to = 0;
        for (long tile = tiles.first; tile < tiles.stop; tile += tiles.step) {
            long first, last;
            place_rows(of, &pieces->order, tile, kv_head, &rows);
            find_hull(of, &rows, &first, &last);
            from = min(from, first), to = max(to, last);
        }
        for (long key = from; key < to; key += WINDOW_KEYS) {
            begin_columns(of, key, &columns);
            for (long tile = tiles.first; tile < tiles.stop; tile += tiles.step) {
                place_rows(of, &pieces->order, tile, kv_head, &rows);
                find_shifts(of, &rows, &columns);
                join_columns(of, &rows, &columns);
            }
            const long all = count_columns(of, &columns);
            for (long column = 0; column < all; column += COLUMNS) {
                take_columns(of, column, all, &columns);
                for (long head = kv_head; head < kv_head + pieces->heads; head++)
                    if (!forward_taken(job, thread, &work, pieces, &columns, all, tiles, head, &rows))
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

// So many tiles of a piece that their columns are packed at once, if those of a tile are.
static long tiles_of_stack(const struct launch* of, const struct order* order) {
    const int patches = order->periods > 1;
    const long most = min(patches ? order->bands : MOST_TILES, MOST_TILES);
    long tiles = 1;
    for (long more = 2; more <= most && tiles_of(order) * of->kv_heads / more >= MANY_PIECES; more++) {
        const double width = patches ? order->width : order->width * more, height = patches ? order->height * more : 1;
        const double one = keys_seen(order->width, order->height, order->along, order->across);
        if (one > COLUMNS || keys_seen(width, height, order->along, order->across) <= COLUMNS)
            tiles = more;
    }
    return tiles;
}

static int32_t forward_of_columns(const struct launch* of) {
    struct job job;
    struct column_pieces pieces;
    const double operations = 2.0 * (of->head_dim + of->value_dim) * rows_of(of) * of->keys * of->kv_heads;
    struct order* order = &pieces.order;
    *order = find_order(of, MAX_ROWS);
    pieces.tiles = tiles_of_stack(of, order), pieces.step = order->periods > 1 ? order->strips * order->parts : 1;
    const long rest = order->rest * order->parts, stack = pieces.tiles * pieces.step;
    pieces.of_head = (tiles_of(order) - rest + stack - 1) / stack * pieces.step + rest;
    pieces.heads = heads_of_piece(of, pieces.of_head), pieces.bytes = column_thread_bytes(of);
    begin_job(&job, of, pieces.of_head * of->kv_heads);
    return in_threads(&job, threads_for(of, operations, pieces.of_head * of->kv_heads / pieces.heads), column_worker,
                      &pieces);
}
