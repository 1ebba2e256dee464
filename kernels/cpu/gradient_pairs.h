// P and dS of a tile of rows with a block of keys, and what they give to dQ, dK and dV: of bfloat16, in pairs.
//
// P and dS are rounded to bfloat16.  They are columns of the products with dout and Q, where two rows are a pair:
// [tile of NR keys][pair of rows][NR][2].  So these products are dV and dK turned, [dim][KEYS], until all tiles are in.
// dS is rows of the product with K as well.

#pragma once

#include "packed_rows.h"
#include "weight_pairs.h"

#define SPAN 128  // keys whose scores with a panel stay in the L1 cache

struct backward_work {  // of a thread
    operand *keys, *values, *keys_by_dim;  // of a block: by key, and the keys by dim as well
    struct odd odd_keys;
    real *score, *dscore;  // S and dP, [MR][SPAN]
    operand *weight, *dweight, *dweight_rows;  // P and dS of a tile; dS as rows, [ROWS][KEYS]
    real *dq, *dk, *dv;
    operand* row;
    struct ahead ahead;
};

static int64_t backward_work(const struct launch* of, char* scratch, struct backward_work* work) {
    char* at = scratch;
    const long width = DEPTH(of->head_dim), value_width = DEPTH(of->value_dim);
    work->keys = take(&at, KEYS * width * sizeof(operand));
    work->values = take(&at, KEYS * value_width * sizeof(operand));
    work->keys_by_dim = take(&at, KEYS * width * sizeof(operand));
    work->odd_keys.row = take(&at, KEYS * sizeof(int32_t));
    work->score = take(&at, MR * SPAN * sizeof(real));
    work->dscore = take(&at, MR * SPAN * sizeof(real));
    work->weight = take(&at, ROWS * KEYS * sizeof(operand));
    work->dweight = take(&at, ROWS * KEYS * sizeof(operand));
    work->dweight_rows = take(&at, ROWS * KEYS * sizeof(operand));
    work->dq = take(&at, ROWS * width * sizeof(real));
    work->dk = take(&at, KEYS * width * sizeof(real));
    work->dv = take(&at, KEYS * value_width * sizeof(real));
    work->row = take(&at, NR * max(width, value_width) * sizeof(operand));
    no_ahead(&work->ahead, of, 1, &at);
    return at - scratch;
}

// Where key j and row i are in P and dS.
INLINE long place(long i, long j) { return j / NR * NR * ROWS + i / 2 * 2 * NR + j % NR * 2 + i % 2; }

// Two rows of LANES numbers as pairs.
INLINE void store_pairs(operand* to, vec even, vec odd) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    _mm512_store_si512(to, _mm512_permutexvar_epi16(order, (__m512i)both));
}

// From the scores and dP of the rows `row` and the next, of the keys [start, stop), to P and dS / scale.  Both are 0
// where a row does not see.  extras: of both rows, 0 for none.
INLINE void differentiate(const struct extras* extras, const struct launch* of, struct backward_work* work,
                          const struct packed_rows* tile, long row, int masked, long block, long start, long stop) {
    const real scale = scale_left(of->scale), inverse = of->softcap ? scale / of->softcap : 0, cap = of->softcap;
    const struct rows* rows = &tile->rows;
    ivec column;
    for (int lane = 0; lane < LANES; lane++)
        column[lane] = block + start + lane;
    for (long j = start; j < stop; j += LANES, column += LANES) {
        vec p[2], ds[2];
        UNROLLED for (int r = 0; r < 2; r++) {
            const long at = (row + r) % MR * SPAN + j - start;
            vec score = scaled(load(work->score + at), scale), slope = splat(1);
            if (cap) {
                const vec capped = hyperbolic_tangent(load(work->score + at) * inverse);
                score = rounded_now(capped * cap), slope = 1 - capped * capped;
            }
            vec dp = load(work->dscore + at), factor = splat(1);
            if (extras && extras[r].bias)
                score += pairs_at(extras[r].bias, j);
            if (extras && extras[r].factor)
                factor = load(extras[r].factor + j - extras[r].start), dp *= factor;
            p[r] = weight_of(score - tile->base[row + r]);
            ds[r] = p[r] * (dp - tile->delta[row + r]);
            ivec seen = {0};
            if (masked) {
                const uint64_t* bits = rows->columns ? bits_of(rows->columns, row + r) : 0;
                const integer from = rows->from[row + r], to = rows->to[row + r];
                seen = bits ? lanes_of(bits[(block + j) / 64] >> (block + j) % 64) : (column >= from) & (column < to);
            }
            if (extras && extras[r].dbias)
                add_to_pairs(extras[r].dbias, j, masked ? (vec)((ivec)ds[r] & seen) : ds[r]);
            if (extras)
                p[r] *= factor;
            if (cap)
                ds[r] *= slope;
            if (masked)
                p[r] = (vec)((ivec)p[r] & seen), ds[r] = (vec)((ivec)ds[r] & seen);
            const __m256bh narrow = _mm512_cvtneps_pbh((__m512)ds[r]);
            memcpy(work->dweight_rows + (row + r) * KEYS + j, &narrow, sizeof narrow);
        }
        store_pairs(work->weight + place(row, j), p[0], p[1]);
        store_pairs(work->dweight + place(row, j), ds[0], ds[1]);
    }
}

