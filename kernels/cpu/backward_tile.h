// What the backward passes of rows with one and with several intervals have in common: a tile of rows, and waiting.

#pragma once

#ifdef __AVX512BF16__
#include "gradient_pairs.h"
#else
#include "gradient.h"
#endif
#include "work.h"

// Takes the scratch memory of a tile.
static void take_rows(const struct launch* of, char** at, struct packed_rows* each) {
    const long width = rounded_up(of->head_dim, NR), value_width = rounded_up(of->value_dim, NR);
    each->q = take(at, (ROWS * DEPTH(of->head_dim) + SLACK) * sizeof(operand));
    each->dout = take(at, (ROWS * DEPTH(of->value_dim) + SLACK) * sizeof(operand));
    each->q_by_dim = take(at, ROWS * width * sizeof(operand));
    each->dout_by_dim = take(at, ROWS * value_width * sizeof(operand));
    each->odd_q.row = take(at, ROWS * sizeof(int32_t));
    each->odd_dout.row = take(at, ROWS * sizeof(int32_t));
}

// Packs the rows of a tile, which are found.
static void pack_found(const struct launch* of, const struct backward_work* work, struct packed_rows* tile) {
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

// Adds dq of a tile and of a block of keys where a row sees some of them.
static void add_dq(const struct launch* of, const struct backward_work* work, const struct rows* rows, long block,
                   long count) {
    const long width = rounded_up(of->head_dim, NR);
    for (long i = 0; i < rows->count; i++) {
        prefetch_row_at(rows, &of->dq, i, of->head_dim * sizeof(real));
        if (max(rows->from[i], block) < min(rows->to[i], block + count))
            add_scaled((real*)row_at(rows, &of->dq, i), of->scale, work->dq + i * width, 1, of->head_dim);
    }
}

// Rows that share numbers of dbias: those of a KV head, and KV heads of a sequence or of several.
struct sharing {
    int any;
    long heads, sequences;  // KV heads of a sequence that share them; sequences
};

static struct sharing sharing_of(const struct launch* of) {
    const long sequences = max(of->sequences, 1), heads = of->heads / sequences;
    struct sharing sharing = {0, 1, 1};
    if (!of->dbias.data)
        return sharing;
    if (!of->dbias.head)
        sharing.heads = of->kv_heads / sequences;
    if (!(of->dbias.sequence + heads * of->dbias.head))
        sharing.sequences = sequences;
    sharing.any = !of->dbias.token || (!of->dbias.head && heads > 1) || sharing.sequences > 1;
    return sharing;
}

// How many KV heads share numbers of dbias, and number n of these, among `classes` of them in the launch.
static long size_of(const struct sharing* sharing) { return sharing->heads * sharing->sequences; }

static long head_of(const struct launch* of, const struct sharing* sharing, long class, long n) {
    const long heads = of->kv_heads / max(of->sequences, 1), classes = heads / sharing->heads;
    return (class / classes + n / sharing->heads) * heads + class % classes + n % sharing->heads;
}

static long load_acquire(const long* number) { return __atomic_load_n(number, __ATOMIC_ACQUIRE); }
static void set(long* number, long value) { __atomic_store_n(number, value, __ATOMIC_RELEASE); }

// Waits until a number is at least `value`, which another thread brings about; returns whether to go on.
static int wait_for(struct job* job, int thread, const long* number, long value) {
    while (load_acquire(number) < value) {
        if (give_up(job, thread))
            return 0;
        sched_yield();
    }
    return 1;
}
