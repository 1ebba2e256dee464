// Attention of a block, added to the partial (out, lse) of its rows: online softmax, tile by tile.
//
// The keys of a KV head are packed, PANEL at a time.  A tile of rows then goes over them in blocks of BLOCK keys: the
// scores of MR rows with a block stay in the L1 cache between their product, their softmax and the product with the
// values.  Keys that no row of a panel sees are skipped, and only those that some of them do not see are masked.
//
// A piece of work is tiles of one KV head, all of them if there is one thread.  Where windows are narrow it is a few
// tiles, and only the keys that they see are packed.

#pragma once

#include "forward_columns.h"

#define PIECES 4                // of work for a thread, at least, so that all are done at about the same time
#define WINDOW 512              // keys, at most, that the rows of a tile see if windows are narrow
#define WINDOW_TILES 8          // in a piece of work then
#define ALIGNED 64              // keys of which each is packed with its neighbours

// Bytes of scratch memory of a thread, and of a launch.
static int64_t thread_bytes(const struct launch* of) {
    struct forward_work work;
    return forward_work(of, 0, &work);
}

static int64_t forward_bytes(const struct launch* of) {
    return (of->lists > 1 ? column_thread_bytes(of) : thread_bytes(of)) * of->threads;
}

// Packs those of the keys [start, stop) that are in the panel of which `key` is the first, each at its place in it.
static void pack_panel(const struct launch* of, struct forward_work* work, int kv_head, long key, long start,
                       long stop) {
    const long skipped = max(start - key, 0) / ALIGNED * ALIGNED;
    const long end = min(rounded_up(stop - key, ALIGNED), min(of->keys - key, PANEL)), width = DEPTH(of->head_dim);
    const struct launch* from = work->ahead.from;
    pack_keys(of, &from->k, kv_head, of->head_dim, key + skipped, end - skipped, work->row,
              work->keys + skipped * width, 0, 0, 0, 0);
    pack_keys(of, &from->v, kv_head, of->value_dim, key + skipped, end - skipped, work->row, 0,
              work->values + skipped * NR, work->pitch, &work->odd, 0);
    for (long n = 0; n < work->odd.count; n++)
        work->odd.row[n] += skipped;
}

// Tiles of rows [first, last) of a KV head, which see no keys but [start, stop).
static void forward_rows(struct job* job, int thread, struct forward_work* work, int kv_head, long first, long last,
                         long start, long stop) {
    const struct launch* of = job->of;
    struct rows rows;
    for (long key = 0; key < of->keys; key += PANEL) {
        const long keys = min(of->keys - key, PANEL);
        int packed = 0;
        for (long tile = first; tile < last; tile++) {
            const long row = tile * MAX_ROWS, count = min(rows_of(of) - row, MAX_ROWS);
            if (key < stop && key + keys > start && see_any(of, kv_head, row, count, key, key + keys)) {
                find_seen(of, kv_head, row, count, key, key + keys, &rows);
                if (!packed)
                    pack_panel(of, work, kv_head, key, start, stop);
                packed = 1;
                forward_tile(job, thread, work, kv_head, key, &rows);
            }
            if (give_up(job, thread))
                return;
            count_done(job, keys);
        }
    }
}

struct forward_pieces {
    long tiles, size, of_head;                  // of rows of a KV head; in a piece; pieces of a KV head
    int narrow;                                 // whether windows are
    int64_t bytes;                              // of a thread's scratch memory
};

static void forward_worker(struct job* job, int thread, void* with) {
    const struct forward_pieces* pieces = with;
    struct forward_work work;
    forward_work(job->of, job->of->scratch + thread * pieces->bytes, &work);
    const long all = pieces->of_head * job->of->kv_heads, rows = rows_of(job->of);
    const long products = (job->of->keys + NR - 1) / NR + (job->of->value_dim + NR - 1) / NR;   // of a panel
    const long steps = rows + (rows + MR - 1) / MR * products;
    for (long piece = take_piece(job); piece < all && !is_stopped(job);) {
        // The same rows of all heads, which lie close together; the last rows, often with most keys, first.
        const long at = pieces->of_head - 1 - piece / job->of->kv_heads, kv_head = piece % job->of->kv_heads;
        const long first = at * pieces->size, last = min(first + pieces->size, pieces->tiles);
        long start = 0, stop = job->of->keys;
        if (pieces->narrow)
            seen_keys(job->of, kv_head, first * MAX_ROWS, min(last * MAX_ROWS, rows) - first * MAX_ROWS, &start, &stop);
        const long next = is_small(job->of) ? take_piece(job) : all;
        if (next < all)
            begin_ahead(&work.ahead, next, steps);
        forward_rows(job, thread, &work, kv_head, first, last, start, stop);
        end_ahead(&work.ahead);
        piece = is_small(job->of) ? next : take_piece(job);
    }
}

// Whether the rows of every tile see few keys, close together.  Tiles with rows of two heads do not count.
static int is_narrow(const struct launch* of) {
    for (long row = 0; row < of->groups * of->tokens; row += MAX_ROWS) {
        long from = of->keys, to = 0;
        extend_to_seen(of->begin + row, of->end + row, min(of->groups * of->tokens - row, MAX_ROWS), &from, &to);
        if (to - from > WINDOW && row / of->tokens == (row + MAX_ROWS - 1) / of->tokens)
            return 0;
    }
    return 1;
}

static int32_t forward(const struct launch* of) {
    if (of->lists > 1)
        return forward_of_columns(of);
    struct job job;
    struct forward_pieces pieces;
    const long tiles = (rows_of(of) + MAX_ROWS - 1) / MAX_ROWS;
    const double operations = 2.0 * (of->head_dim + of->value_dim) * rows_of(of) * of->keys * of->kv_heads;
    const int threads = threads_for(of, operations, tiles * of->kv_heads);
    // Every piece packs its keys anew, so that one thread takes whole heads, unless they see few keys.
    pieces.tiles = tiles, pieces.bytes = thread_bytes(of);
    pieces.narrow = tiles > WINDOW_TILES && is_narrow(of);
    pieces.size = threads == 1 ? tiles : max(1, tiles * of->kv_heads / (PIECES * threads));
    pieces.size = min(pieces.size, pieces.narrow ? WINDOW_TILES : tiles);
    pieces.of_head = (tiles + pieces.size - 1) / pieces.size;
    begin_job(&job, of, tiles * of->keys * of->kv_heads);
    return in_threads(&job, threads, forward_worker, &pieces);
}
