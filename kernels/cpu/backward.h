// Gradients of a block, added to dq, dk and dv.  With the scores S after scale and softcap, P = exp(S - lse) and
// dP = dout V^T:
//     dV = P^T dout    dS = P (dP - delta)    dQ = scale dS K    dK = scale dS^T Q
// A softcap multiplies dS by 1 - tanh^2.
//
// The rows of a KV head are packed, TILES tiles of ROWS at a time, which are a group.  Then, for each block of KEYS
// keys, every tile that sees some of them makes P and dS, which stay in the L2 cache for the other three products: dV
// and dK are sums over the tiles, and dQ is added to row by row.  A thread packs a tile or has a block of keys; threads
// go on with the next group, of the next KV head too, while others are busy with this one.  Blocks are added to the dQ
// of a tile in one order, and to dK and dV after the group before.  So every sum has one order, and the same inputs
// give the same bits on any number of threads.  The last keys are first: under a causal mask the rows that see a block
// begin with some that no block before it has seen, and so its thread need not wait.

#pragma once

#include "backward_columns.h"

// Whether a KV head is so little work that a thread does it alone, reading the next one's rows meanwhile.
static int is_alone(const struct launch* of) { return is_small(of) && of->keys <= KEYS; }

// A group in work, or the place of one.  The numbers are written by one thread and read by others.
struct group {
    int kv_head;
    long tiles;
    struct packed_rows* tile;
    long number, packed, done;  // of the group; its tiles that are packed; its blocks of keys that are done
};

struct backward_pieces {  // what threads share
    long rows, tiles, groups, blocks;  // of a KV head
    struct group group[2];  // in work, by number modulo `places`
    long places;
    char* scratch;
    int64_t bytes;  // of a thread's scratch memory
};

// Takes the scratch memory of packed rows: of groups, or of each thread where it works alone.
static int64_t row_work(const struct launch* of, char* scratch, struct backward_pieces* pieces) {
    char* at = scratch;
    pieces->rows = rows_of(of), pieces->tiles = (pieces->rows + ROWS - 1) / ROWS;
    pieces->groups = (pieces->tiles + TILES - 1) / TILES, pieces->blocks = (of->keys + KEYS - 1) / KEYS;
    pieces->places = is_alone(of) || of->threads == 1 || pieces->groups * of->kv_heads == 1 ? 1 : 2;
    const long most_tiles = min(max(pieces->tiles, 1), TILES);
    const long tiles = is_alone(of) ? min(most_tiles * of->threads, TILES) : most_tiles * pieces->places;
    struct packed_rows* into = take(&at, tiles * sizeof *into);
    for (long n = 0; n < pieces->places; n++)
        pieces->group[n] =
            (struct group){.tile = scratch ? into + n * most_tiles : 0, .number = n - pieces->places, .done = LONG_MAX};
    for (long t = 0; t < tiles; t++) {
        struct packed_rows none, *each = scratch ? into + t : &none;
        take_rows(of, &at, each);
    }
    return at - scratch;
}

static int64_t backward_bytes(const struct launch* of) {
    struct backward_pieces pieces;
    struct backward_work work;
    if (of->lists > 1)
        return column_row_bytes(of) * of->threads;
    return row_work(of, 0, &pieces) + of->threads * backward_work(of, 0, &work);
}

// Packs the rows of a KV head from `first` on as a tile.
static void pack_tile(const struct launch* of, const struct backward_work* work, int kv_head, long first,
                      struct packed_rows* tile) {
    find_seen(of, kv_head, first, min(rows_of(of) - first, ROWS), 0, of->keys, &tile->rows);
    if (tile->rows.lowest >= tile->rows.highest)
        return;
    tile->turn = (of->keys - 1) / KEYS - (tile->rows.highest - 1) / KEYS;
    pack_found(of, work, tile);
}

// Waits until the group before this one is done with the block of a turn; returns whether to go on.
static int wait_for_earlier(struct job* job, int thread, const struct backward_pieces* pieces,
                            const struct group* group, long turn) {
    const struct group* before = pieces->group + (group->number + 1) % pieces->places;  // of one or two
    if (!wait_for(job, thread, &before->number, group->number - 1))  // it may not have begun
        return 0;
    while (load_acquire(&before->number) == group->number - 1 && load_acquire(&before->done) <= turn) {
        if (give_up(job, thread))
            return 0;
        sched_yield();
    }
    return 1;
}

