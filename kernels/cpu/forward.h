// Attention of a block, added to the partial (out, lse) of its rows: online softmax, tile by tile.
//
// The keys of a KV head are packed, PANEL at a time.  A tile of rows then goes over them in blocks of BLOCK keys: the
// scores of MR rows with a block stay in the L1 cache between their product, their softmax and the product with the
// values.  Keys that no row of a panel sees are skipped, and only those that some of them do not see are masked.

#pragma once

#include "weigh.h"
#include "work.h"

#define PANEL 2048
#define BLOCK 256
#define PIECES 4                // of work for a thread, at least, so that all are done at about the same time

struct forward_work {
    operand *keys, *values;                             // packed, shared by the tiles of rows
    long pitch;                                         // of the packed values: the most keys there are at a time
    struct odd odd;                                     // of the values
    operand *row, *q, *weight;                          // of one tile of rows
    real *acc, *score;
};

static int64_t forward_work(const struct launch* of, char* scratch, struct forward_work* work) {
    char* at = scratch;
    const long keys = least(rounded_up(most(of->keys, 1), NR), PANEL), width = rounded_up(of->value_dim, NR);
    work->pitch = keys;
    work->keys = take(&at, keys * DEPTH(of->head_dim) * sizeof(operand));
    work->values = take(&at, keys * width * sizeof(operand));
    work->odd.row = take(&at, keys * sizeof(int32_t));
    work->odd.count = 0;
    work->row = take(&at, most(NR, MR) * DEPTH(most(of->head_dim, of->value_dim)) * sizeof(operand));
    work->q = take(&at, MAX_ROWS * DEPTH(of->head_dim) * sizeof(operand));
    work->acc = take(&at, MAX_ROWS * width * sizeof(real));
    work->score = take(&at, MR * BLOCK * sizeof(real));
    work->weight = WEIGHTS_APART ? take(&at, MR * BLOCK * sizeof(operand)) : (operand*)work->score;
    return at - scratch;
}

// Bytes of scratch memory of a thread, and of a launch.
static int64_t thread_bytes(const struct launch* of) {
    struct forward_work work;
    return forward_work(of, 0, &work);
}

static int64_t forward_bytes(const struct launch* of) { return thread_bytes(of) * of->threads; }

// Adds the values that are not finite, which the packed ones leave out, to the rows that see them.
static void add_odd_values(const struct launch* of, struct forward_work* work, int kv_head, long key0,
                           const struct rows* rows, long panel, long block, long width) {
    real* row = (real*)work->row;
    for (long n = 0; n < work->odd.count; n++) {
        const long key = work->odd.row[n];
        if (key < block || key >= block + BLOCK)
            continue;
        read_row(of->element, of->v.data + (key0 + key) * of->v.token + kv_head * of->v.head, row, of->value_dim, 1);
        for (long i = 0; i < MR; i++)
            if (rows->from[panel * MR + i] <= key && key < rows->to[panel * MR + i])
                for (int c = 0; c < of->value_dim; c++)
                    work->acc[(panel * MR + i) * width + c] += real_of(work->weight[i * BLOCK + key - block]) * row[c];
    }
}