static __attribute__((noinline)) void differentiate_more(const struct launch* of, const struct dropped* dropped,
                                                         struct backward_work* work, const struct packed_rows* tile,
                                                         long row, long block, long start, long stop) {
    struct extras_memory memory[2];
    const struct extras extras[2] = {extras_of(of, &tile->rows, row, block, dropped, memory),
                                     extras_of(of, &tile->rows, row + 1, block, dropped, memory + 1)};
    differentiate(extras, of, work, tile, row, 1, block, start, stop);
}

// What rows and keys that are not finite, which the packed ones leave out, give to those that see them.
static void add_odd(const struct launch* of, const struct backward_work* work, const struct packed_rows* tile,
                    long block, long width, long value_width) {
    const struct rows* rows = &tile->rows;
    for (int which = 0; which < 2; which++) {
        const struct odd* odd = which ? &tile->odd_dout : &tile->odd_q;
        const operand *weight = which ? work->weight : work->dweight, *from = which ? tile->dout : tile->q;
        real* to = which ? work->dv : work->dk;
        const long depth = which ? value_width : width;
        for (long n = 0; n < odd->count; n++) {
            const long i = odd->row[n];
            for (long j = max(rows->from[i] - block, 0); j < min(rows->to[i] - block, KEYS); j++)
                for (long c = 0; c < depth && sees(rows, i, block + j); c++)
                    to[c * KEYS + j] += real_of(weight[place(i, j)]) * real_of(from[i * depth + c]);
        }
    }
    for (long n = 0; n < work->odd_keys.count; n++) {
        const long j = work->odd_keys.row[n];
        for (long i = 0; i < rows->count; i++)
            if (sees(rows, i, block + j))
                for (long c = 0; c < of->head_dim; c++)
                    work->dq[i * width + c] +=
                        real_of(work->dweight_rows[i * KEYS + j]) *
                        real_of(work->keys[j / NR * NR * width + c / 2 * 2 * NR + j % NR * 2 + c % 2]);
    }
}

