// P and dS of a tile of rows with a block of keys, and what they give to dQ, dK and dV: in REAL.

#pragma once

#include "packed_rows.h"

struct backward_work {                                 // of a thread
    real *keys, *values, *keys_by_dim;                  // of a block: by key, and the keys by dim as well
    struct odd odd_keys;
    real *weight, *dweight;                             // P and dS of a tile, [ROWS][KEYS]
    real *dq, *dk, *dv, *row;
    struct ahead ahead;
};

static int64_t backward_work(const struct launch* of, char* scratch, struct backward_work* work) {
    char* at = scratch;
    const long dim = of->head_dim, value_dim = of->value_dim, width = rounded_up(dim, NR);
    work->keys = take(&at, KEYS * dim * sizeof(real));
    work->values = take(&at, KEYS * value_dim * sizeof(real));
    work->keys_by_dim = take(&at, KEYS * width * sizeof(real));
    work->odd_keys.row = take(&at, KEYS * sizeof(int32_t));
    work->weight = take(&at, ROWS * KEYS * sizeof(real));
    work->dweight = take(&at, ROWS * KEYS * sizeof(real));
    work->dq = take(&at, ROWS * width * sizeof(real));
    work->dk = take(&at, KEYS * width * sizeof(real));
    work->dv = take(&at, KEYS * rounded_up(value_dim, NR) * sizeof(real));
    work->row = take(&at, (max(NR, MR) * max(dim, value_dim) + SLACK) * sizeof(real));
    no_ahead(&work->ahead, of, 1, &at);
    return at - scratch;
}

// From the scores and dP of a row, of the columns [start, stop), to P and dS / scale.  Both are 0 where it does not
// see.  extras: 0 for none.
INLINE void differentiate_with(const struct extras* extras, const struct launch* of, const struct rows* rows, long i,
                               real base, real delta, int masked, long block, long start, long stop, real* weight,
                               real* dweight) {
    const integer from = rows->from[i] - block, to = rows->to[i] - block;
    const real inverse = of->softcap ? 1 / of->softcap : 0, cap = of->softcap;
    const uint64_t* bits = rows->columns ? bits_of(rows->columns, i) : 0;
    ivec column = lane_numbers() + (integer)start;
    for (long j = start; j < stop; j += LANES, column += LANES) {
        vec score = load(weight + j), slope = splat(1);
        if (cap) {
            const vec capped = hyperbolic_tangent(score * inverse);
            score = rounded_now(capped * cap), slope = 1 - capped * capped;
        }
        vec dp = load(dweight + j), factor = splat(1);
        if (extras && extras->bias)
            score += pairs_at(extras->bias, j);
        if (extras && extras->factor)
            factor = load(extras->factor + j - extras->start), dp *= factor;
        vec p = exponential(limited(score - base)), ds = p * (dp - delta);
        ivec seen = {0};
        if (masked)
            seen = bits ? lanes_of(bits[(block + j) / 64] >> (block + j) % 64) : (column >= from) & (column < to);
        if (extras && extras->dbias)
            add_to_pairs(extras->dbias, j, masked ? (vec)((ivec)ds & seen) : ds);
        if (extras)
            p *= factor;
        if (cap)
            ds *= slope;
        if (masked)
            p = (vec)((ivec)p & seen), ds = (vec)((ivec)ds & seen);
        store(weight + j, p);
        store(dweight + j, ds);
    }
}

static void differentiate(const struct launch* of, const struct rows* rows, long i, real base, real delta, int masked,
                          long block, long start, long stop, real* weight, real* dweight) {
    differentiate_with(0, of, rows, i, base, delta, masked, block, start, stop, weight, dweight);
}

static __attribute__((noinline)) void differentiate_more(const struct launch* of, const struct dropped* dropped,
                                                         const struct rows* rows, long i, real base, real delta,
                                                         int masked, long block, long start, long stop, real* weight,
                                                         real* dweight) {
    struct extras_memory memory;
    const struct extras extras = extras_of(of, rows, i, block, dropped, &memory);
    differentiate_with(&extras, of, rows, i, base, delta, masked, block, start, stop, weight, dweight);
}

// What rows and keys that are not finite, which the packed ones leave out, give to those that see them.
static void add_odd(const struct launch* of, const struct backward_work* work, const struct packed_rows* tile,
                    long block, long width, long value_width) {
    const struct rows* rows = &tile->rows;
    const int dim = of->head_dim, value_dim = of->value_dim;
    for (int which = 0; which < 2; which++) {
        const struct odd* odd = which ? &tile->odd_dout : &tile->odd_q;
        for (long n = 0; n < odd->count; n++) {
            const long i = odd->row[n];
            for (long j = max(rows->from[i] - block, 0); j < min(rows->to[i] - block, KEYS); j++)
                if (!sees(rows, i, block + j))
                    continue;
                else if (which)
                    add_scaled(work->dv + j * value_width, work->weight[i * KEYS + j],
                               tile->dout + i / MR * MR * value_dim + i % MR, MR, value_dim);
                else
                    add_scaled(work->dk + j * width, work->dweight[i * KEYS + j], tile->q + i / MR * MR * dim + i % MR,
                               MR, dim);
        }
    }
    for (long n = 0; n < work->odd_keys.count; n++) {
        const long j = work->odd_keys.row[n];
        for (long i = 0; i < rows->count; i++)
            if (sees(rows, i, block + j))
                add_scaled(work->dq + i * width, work->dweight[i * KEYS + j], work->keys + j / NR * NR * dim + j % NR,
                           NR, dim);
    }
}