// The rows of a tile with the packed keys, of which key0 is the first.
static void forward_tile(struct job* job, int thread, struct forward_work* work, int kv_head, long key0,
                         const struct rows* rows) {
    const struct launch* of = job->of;
    const long width = rounded_up(of->value_dim, NR), panels = (rows->count + MR - 1) / MR;
    const long depth = DEPTH(of->head_dim);
    const real scale = scale_left(of->scale);
    real top[MAX_ROWS], total[MAX_ROWS];
    pack_rows(of, &of->q, kv_head, of->head_dim, rows, (real)of->scale, work->row, work->q, 0, 0, 0);
    memset(work->acc, 0, panels * MR * width * sizeof(real));
    for (long i = 0; i < panels * MR; i++) {
        top[i] = -INFINITY, total[i] = 0;
        if (rows->from[i] < rows->to[i]) {
            top[i] = *(real*)row_at(of, &of->lse, kv_head, rows->first + i);
            total[i] = top[i] != -INFINITY;             // out is normalised: its weights add up to 1, or to 0
            memcpy(work->acc + i * width, row_at(of, &of->out, kv_head, rows->first + i), of->value_dim * sizeof(real));
        }
    }
    for (long block = rows->lowest / BLOCK * BLOCK; block < rows->highest; block += BLOCK) {
        for (long panel = 0; panel < panels; panel++) {
            const long from = most(rows->panel[panel].from - block, 0) / NR * NR;
            const long to = least(rounded_up(rows->panel[panel].to - block, NR), BLOCK);
            if (from >= to)
                continue;
            for (long j = from; j < to; j += NR)
                product(0, work->q + panel * MR * depth, PANEL_ROW(depth), PANEL_STEP, work->keys + (block + j) * depth,
                        depth, work->score + j, BLOCK);
            const int masked = rows->panel[panel].full_from > block + from || rows->panel[panel].full_to < block + to;
            for (long i = panel * MR; i < least((panel + 1) * MR, rows->count); i++) {
                const long at = (i - panel * MR) * BLOCK;
                real* score = work->score + at;
                if (of->softcap)
                    bend(of->softcap, scale, from, to, score);
                if (masked)
                    hide(rows, i, block, from, to, score);
                const real decay =
                    weigh(of->softcap ? 1 : scale, from, to, score, work->weight + at, top + i, total + i);
                if (decay != 1)
                    for (long c = 0; c < width; c += LANES)
                        store(work->acc + i * width + c, load(work->acc + i * width + c) * decay);
            }
            for (long c = 0; c < width; c += NR)
                product(1, work->weight + from, BLOCK, 1, work->values + c * work->pitch + (block + from) * NR,
                        to - from, work->acc + panel * MR * width + c, width);
            if (work->odd.count)
                add_odd_values(of, work, kv_head, key0, rows, panel, block, width);
        }
        if (give_up(job, thread))
            return;
    }
    for (long i = 0; i < rows->count; i++)
        if (rows->from[i] < rows->to[i]) {
            real* out = (real*)row_at(of, &of->out, kv_head, rows->first + i);
            const real inverse = total[i] == 0 ? 0 : 1 / total[i];
            for (int c = 0; c < of->value_dim; c++)
                out[c] = work->acc[i * width + c] * inverse;
            *(real*)row_at(of, &of->lse, kv_head, rows->first + i) = top[i] + logarithm(total[i]);
        }
}

// Tiles of rows [first, last) of a KV head with all its keys.
static void forward_rows(struct job* job, int thread, struct forward_work* work, int kv_head, long first, long last) {
    const struct launch* of = job->of;
    struct rows rows;
    for (long key = 0; key < of->keys; key += PANEL) {
        const long keys = least(of->keys - key, PANEL);
        int packed = 0;
        for (long tile = first; tile < last; tile++) {
            look(of, kv_head, tile * MAX_ROWS, least(rows_of(of) - tile * MAX_ROWS, MAX_ROWS), key, key + keys, &rows);
            if (rows.lowest < rows.highest) {
                if (!packed) {
                    pack_keys(of, &of->k, kv_head, of->head_dim, key, keys, work->row, work->keys, 0, 0, 0);
                    pack_keys(of, &of->v, kv_head, of->value_dim, key, keys, work->row, 0, work->values, work->pitch,
                              &work->odd);
                    packed = 1;
                }
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
    int64_t bytes;                              // of a thread's scratch memory
};

static void forward_worker(struct job* job, int thread, void* with) {
    const struct forward_pieces* pieces = with;
    struct forward_work work;
    forward_work(job->of, job->of->scratch + thread * pieces->bytes, &work);
    begin_products();
    for (long piece; (piece = take_piece(job)) < pieces->of_head * job->of->kv_heads && !give_up(job, thread);) {
        const long at = pieces->of_head - 1 - piece % pieces->of_head;  // the last rows, often with most keys, first
        forward_rows(job, thread, &work, piece / pieces->of_head, at * pieces->size,
                     least((at + 1) * pieces->size, pieces->tiles));
    }
    end_products();
}

static int32_t forward(const struct launch* of) {
    struct job job;
    struct forward_pieces pieces;
    const long tiles = (rows_of(of) + MAX_ROWS - 1) / MAX_ROWS;
    const double operations = 2.0 * (of->head_dim + of->value_dim) * rows_of(of) * of->keys * of->kv_heads;
    const int threads = threads_for(of, operations, tiles * of->kv_heads);
    // Every piece packs its keys anew, so that one thread takes whole heads.
    pieces.tiles = tiles, pieces.bytes = thread_bytes(of);
    pieces.size = threads == 1 ? tiles : most(1, tiles * of->kv_heads / (PIECES * threads));
    pieces.size = least(pieces.size, tiles);
    pieces.of_head = (tiles + pieces.size - 1) / pieces.size;
    begin_job(&job, of, tiles * of->keys * of->kv_heads);
    return in_threads(&job, threads, forward_worker, &pieces);
}
