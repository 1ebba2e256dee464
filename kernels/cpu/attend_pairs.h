// Attention of a tile of rows of bfloat16 numbers.

#pragma once

#include "forward_work.h"
#include "weight_pairs.h"

// The weights of a row, relative to the score `minus`, as bfloat16 numbers and, if factor is given, times that; returns
// their sum, which is without.
INLINE real weights_of_row(const real* score, real scale, real minus, long from, long to, const real* factor,
                           operand* weight) {
    const vec base = splat(minus);
    vec sum = splat(0), sum2 = sum;
    for (long j = from; j < to; j += NR) {
        vec left = weight_of(scaled(load(score + j), scale) - base);
        vec right = weight_of(scaled(load(score + j + LANES), scale) - base);
        sum += left, sum2 += right;
        if (factor)
            left *= load(factor + j - from), right *= load(factor + j - from + LANES);
        _mm512_store_si512(weight + j, (__m512i)_mm512_cvtne2ps_pbh((__m512)right, (__m512)left));
    }
    return sum_of(sum + sum2);
}

// Turns the scores of the rows [first, first + count) of a tile, of the columns [from, to), into weights relative to
// the largest score so far; `top` is that, `total` the sum of weights.  Earlier weights in work->acc shrink
// accordingly.
static void weigh(const struct launch* of, struct forward_work* work, const struct rows* rows,
                  const struct dropped* dropped, real scale, long first, long count, long from, long to, long width,
                  real* top, real* total) {
    real minus[MR] __attribute__((aligned(VBYTES))), decay[MR] __attribute__((aligned(VBYTES)));
    for (long i = 0; i < count; i++) {
        const real* score = work->score + i * BLOCK;
        vec high = splat(-INFINITY), high2 = high;
        for (long j = from; j < to; j += NR) {
            high = larger(load(score + j), high);
            high2 = larger(load(score + j + LANES), high2);
        }
        minus[i] = largest_of(larger(high, high2)) * scale;
    }
    for (long i = 0; i < count; i += LANES) {
        const vec now = load(minus + i), before = load(top + first + i);
        const vec base = choose(now > before, now, before);                         // NaN stays NaN
        const vec fall = choose(before == -INFINITY, before, before - base);        // not -inf - -inf
        store(decay + i, choose(now > before, weight_of(fall), splat(1)));
        store(minus + i, choose(base == -INFINITY, splat(0), base));
        store(top + first + i, base);
    }
    for (long i = 0; i < count; i++) {
        const real* score = work->score + i * BLOCK;
        operand* weight = work->weight + i * BLOCK;
        real factor[BLOCK + NR] __attribute__((aligned(VBYTES))), sum;
        step_ahead(&work->ahead);
        if (of->dropout.threshold) {
            find_factors(of, rows, first + i, dropped, factor);
            sum = weights_of_row(score, scale, minus[i], from, to, factor, weight);
        } else
            sum = weights_of_row(score, scale, minus[i], from, to, 0, weight);
        total[first + i] = total[first + i] * decay[i] + sum;
        if (decay[i] != 1)
            for (real *each = work->acc + (first + i) * width, *end = each + width; each < end; each += LANES)
                store(each, load(each) * decay[i]);
    }
}