// A block of keys with the tiles of a group that see some of them; returns whether to go on.  turn: of the block.
static int backward_block(struct job* job, int thread, const struct backward_pieces* pieces, struct group* group,
                          struct backward_work* work, long turn) {
    const struct launch* of = job->of;
    const int kv_head = group->kv_head, shared = sharing_of(of).any;
    const long block = (pieces->blocks - 1 - turn) * KEYS, count = min(of->keys - block, KEYS);
    int packed = 0;
    for (long t = 0; t < group->tiles; t++) {
        struct packed_rows* tile = group->tile + t;
        count_done(job, count);
        if (max(tile->rows.lowest, block) >= min(tile->rows.highest, block + count))
            continue;
        if (!packed) {
            // Where rows share numbers of dbias, those of the group before are first.
            if (shared && !wait_for_earlier(job, thread, pieces, group, turn))
                return 0;
            pack_keys(of, &work->ahead.from->k, kv_head, of->head_dim, block, count, work->row, work->keys,
                      work->keys_by_dim, KEYS, &work->odd_keys, 0);
            pack_keys(of, &work->ahead.from->v, kv_head, of->value_dim, block, count, work->row, work->values, 0, 0, 0,
                      0);
            clear_keys(of, work, count);
            packed = 1;
        }
        backward_tile(of, work, tile, block, count);
        if (!wait_for(job, thread, &tile->turn, turn))
            return 0;
        add_dq(of, work, &tile->rows, block, count);
        set(&tile->turn, turn + 1);
        if (give_up(job, thread))
            return 0;
    }
    if (!wait_for(job, thread, &group->done, turn) || !wait_for_earlier(job, thread, pieces, group, turn))
        return 0;
    if (packed)
        add_keys(of, work, kv_head, block, count, 0);
    set(&group->done, turn + 1);
    return 1;
}

// Packs tile t of a group.  The first one makes the group, where an earlier one was.  Returns whether to go on.
static int backward_pack(struct job* job, int thread, const struct backward_pieces* pieces, struct group* group,
                         const struct backward_work* work, long number, long t) {
    const long head = number / pieces->groups, first = number % pieces->groups * TILES;
    if (t == 0) {
        if (!wait_for(job, thread, &group->number, number - pieces->places) ||
            !wait_for(job, thread, &group->done, pieces->blocks))
            return 0;
        group->kv_head = head, group->tiles = min(pieces->tiles - first, TILES);
        group->packed = 0;
        set(&group->done, 0);
        set(&group->number, number);
    } else if (!wait_for(job, thread, &group->number, number))
        return 0;
    pack_tile(job->of, work, head, (first + t) * ROWS, group->tile + t);
    __atomic_fetch_add(&group->packed, 1, __ATOMIC_RELEASE);
    return 1;
}

// Pieces of work are, group after group, its tiles and then its blocks of keys.  Each waits for earlier pieces only.
static void backward_worker(struct job* job, int thread, void* with) {
    struct backward_pieces* pieces = with;
    const long of_group = TILES + pieces->blocks, of_head = pieces->tiles + pieces->groups * pieces->blocks;
    struct backward_work work;
    backward_work(job->of, pieces->scratch + thread * pieces->bytes, &work);
    for (long piece; (piece = take_piece(job)) < of_head * job->of->kv_heads;) {
        const long in_head = piece % of_head / of_group, at = piece % of_head % of_group;
        const long number = piece / of_head * pieces->groups + in_head;
        const long tiles = min(pieces->tiles - in_head * TILES, TILES);
        struct group* group = pieces->group + number % pieces->places;
        if (at < tiles) {
            if (!backward_pack(job, thread, pieces, group, &work, number, at))
                return;
        } else if (!wait_for(job, thread, &group->number, number) || !wait_for(job, thread, &group->packed, tiles) ||
                   !backward_block(job, thread, pieces, group, &work, at - tiles))
            return;
    }
}

// A KV head after the other, alone; those that share numbers of dbias in their order, by one thread.
static void head_worker(struct job* job, int thread, void* with) {
    const struct backward_pieces* pieces = with;
    const struct launch* of = job->of;
    const struct sharing sharing = sharing_of(of);
    const long size = size_of(&sharing), all = of->kv_heads / size;
    struct group group = {.tiles = pieces->tiles, .tile = pieces->group->tile + thread * pieces->tiles};
    struct backward_work work;
    backward_work(of, pieces->scratch + thread * pieces->bytes, &work);
    for (long class = take_piece(job), n = 0; class < all;) {
        group.kv_head = head_of(of, &sharing, class, n), group.done = 0;
        for (long t = 0; t < pieces->tiles; t++)
            pack_tile(of, &work, group.kv_head, t * ROWS, group.tile + t);
        n = (n + 1) % size;
        if (!n)
            class = take_piece(job);
        if (class < all)
            begin_ahead(&work.ahead, head_of(of, &sharing, class, n), pieces->rows);
        if (!backward_block(job, thread, pieces, &group, &work, 0))
            return;
        end_ahead(&work.ahead);
    }
}

static int32_t backward(const struct launch* of) {
    if (of->lists > 1)
        return backward_of_columns(of);
    struct job job;
    struct backward_pieces pieces;
    struct backward_work none;
    const struct sharing sharing = sharing_of(of);
    pieces.scratch = of->scratch + row_work(of, of->scratch, &pieces);
    pieces.bytes = backward_work(of, 0, &none);
    const double operations = 6.0 * (of->head_dim + of->value_dim) * pieces.rows * of->keys * of->kv_heads;
    begin_job(&job, of, pieces.tiles * of->keys * of->kv_heads);
    if (is_alone(of))
        return in_threads(
            &job, min(threads_for(of, operations, of->kv_heads / size_of(&sharing)), TILES / max(pieces.tiles, 1)),
            head_worker, &pieces);
    return in_threads(&job, threads_for(of, operations, pieces.groups * pieces.blocks * of->kv_heads), backward_worker,
                      &pieces);
}
