// What a thread works on in the forward pass.

#pragma once

#ifdef __AVX512BF16__
#include "pack_pairs.h"
#define BLOCK 384
#define WEIGHTS_APART 1         // from the scores
#else
#include "pack.h"
#define BLOCK 256
#define WEIGHTS_APART 0
#endif
#include "ahead.h"
#include "bias.h"
#include "dropout.h"
#include "work.h"

#define PANEL 2048

struct forward_work {
    operand *keys, *values;                             // packed, shared by the tiles of rows
    long pitch;                                         // of the packed values: the most keys there are at a time
    struct odd odd;                                     // of the values
    operand *row, *q, *weight;                          // of one tile of rows
    real *acc, *score;
    struct ahead ahead;
};

static int64_t forward_work(const struct launch* of, char* scratch, struct forward_work* work) {
    char* at = scratch;
    const long keys = min(rounded_up(max(of->keys, 1), NR), PANEL), width = rounded_up(of->value_dim, NR);
    work->pitch = keys;
    work->keys = take(&at, keys * DEPTH(of->head_dim) * sizeof(operand));
    work->values = take(&at, keys * width * sizeof(operand));
    work->odd.row = take(&at, keys * sizeof(int32_t));
    work->odd.count = 0;
    work->row = take(&at, (max(NR, MR) * DEPTH(max(of->head_dim, of->value_dim)) + SLACK) * sizeof(operand));
    work->q = take(&at, (MAX_ROWS * DEPTH(of->head_dim) + SLACK) * sizeof(operand));
    work->acc = take(&at, MAX_ROWS * width * sizeof(real));
    work->score = take(&at, MR * BLOCK * sizeof(real));
    work->weight = WEIGHTS_APART ? take(&at, MR * BLOCK * sizeof(operand)) : (operand*)work->score;
    no_ahead(&work->ahead, of, 0, &at);
    return at - scratch;
}

// Columns whose scores with a panel are side by side.
struct parts {
    long count, filled;                                 // parts; columns of all
    struct {
        long start, stop, at;                           // columns [start, stop), whose scores begin at `at`
        long first, last;                               // of these [first, last) hold all that are seen
    } part[BLOCK / STEP];
};

// The next columns from *from on that some row of a panel sees, at most BLOCK, in whole steps; returns how many.
static long next_parts(const struct columns* columns, long panel, long* from, struct parts* parts) {
    const uint64_t* any = columns->any + panel * WORDS;
    parts->count = parts->filled = 0;
    while (parts->filled < BLOCK) {
        const long first = first_column(any, *from, columns->count), start = first / STEP * STEP;
        if (first == columns->count)
            break;
        long stop = start;
        do
            stop += STEP;
        while (stop < columns->count && parts->filled + stop - start < BLOCK && any_column(any, stop, STEP));
        parts->part[parts->count].start = start, parts->part[parts->count].stop = stop;
        parts->part[parts->count].first = first;
        parts->part[parts->count].last = last_column(any, stop - STEP, min(stop, columns->count));
        parts->part[parts->count++].at = parts->filled;
        parts->filled += stop - start;
        *from = stop;
    }
    return parts->filled;
}

// Adds the bias to the scores of parts of a panel's row.
static void add_bias_of_parts(const struct launch* of, const struct rows* rows, long i, const struct parts* parts,
                              real scale, real* score) {
    for (long n = 0; n < parts->count; n++)
        add_bias(of, rows, i, parts->part[n].start, 0, parts->part[n].stop - parts->part[n].start, scale,
                 score + parts->part[n].at);
}

// The dropped weights of parts of a panel.
static void begin_dropped_parts(const struct launch* of, const struct columns* columns, const struct parts* parts,
                                struct dropped* dropped) {
    begin_dropped(dropped, 0);
    for (long n = 0; n < parts->count; n++) {
        const long start = parts->part[n].start, stop = min(parts->part[n].stop, columns->count);
        add_dropped(of, columns->key + start, 0, stop - start, dropped);
    }
}

// Adds the values of the keys [first, last) that are not finite, which the packed ones leave out, to the rows that see
// them.  The weights are of the keys from `block` on.
static void add_odd_values(const struct launch* of, struct forward_work* work, int kv_head, long key0,
                           const struct rows* rows, long panel, long block, long first, long last) {
    const long width = rounded_up(of->value_dim, NR);
    real* row = (real*)work->row;
    for (long n = 0; n < work->odd.count; n++) {
        const long key = work->odd.row[n], number = rows->columns ? rows->columns->key[key] : key0 + key;
        if (key < first || key >= last)
            continue;
        read_row(of->element, kv_rows(of, &of->v, kv_head) + number * of->v.token, row, of->value_dim, 1);
        for (long i = 0; i < MR; i++)
            if (sees(rows, panel * MR + i, key))
                for (int c = 0; c < of->value_dim; c++)
                    work->acc[(panel * MR + i) * width + c] += real_of(work->weight[i * BLOCK + key - block]) * row[c];
    }
}