// The rows of a tile with the packed keys, of which key0 is the first: adds to work->acc, `top` and `total`.  Returns
// whether to go on.
static int attend_tile(struct job* job, int thread, struct forward_work* work, int kv_head, long key0,
                       const struct rows* rows, real* top, real* total) {
    const struct launch* of = job->of;
    const long width = DEPTH(of->value_dim), depth = DEPTH(of->head_dim);
    const real scale = scale_left(of->scale);
    struct dropped dropped;
    for (long block = rows->lowest / BLOCK * BLOCK; block < rows->highest; block += BLOCK) {
        for (long panel = 0; panel * MR < rows->count; panel++) {
            const long first = panel * MR, count = min(rows->count - first, MR);
            const long from = max(rows->panel[panel].from - block, 0) / NR * NR;
            const long to = min(rounded_up(rows->panel[panel].to - block, NR), BLOCK);
            if (from >= to)
                continue;
            for (long i = 0; i < count && rows->panel[panel].from >= block; i++)        // the panel's first block
                prefetch_next_tile(of, rows, first + i);
            for (long j = from; j < to; j += NR) {
                step_ahead(&work->ahead);
                product(0, work->q + first * depth, depth, 1, work->keys + (block + j) * depth, depth, work->score + j,
                        BLOCK);
                fetch_bias(of, rows, panel, key0, block + j, BLOCK);
            }
            for (long i = 0; of->softcap && i < count; i++)
                apply_softcap(of->softcap, scale, from, to, work->score + i * BLOCK);
            for (long i = 0; of->bias.data && i < count; i++)
                add_bias(of, rows, first + i, key0 + block, from, to, of->softcap ? 1 : scale, work->score + i * BLOCK);
            if (of->dropout.threshold)
                begin_dropped_columns(of, rows, key0 + block, from, to, &dropped);
            if (rows->panel[panel].full_from > block + from || rows->panel[panel].full_to < block + to)
                for (long i = 0; i < count; i++)
                    hide(rows, first + i, block, from, to, work->score + i * BLOCK);
            weigh(of, work, rows, &dropped, of->softcap || of->bias.data ? 1 : scale, first, count, from, to, width,
                  top, total);
            for (long c = 0; c < width; c += NR) {
                step_ahead(&work->ahead);
                product(1, work->weight + from, BLOCK, 1, work->values + c * work->pitch + (block + from) * NR,
                        to - from, work->acc + first * width + c, width);
            }
            if (work->odd.count)
                add_odd_values(of, work, kv_head, key0, rows, panel, block, block, block + BLOCK);
        }
        if (give_up(job, thread))
            return 0;
    }
    return 1;
}

// As attend_tile, of rows that see some of the columns in work, which are packed.
static int attend_columns(struct job* job, int thread, struct forward_work* work, int kv_head, const struct rows* rows,
                          real* top, real* total) {
    const struct launch* of = job->of;
    const struct columns* columns = rows->columns;
    const long width = DEPTH(of->value_dim), depth = DEPTH(of->head_dim);
    const real scale = scale_left(of->scale);
    struct parts parts;
    struct dropped dropped;
    for (long panel = 0; panel * MR < rows->count; panel++) {
        const long first = panel * MR, count = min(rows->count - first, MR);
        for (long from = 0; next_parts(columns, panel, &from, &parts);) {
            for (long n = 0; n < parts.count; n++) {
                real* score = work->score + parts.part[n].at;
                for (long j = parts.part[n].start; j < parts.part[n].stop; j += NR, score += NR)
                    product(0, work->q + first * depth, depth, 1, work->keys + j * depth, depth, score, BLOCK);
            }
            for (long i = 0; i < count; i++) {
                real* score = work->score + i * BLOCK;
                if (of->softcap)
                    apply_softcap(of->softcap, scale, 0, parts.filled, score);
                if (of->bias.data)
                    add_bias_of_parts(of, rows, first + i, &parts, of->softcap ? 1 : scale, score);
                for (long n = 0; n < parts.count; n++)
                    hide_columns(columns, first + i, parts.part[n].start, parts.part[n].stop, score + parts.part[n].at);
            }
            if (of->dropout.threshold)
                begin_dropped_parts(of, columns, &parts, &dropped);
            weigh(of, work, rows, &dropped, of->softcap || of->bias.data ? 1 : scale, first, count, 0, parts.filled,
                  width, top, total);
            for (long n = 0; n < parts.count; n++) {
                const long start = parts.part[n].start, stop = parts.part[n].stop, at = parts.part[n].at;
                for (long c = 0; c < width; c += NR)
                    product(1, work->weight + at, BLOCK, 1, work->values + c * work->pitch + start * NR, stop - start,
                            work->acc + first * width + c, width);
                if (work->odd.count)
                    add_odd_values(of, work, kv_head, 0, rows, panel, start - at, start, stop);
            }
        }
        if (give_up(job, thread))
            return 0;
    }
    return 1;
}