// A tile of rows with a block of `count` keys from `block` on.
static void backward_tile(const struct launch* of, struct backward_work* work, const struct packed_rows* tile,
                          long block, long count) {
    const struct rows* rows = &tile->rows;
    const long dim = of->head_dim, value_dim = of->value_dim;
    const long width = rounded_up(dim, NR), value_width = rounded_up(value_dim, NR);
    const long panels = (rows->count + MR - 1) / MR, columns = rounded_up(rounded_up(count, NR), MR);
    const int more = has_extras(of);
    long from[ROWS / MR], to[ROWS / MR];                // columns that a panel sees
    struct dropped dropped;
    for (long panel = 0; panel < panels; panel++) {
        int masked = 1;
        panel_keys(rows, panel, block, from + panel, to + panel);
        real *weight = work->weight + panel * MR * KEYS, *dweight = work->dweight + panel * MR * KEYS;
        for (long j = from[panel]; j < to[panel]; j += NR) {
            step_ahead(&work->ahead);
            product(0, tile->q + panel * MR * dim, 1, MR, work->keys + j * dim, dim, weight + j, KEYS);
            product(0, tile->dout + panel * MR * value_dim, 1, MR, work->values + j * value_dim, value_dim, dweight + j,
                    KEYS);
            fetch_bias(of, rows, panel, 0, block + j, KEYS);
        }
        if (of->dropout.threshold && from[panel] < to[panel])
            begin_dropped_columns(of, rows, block, from[panel], to[panel], &dropped);
        if (!rows->columns)
            masked =
                rows->panel[panel].full_from > block + from[panel] || rows->panel[panel].full_to < block + to[panel];
        for (long i = 0; i < min(MR, rows->count - panel * MR); i++) {
            const long row = panel * MR + i;
            for (real* each = weight + i * KEYS;; each = dweight + i * KEYS) {  // zeros where no row of the panel sees
                memset(each, 0, from[panel] * sizeof(real));
                if (to[panel] < columns)
                    memset(each + to[panel], 0, (columns - to[panel]) * sizeof(real));
                if (each == dweight + i * KEYS)
                    break;
            }
            step_ahead(&work->ahead);
            if (more && from[panel] < to[panel])
                differentiate_more(of, &dropped, rows, row, tile->base[row], tile->delta[row], masked, block,
                                   from[panel], to[panel], weight + i * KEYS, dweight + i * KEYS);
            else
                differentiate(of, rows, row, tile->base[row], tile->delta[row], masked, block, from[panel], to[panel],
                              weight + i * KEYS, dweight + i * KEYS);
        }
    }
    for (long j = 0; j < count; j += MR) {
        long first = 0, last = panels;  // panels that see some of the keys [j, j + MR)
        while (first < last && (to[first] <= j || from[first] >= j + MR))
            first++;
        while (first < last && (to[last - 1] <= j || from[last - 1] >= j + MR))
            last--;
        if (first == last)
            continue;
        const long at = first * MR, deep = min(last * MR, rows->count) - at;
        step_ahead(&work->ahead);
        for (long c = 0; c < value_width; c += NR)
            product(1, work->weight + at * KEYS + j, 1, KEYS, tile->dout_by_dim + c * ROWS + at * NR, deep,
                    work->dv + j * value_width + c, value_width);
        for (long c = 0; c < width; c += NR)
            product(1, work->dweight + at * KEYS + j, 1, KEYS, tile->q_by_dim + c * ROWS + at * NR, deep,
                    work->dk + j * width + c, width);
    }
    for (long panel = 0; panel < panels; panel++) {
        step_ahead(&work->ahead);
        for (long c = 0; c < width; c += NR)
            product(0, work->dweight + panel * MR * KEYS + from[panel], KEYS, 1,
                    work->keys_by_dim + c * KEYS + from[panel] * NR, min(to[panel], count) - from[panel],
                    work->dq + panel * MR * width + c, width);
    }
    if (tile->odd_q.count || tile->odd_dout.count || work->odd_keys.count)
        add_odd(of, work, tile, block, width, value_width);
}

// Begins to gather dk and dv of a block of `count` keys.
static void clear_keys(const struct launch* of, const struct backward_work* work, long count) {
    memset(work->dk, 0, rounded_up(count, MR) * rounded_up(of->head_dim, NR) * sizeof(real));
    memset(work->dv, 0, rounded_up(count, MR) * rounded_up(of->value_dim, NR) * sizeof(real));
}

// Adds what a block of `count` keys has gathered to dk and dv.  key: the keys, or 0 for those from `block` on.
static void add_keys(const struct launch* of, const struct backward_work* work, int kv_head, long block, long count,
                     const int32_t* key) {
    const long width = rounded_up(of->head_dim, NR), value_width = rounded_up(of->value_dim, NR);
    char *all_dk = kv_rows(of, &of->dk, kv_head), *all_dv = kv_rows(of, &of->dv, kv_head);
    for (long j = 0; j < count; j++) {
        const long at = key ? key[j] : block + j, later = j + AHEAD_ROWS;
        if (later < count) {
            const long next = key ? key[later] : block + later;
            prefetch_row(all_dk + next * of->dk.token, of->head_dim * sizeof(real));
            prefetch_row(all_dv + next * of->dv.token, of->value_dim * sizeof(real));
        }
        add_scaled((real*)(all_dk + at * of->dk.token), 1, work->dk + j * width, 1, of->head_dim);
        add_scaled((real*)(all_dv + at * of->dv.token), 1, work->dv + j * value_width, 1, of->value_dim);
    }
}
