// Tiles of rows: the rows of a KV head are those of all its query heads, one head after another, so that a tile is full
// of rows also where tokens are few.  MR rows are a panel; it skips the keys that none of its rows sees.

#pragma once

#include "element.h"

#ifdef __AVX512BF16__
#define MAX_ROWS 256  // of a tile
#else
#define MAX_ROWS 192
#endif

struct rows {
    long first, count;  // of the rows of a KV head
    long from[MAX_ROWS], to[MAX_ROWS];  // keys [from, to) that a row sees, relative to the keys in work; 0, 0: none
    struct {
        long from, to, full_from, full_to;
    } panel[MAX_ROWS / MR];  // any row sees, and every row sees
    long lowest, highest;  // any row of the tile sees [lowest, highest)
};

INLINE long least(long x, long y) { return x < y ? x : y; }
INLINE long most(long x, long y) { return x > y ? x : y; }
INLINE long rounded_up(long x, long step) { return (x + step - 1) / step * step; }

// The rows of a KV head.
INLINE long rows_of(const struct launch* of) { return of->tokens * (of->heads / of->kv_heads); }

// The address of row `row` of a KV head in an array.
INLINE char* row_at(const struct launch* of, const struct array* array, int kv_head, long row) {
    const long head = (long)kv_head * (of->heads / of->kv_heads) + row / of->tokens;
    return array->data + row % of->tokens * array->token + head * array->head;
}

// The rows from `first` on, and what they see of the keys [start, stop).
static void look(const struct launch* of, int kv_head, long first, long count, long start, long stop,
                 struct rows* rows) {
    rows->first = first, rows->count = count;
    rows->lowest = stop, rows->highest = 0;
    for (long panel = 0; panel * MR < count; panel++) {
        long from = stop, to = 0, full_from = 0, full_to = stop;
        for (long i = panel * MR; i < (panel + 1) * MR; i++) {
            long a = 0, b = 0;
            if (i < count) {
                const long head = (long)kv_head * (of->heads / of->kv_heads) + (first + i) / of->tokens;
                const long at = head * of->groups / of->heads * of->tokens + (first + i) % of->tokens;
                a = most(of->begin[at], start) - start, b = least(of->end[at], stop) - start;
                if (a >= b)
                    a = b = 0;
                full_from = most(full_from, a), full_to = least(full_to, b);
            }
            rows->from[i] = a, rows->to[i] = b;
            if (a < b)
                from = least(from, a), to = most(to, b);
        }
        rows->panel[panel].from = from, rows->panel[panel].to = to;
        rows->panel[panel].full_from = full_from, rows->panel[panel].full_to = full_to;
        if (from < to)
            rows->lowest = least(rows->lowest, from), rows->highest = most(rows->highest, to);
    }
}

// Sets to -inf what a row does not see of its scores of the columns [start, stop), which are the keys from `key` on.
INLINE void hide(const struct rows* rows, long i, long key, long start, long stop, real* score) {
    const integer from = rows->from[i] - key, to = rows->to[i] - key;
    ivec column = {0};
    for (int lane = 0; lane < LANES; lane++)
        column[lane] = start + lane;
    for (long j = start; j < stop; j += LANES, column += LANES)
        store(score + j, choose((column >= from) & (column < to), load(score + j), splat(-INFINITY)));
}

// score = softcap * tanh(score * scale / softcap)
INLINE void bend(double softcap, real scale, long start, long stop, real* score) {
    const real inverse = scale / softcap, cap = softcap;
    for (long j = start; j < stop; j += LANES)
        store(score + j, hyperbolic_tangent(load(score + j) * inverse) * cap);
}
