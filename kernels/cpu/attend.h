// Attention of a tile of rows in REAL.

#pragma once

#include "forward_work.h"

// Turns the scores of one row, of the columns [start, stop), into weights relative to the largest score so far; `top`
// is that, `total` the sum of weights.  Returns by how much earlier weights have shrunk, 1 if there are none.
INLINE real weigh(long start, long stop, real* score, real* top, real* total) {
    vec high = splat(-INFINITY), high2 = high;
    const long pairs = start + (stop - start) / NR * NR;
    for (long j = start; j < pairs; j += NR) {
        high = larger(load(score + j), high);
        high2 = larger(load(score + j + LANES), high2);
    }
    if (pairs < stop)
        high = larger(load(score + pairs), high);
    const real now = largest_of(larger(high, high2)), before = *top;
    const real base = now > before ? now : before;                  // NaN stays NaN
    const vec minus = splat(base == -INFINITY ? 0 : base);
    vec sum = splat(0), sum2 = sum;
    for (long j = start; j < pairs; j += NR) {
        const vec weight = exponential(load(score + j) - minus), weight2 = exponential(load(score + j + LANES) - minus);
        store(score + j, weight);
        store(score + j + LANES, weight2);
        sum += weight, sum2 += weight2;
    }
    if (pairs < stop) {
        const vec weight = exponential(load(score + pairs) - minus);
        store(score + pairs, weight);
        sum += weight;
    }
    const real decay = now > before && before != -INFINITY ? exponential(splat(before - base))[0] : 1;
    *total = *total * decay + sum_of(sum + sum2);
    *top = base;
    return decay;
}

// The rows of a tile with the packed keys, of which key0 is the first: adds to work->acc, `top` and `total`.  Returns
// whether to go on.
static int attend_tile(struct job* job, int thread, struct forward_work* work, int kv_head, long key0,
                       const struct rows* rows, real* top, real* total) {
    const struct launch* of = job->of;
    const long width = rounded_up(of->value_dim, NR), panels = (rows->count + MR - 1) / MR, head_dim = of->head_dim;
    struct dropped dropped;
    for (long block = rows->lowest / BLOCK * BLOCK; block < rows->highest; block += BLOCK) {
        for (long panel = 0; panel < panels; panel++) {
            const long start = max(rows->panel[panel].from - block, 0), from = start / LANES * LANES;
            const long stop = min(rows->panel[panel].to - block, BLOCK), to = rounded_up(stop, LANES);
            if (start >= stop)
                continue;
            const real* q = work->q + panel * MR * head_dim;
            long j = from;
            if (j % NR) {                                           // the second half of packed columns
                product_of(1, 0, q, 1, MR, work->keys + (block + j - LANES) * head_dim + LANES, head_dim,
                           work->score + j, BLOCK);
                j += LANES;
            }
            for (; j + NR <= to; j += NR) {
                product(0, q, 1, MR, work->keys + (block + j) * head_dim, head_dim, work->score + j, BLOCK);
                step_ahead(&work->ahead);
                fetch_bias(of, rows, panel, key0, block + j, BLOCK);
            }
            if (j < to)
                product_of(1, 0, q, 1, MR, work->keys + (block + j) * head_dim, head_dim, work->score + j, BLOCK);
            if (of->dropout.threshold)
                begin_dropped_columns(of, rows, key0 + block, from, to, &dropped);
            const int masked = rows->panel[panel].full_from > block + from || rows->panel[panel].full_to < block + to;
            for (long i = panel * MR; i < min((panel + 1) * MR, rows->count); i++) {
                const long at = (i - panel * MR) * BLOCK;
                real* score = work->score + at;
                if (of->softcap)
                    apply_softcap(of->softcap, 1, from, to, score);
                if (of->bias.data)
                    add_bias(of, rows, i, key0 + block, from, to, 1, score);
                if (masked)
                    hide(rows, i, block, from, to, score);
                step_ahead(&work->ahead);
                if (rows->panel[panel].from >= block)           // the first block that the panel sees
                    prefetch_next_tile(of, rows, i);
                const real decay = weigh(from, to, score, top + i, total + i);
                if (of->dropout.threshold)
                    drop(of, rows, i, &dropped, score);
                if (decay != 1)
                    for (long c = 0; c < width; c += LANES)
                        store(work->acc + i * width + c, load(work->acc + i * width + c) * decay);
            }
            for (long c = 0; c < width; c += NR) {
                step_ahead(&work->ahead);
                product(1, work->score + start, BLOCK, 1, work->values + c * work->pitch + (block + start) * NR,
                        stop - start, work->acc + panel * MR * width + c, width);
            }
            if (work->odd.count)
                add_odd_values(of, work, kv_head, key0, rows, panel, block, block, block + BLOCK);
        }
        if (block + BLOCK < rows->highest && give_up(job, thread))
            return 0;
    }
    return 1;
}

