// Attention of a tile of rows, added to the partial (out, lse) of its rows: online softmax.

#pragma once

#ifdef __AVX512BF16__
#include "attend_pairs.h"
#else
#include "attend.h"
#endif

// The rows of a tile with the packed keys, of which key0 is the first.
static void forward_tile(struct job* job, int thread, struct forward_work* work, int kv_head, long key0,
                         const struct rows* rows) {
    const struct launch* of = job->of;
    const long width = rounded_up(of->value_dim, NR), panels = (rows->count + MR - 1) / MR;
    real top[MAX_ROWS] __attribute__((aligned(VBYTES))), total[MAX_ROWS] __attribute__((aligned(VBYTES)));
    pack_rows(of, &work->ahead.from->q, of->head_dim, rows, (real)of->scale, work->row, work->q, 0, 0, 0);
    memset(work->acc, 0, panels * MR * width * sizeof(real));
    for (long i = 0; i < panels * MR; i++) {
        top[i] = -INFINITY, total[i] = 0;
        if (rows->from[i] < rows->to[i])
            top[i] = *(real*)row_at(rows, &of->lse, i);
        if (top[i] != -INFINITY) {                      // out is normalised: its weights add up to 1, or it is 0
            total[i] = 1;
            prefetch_row_at(rows, &of->out, i, of->value_dim * sizeof(real));
            memcpy(work->acc + i * width, row_at(rows, &of->out, i), of->value_dim * sizeof(real));
        }
    }
    if (rows->columns ? !attend_columns(job, thread, work, kv_head, rows, top, total)
                      : !attend_tile(job, thread, work, kv_head, key0, rows, top, total))
        return;
    for (long i = 0; i < rows->count; i++)
        if (rows->from[i] < rows->to[i]) {
            real* out = (real*)row_at(rows, &of->out, i);
            prefetch_row_at(rows, &of->out, i, of->value_dim * sizeof(real));
            const real inverse = total[i] == 0 ? 0 : 1 / total[i];
            read_row(REAL, (const char*)(work->acc + i * width), out, of->value_dim, inverse);
            *(real*)row_at(rows, &of->lse, i) = top[i] + logarithm(total[i]);
        }
}
