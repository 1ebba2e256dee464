// What is done to partials row by row: two become one, sinks are added, and delta of the backward pass.

#pragma once

#include "element.h"
#include "rows.h"
#include "work.h"

#define ROW_BYTES 65536         // of a piece of work, about: some tokens of a sequence
#define MOVE_BYTE 5.0           // operations in the time in which a byte is read or written
#define EMPTY -3.4028234663852886e38    // in place of an empty partial's lse: -inf - -inf would be NaN

// log(e^x + e^y)
INLINE double added(double x, double y) {
    if (x == y)
        return x + log(2);
    const double apart = x - y;
    return apart > 0 ? x + log1p(exp(-apart)) : apart <= 0 ? y + log1p(exp(apart)) : apart;
}

static void merge_row(const struct launch* of, struct place at) {
    real *out = (real*)row_of(&of->out, at), *lse = (real*)row_of(&of->lse, at);
    const real* other = (const real*)row_of(&of->other, at);
    const double lse_b = *(const real*)row_of(&of->other_lse, at);
    const real weight = 1 / (1 + exp(*lse - (lse_b < EMPTY ? EMPTY : lse_b))), left = 1 - weight;
    for (long c = 0; c < of->value_dim; c++)
        out[c] = out[c] * left + weight * other[c];
    *lse = added(*lse, lse_b);
}

static void sink_row(const struct launch* of, struct place at) {
    real *out = (real*)row_of(&of->out, at), *lse = (real*)row_of(&of->lse, at);
    const double sink = *(const real*)row_of(&of->other_lse, at);
    if (*lse != -INFINITY) {                            // out of such a row is 0, whatever its weight
        const real weight = 1 / (1 + exp(sink - *lse));
        for (long c = 0; c < of->value_dim; c++)
            out[c] *= weight;
    }
    *lse = added(*lse, sink);
}

// Whether a row has a number besides 0.
INLINE int any_number(int element, const char* row, long dim) {
    ivec any = (ivec)splat(0);
    int seen = 0;
    for (long c = 0; c < dim / LANES; c++)
        any |= widened(element, row + c * LANES * element_bytes[element]) != 0;
    if (dim % LANES)
        any |= widened_rest(element, row, dim) != 0;
    for (int l = 0; l < LANES; l++)
        seen |= any[l] != 0;
    return seen;
}

INLINE void delta_of(int element, const struct launch* of, struct place at) {
    const char *dout = row_of(&of->dout, at), *out = row_of(&of->out, at);
    const long dim = of->value_dim, vectors = dim / LANES, bytes = element_bytes[element] * LANES;
    vec sum = splat(0), sum2 = sum;
    long c = 0;
    for (; c + 1 < vectors; c += 2) {
        sum += widened(element, out + c * bytes) * widened(element, dout + c * bytes);
        sum2 += widened(element, out + (c + 1) * bytes) * widened(element, dout + (c + 1) * bytes);
    }
    if (c < vectors)
        sum += widened(element, out + c * bytes) * widened(element, dout + c * bytes);
    if (dim % LANES)
        sum += widened_rest(element, out, dim) * widened_rest(element, dout, dim);
    real total = sum_of(sum + sum2);
    if (total - total != 0 && !any_number(element, out, dim))
        total = 0;
    if (of->other_lse.data)
        total -= *(const real*)row_of(&of->other_lse, at);
    *(real*)row_of(&of->delta, at) = total;
}

static void delta_row(const struct launch* of, struct place at) {
    if (of->element == FLOAT16)
        delta_of(FLOAT16, of, at);
    else if (of->element == BFLOAT16)
        delta_of(BFLOAT16, of, at);
    else
        delta_of(REAL, of, at);
}

struct row_pieces {
    void (*row)(const struct launch* of, struct place at);
    long size, of_sequence, count;
};

static void rows_worker(struct job* job, int thread, void* with) {
    const struct row_pieces* pieces = with;
    const long sequences = max(job->of->sequences, 1), heads = job->of->heads / sequences;  // of a sequence
    for (long piece; (piece = take_piece(job)) < pieces->count && !give_up(job, thread);) {
        const long sequence = piece / pieces->of_sequence, first = piece % pieces->of_sequence * pieces->size;
        for (long token = first; token < min(first + pieces->size, job->of->tokens); token++)
            for (long head = sequence * heads; head < (sequence + 1) * heads; head++)
                pieces->row(job->of, (struct place){token, head, sequence});
    }
}

static int32_t by_rows(const struct launch* of, void (*row)(const struct launch* of, struct place at)) {
    struct job job;
    const long bytes = (long)of->heads * of->value_dim * sizeof(real), sequences = max(of->sequences, 1);
    struct row_pieces pieces = {.row = row, .size = max(1, ROW_BYTES * sequences / max(bytes, 1))};
    pieces.of_sequence = (of->tokens + pieces.size - 1) / pieces.size;
    pieces.count = sequences * pieces.of_sequence;
    begin_job(&job, of, 1);
    return in_threads(&job, threads_for(of, 3.0 * bytes * of->tokens * MOVE_BYTE, pieces.count), rows_worker, &pieces);
}

static int64_t no_bytes(const struct launch* of) {
    (void)of;
    return 0;
}

static int32_t merge(const struct launch* of) { return by_rows(of, merge_row); }
static int32_t sink(const struct launch* of) { return by_rows(of, sink_row); }
static int32_t delta(const struct launch* of) { return by_rows(of, delta_row); }