// The scores of a panel with the columns [start, stop).
static void score_columns(const real* q, const real* keys, long head_dim, long start, long stop, real* score) {
    long j = start;
    if (j % NR) {                                                   // the second half of packed columns
        product_of(1, 0, q, 1, MR, keys + (j - LANES) * head_dim + LANES, head_dim, score, BLOCK);
        j += LANES;
    }
    for (; j + NR <= stop; j += NR)
        product(0, q, 1, MR, keys + j * head_dim, head_dim, score + j - start, BLOCK);
    if (j < stop)
        product_of(1, 0, q, 1, MR, keys + j * head_dim, head_dim, score + j - start, BLOCK);
}

// As attend_tile, of rows that see some of the columns in work, which are packed.
static int attend_columns(struct job* job, int thread, struct forward_work* work, int kv_head, const struct rows* rows,
                          real* top, real* total) {
    const struct launch* of = job->of;
    const struct columns* columns = rows->columns;
    const long width = rounded_up(of->value_dim, NR), head_dim = of->head_dim;
    struct parts parts;
    struct dropped dropped;
    for (long panel = 0; panel * MR < rows->count; panel++) {
        for (long from = 0; next_parts(columns, panel, &from, &parts);) {
            for (long n = 0; n < parts.count; n++)
                score_columns(work->q + panel * MR * head_dim, work->keys, head_dim, parts.part[n].start,
                              parts.part[n].stop, work->score + parts.part[n].at);
            if (of->dropout.threshold)
                begin_dropped_parts(of, columns, &parts, &dropped);
            for (long i = panel * MR; i < min((panel + 1) * MR, rows->count); i++) {
                real* score = work->score + (i - panel * MR) * BLOCK;
                if (of->softcap)
                    apply_softcap(of->softcap, 1, 0, parts.filled, score);
                if (of->bias.data)
                    add_bias_of_parts(of, rows, i, &parts, 1, score);
                for (long n = 0; n < parts.count; n++)
                    hide_columns(columns, i, parts.part[n].start, parts.part[n].stop, score + parts.part[n].at);
                const real decay = weigh(0, parts.filled, score, top + i, total + i);
                if (of->dropout.threshold)
                    drop(of, rows, i, &dropped, score);
                if (decay != 1)
                    for (long c = 0; c < width; c += LANES)
                        store(work->acc + i * width + c, load(work->acc + i * width + c) * decay);
            }
            for (long n = 0; n < parts.count; n++) {
                const long start = parts.part[n].first, stop = parts.part[n].last;
                const long at = parts.part[n].at + start - parts.part[n].start;
                for (long c = 0; c < width; c += NR)
                    product(1, work->score + at, BLOCK, 1, work->values + c * work->pitch + start * NR, stop - start,
                            work->acc + panel * MR * width + c, width);
                if (work->odd.count)
                    add_odd_values(of, work, kv_head, 0, rows, panel, start - at, start, stop);
            }
        }
        if (panel % 4 == 3 && give_up(job, thread))
            return 0;
    }
    return 1;
}