// A tile of rows with a block of `count` keys from `block` on.
static void backward_tile(const struct launch* of, struct backward_work* work, const struct packed_rows* tile,
                          long block, long count) {
    const struct rows* rows = &tile->rows;
    const long width = DEPTH(of->head_dim), value_width = DEPTH(of->value_dim), panels = (rows->count + MR - 1) / MR;
    const int more = has_extras(of);
    long from[ROWS / MR], to[ROWS / MR];  // columns that a panel sees
    struct dropped dropped;
    for (long panel = 0; panel < panels; panel++) {
        panel_keys(rows, panel, block, from + panel, to + panel);
        for (long start = from[panel]; start < to[panel]; start += SPAN) {
            const long stop = min(start + SPAN, to[panel]);
            for (long j = start; j < stop; j += NR) {
                step_ahead(&work->ahead);
                product(0, tile->q + panel * MR * width, width, 1, work->keys + j * width, width,
                        work->score + j - start, SPAN);
                product(0, tile->dout + panel * MR * value_width, value_width, 1, work->values + j * value_width,
                        value_width, work->dscore + j - start, SPAN);
                fetch_bias(of, rows, panel, 0, block + j, KEYS);
            }
            if (of->dropout.threshold)
                begin_dropped_columns(of, rows, block, start, stop, &dropped);
            const int masked = rows->columns || rows->panel[panel].full_from > block + start ||
                               rows->panel[panel].full_to < block + stop || (panel + 1) * MR > rows->count;
            for (long row = panel * MR; row < (panel + 1) * MR; row += 2) {
                step_ahead(&work->ahead);
                if (more)
                    differentiate_more(of, &dropped, work, tile, row, block, start, stop);
                else if (masked)
                    differentiate(0, of, work, tile, row, 1, block, start, stop);
                else
                    differentiate(0, of, work, tile, row, 0, block, start, stop);
            }
        }
    }
    for (long j = 0; j < count; j += NR) {
        long first = 0, last = panels;  // panels that see some of the keys [j, j + NR)
        while (first < last && (to[first] <= j || from[first] > j))
            first++;
        while (first < last && (to[last - 1] <= j || from[last - 1] > j))
            last--;
        if (first == last)
            continue;
        for (long panel = first; panel < last; panel++)
            if (to[panel] <= j || from[panel] > j) {
                memset(work->weight + place(panel * MR, j), 0, MR * NR * sizeof(operand));
                memset(work->dweight + place(panel * MR, j), 0, MR * NR * sizeof(operand));
            }
        const long at = first * MR, deep = (last - first) * MR;
        for (long c = 0; c < value_width; c += MR)
            product(1, tile->dout_by_dim + c * ROWS + at, ROWS, 1, work->weight + place(at, j), deep,
                    work->dv + c * KEYS + j, KEYS);
        for (long c = 0; c < width; c += MR)
            product(1, tile->q_by_dim + c * ROWS + at, ROWS, 1, work->dweight + place(at, j), deep,
                    work->dk + c * KEYS + j, KEYS);
    }
    for (long panel = 0; panel < panels; panel++)
        for (long c = 0; c < width; c += NR)
            product(0, work->dweight_rows + panel * MR * KEYS + from[panel], KEYS, 1,
                    work->keys_by_dim + c * KEYS + from[panel] * NR, to[panel] - from[panel],
                    work->dq + panel * MR * width + c, width);
    if (tile->odd_q.count || tile->odd_dout.count || work->odd_keys.count)
        add_odd(of, work, tile, block, width, value_width);
}

// to[c] += factor * turned[c][j] for the keys j of a block.  key: the keys, or 0 for those from `block` on.
static void add_turned(const struct launch* of, const struct array* array, int kv_head, long block, long count,
                       real factor, const real* turned, long dim, const int32_t* key) {
    char* rows = kv_rows(of, array, kv_head);
    for (long j = 0; j < count; j++) {
        real* to = (real*)(rows + (key ? key[j] : block + j) * array->token);
        for (long c = 0; c < dim; c += LANES) {
            const vec some = (vec)gathered((const int*)turned + c * KEYS + j, KEYS);
            for (long n = 0; n < min(dim - c, LANES); n++)
                to[c + n] += factor * some[n];
        }
    }
}

// Begins to gather dk and dv of a block of keys.
static void clear_keys(const struct launch* of, const struct backward_work* work, long count) {
    (void)count;
    memset(work->dk, 0, KEYS * DEPTH(of->head_dim) * sizeof(real));
    memset(work->dv, 0, KEYS * DEPTH(of->value_dim) * sizeof(real));
}

// Adds what a block of `count` keys has gathered to dk and dv.  key: as for add_turned.
static void add_keys(const struct launch* of, const struct backward_work* work, int kv_head, long block, long count,
                     const int32_t* key) {
    add_turned(of, &of->dk, kv_head, block, count, scale_left(of->scale), work->dk, of->head_dim, key);
    add_turned(of, &of->dv, kv_head, block, count, 1, work->dv, of->value_dim, key);
}
