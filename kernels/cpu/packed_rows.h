// Tiles of rows as the backward pass packs them, shared by the threads.

#pragma once

#include "ahead.h"
#include "bias.h"
#include "dropout.h"

#ifdef __AVX512BF16__
#include "pack_pairs.h"
#define ROWS 256
#define KEYS 256
#define TILES 8
#else
#include "pack.h"
#define ROWS 96
#define KEYS 192
#define TILES 16
#endif

struct packed_rows {
    struct rows rows;
    real base[ROWS], delta[ROWS];                       // lse, 0 where that is -inf
    operand *q, *dout;                                  // in panels; q times scale
    operand *q_by_dim, *dout_by_dim;
    struct odd odd_q, odd_dout;
    long turn;                                          // of the block of keys that may be added to dq next
};

// What else than scores makes the weights of a row: the bias and its gradient, 0 where there are none, and what weights
// are multiplied by, from column `start` on, 0 where none is dropped.
struct extras {
    const struct pair_row *bias, *dbias;
    const real* factor;
    long start;
};

struct extras_memory {
    struct pair_row bias, dbias;
    real factor[KEYS] __attribute__((aligned(64)));
};

static int has_extras(const struct launch* of) { return of->bias.data || of->dropout.threshold; }

// Those of row i of a tile with the columns from `block` on; of a row that is none they are empty.
static struct extras extras_of(const struct launch* of, const struct rows* rows, long i, long block,
                               const struct dropped* dropped, struct extras_memory* memory) {
    const int some = i < rows->count;
    struct extras extras = {0};
    if (of->bias.data) {
        memory->bias = memory->dbias = (struct pair_row){0};
        if (some)
            memory->bias = pairs_of_row(of, &of->bias, of->bias_element, rows, i, block);
        if (some && of->dbias.data)
            memory->dbias = pairs_of_row(of, &of->dbias, REAL, rows, i, block);
        extras.bias = &memory->bias, extras.dbias = of->dbias.data ? &memory->dbias : 0;
    }
    if (of->dropout.threshold && some) {
        find_factors(of, rows, i, dropped, memory->factor);
        extras.factor = memory->factor, extras.start = dropped->start;
    }
    return extras;
}

// to[c] += factor * from[c * step]
INLINE void add_scaled(real* to, real factor, const real* from, long step, long count) {
    for (long c = 0; c < count; c++)
        to[c] += factor * from[c * step];
}

// The keys [*from, *to) of a block of KEYS, from `block` on, hold all that a panel sees, in whole NR; 0 and 0 for none.
INLINE void panel_keys(const struct rows* rows, long panel, long block, long* from, long* to) {
    long first = rows->panel[panel].from, last = rows->panel[panel].to;
    if (rows->columns) {
        const uint64_t* any = rows->columns->any + panel * WORDS;
        const long stop = min(block + KEYS, rows->columns->count);
        first = first_column(any, block, stop), last = stop;
        while (last > first && !any_column(any, (last - 1) / NR * NR, NR))
            last = (last - 1) / NR * NR;
    }
    *from = max(first - block, 0) / NR * NR;
    *to = min(rounded_up(last - block, NR), KEYS);
    if (*from >= *to)
        *from = *to = 0;
}
