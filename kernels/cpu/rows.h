// Tiles of rows: the rows of a KV head are those of all its query heads, one head after another, so that a tile is full
// of rows also where tokens are few.  MR rows are a panel; it skips the keys that none of its rows sees.

#pragma once

#include "element.h"

#ifdef __AVX512BF16__
#define MAX_ROWS 256  // of a tile
#else
#define MAX_ROWS 192
#endif

#define AHEAD_ROWS 16  // are prefetched before they are read or written

struct place {
    long token, head, sequence;
};

struct columns;

struct rows {
    const struct columns* columns;  // of which each row sees some, see columns.h; 0 if a row sees one interval
    long count;
    struct place place[MAX_ROWS];
    long from[MAX_ROWS], to[MAX_ROWS];  // keys [from, to) that a row sees, relative to the keys in work; 0, 0: none
    struct {
        long from, to, full_from, full_to;
    } panel[MAX_ROWS / MR];  // any row sees, and every row sees
    long lowest, highest;  // any row of the tile sees [lowest, highest)
};

INLINE long min(long x, long y) { return x < y ? x : y; }
INLINE long max(long x, long y) { return x > y ? x : y; }
INLINE long rounded_up(long x, long step) { return (x + step - 1) / step * step; }

// The rows of a KV head.
INLINE long rows_of(const struct launch* of) { return of->tokens * (of->heads / of->kv_heads); }

// The sequences before that of a query head, and of a KV head.
INLINE long sequence_of(const struct launch* of, long head) { return head * of->sequences / of->heads; }
INLINE long sequence_of_kv(const struct launch* of, long head) { return head * of->sequences / of->kv_heads; }

// The first row of a head.
INLINE char* head_rows(const struct array* array, long head, long sequence) {
    return array->data + head * array->head + sequence * array->sequence;
}

// The first row of a KV head.
INLINE char* kv_rows(const struct launch* of, const struct array* array, long kv_head) {
    return head_rows(array, kv_head, sequence_of_kv(of, kv_head));
}

INLINE char* row_of(const struct array* array, struct place at) {
    return head_rows(array, at.head, at.sequence) + at.token * array->token;
}

// Into the L2 cache.
INLINE void prefetch_row(const char* row, long bytes) {
    for (long at = 0; at < bytes; at += 64)
        __builtin_prefetch(row + at, 0, 2);
    __builtin_prefetch(row + bytes - 1, 0, 2);
}

// The address of row i of a tile in an array.
INLINE char* row_at(const struct rows* rows, const struct array* array, long i) {
    return row_of(array, rows->place[i]);
}

// Fetches what a loop over the rows of a tile gets to some rows after row i.
INLINE void prefetch_row_at(const struct rows* rows, const struct array* array, long i, long bytes) {
    if (i + AHEAD_ROWS < rows->count)
        prefetch_row(row_at(rows, array, i + AHEAD_ROWS), bytes);
}

// Fetches what the tile after this one gets in place of row i.
INLINE void prefetch_next_tile(const struct launch* of, const struct rows* rows, long i) {
    if (rows->place[i].token + MAX_ROWS >= of->tokens)
        return;
    prefetch_row(row_at(rows, &of->q, i) + MAX_ROWS * of->q.token, of->head_dim * element_bytes[of->element]);
    prefetch_row(row_at(rows, &of->out, i) + MAX_ROWS * of->out.token, of->value_dim * sizeof(real));
}

// The rows from `first` on, and what they see of the keys [start, stop).
static void find_seen(const struct launch* of, int kv_head, long first, long count, long start, long stop,
                      struct rows* rows) {
    long head = (long)kv_head * (of->heads / of->kv_heads) + first / of->tokens, token = first % of->tokens;
    long bounds = head * of->groups / of->heads * of->tokens, sequence = sequence_of(of, head);
    rows->columns = 0, rows->count = count;
    rows->lowest = stop, rows->highest = 0;
    for (long panel = 0; panel * MR < count; panel++) {
        long from = stop, to = 0, full_from = 0, full_to = stop;
        for (long i = panel * MR; i < (panel + 1) * MR; i++) {
            long a = 0, b = 0;
            if (i < count) {
                if (token == of->tokens) {
                    token = 0, head++;
                    bounds = head * of->groups / of->heads * of->tokens;
                    sequence = sequence_of(of, head);
                }
                rows->place[i] = (struct place){token, head, sequence};
                a = max(of->begin[bounds + token], start) - start, b = min(of->end[bounds + token], stop) - start;
                if (a >= b)
                    a = b = 0;
                full_from = max(full_from, a), full_to = min(full_to, b);
                token++;
            }
            rows->from[i] = a, rows->to[i] = b;
            if (a < b)
                from = min(from, a), to = max(to, b);
        }
        rows->panel[panel].from = from, rows->panel[panel].to = to;
        rows->panel[panel].full_from = full_from, rows->panel[panel].full_to = full_to;
        if (from < to)
            rows->lowest = min(rows->lowest, from), rows->highest = max(rows->highest, to);
    }
}

// Widens the keys [*from, *to) to what some rows of a head see.
static void extend_to_seen(const int32_t* begin, const int32_t* end, long count, long* from, long* to) {
    for (long i = 0; i < count; i++)
        if (begin[i] < end[i])
            *from = min(*from, begin[i]), *to = max(*to, end[i]);
}

// The keys [*from, *to) hold all that any of the rows from `first` on sees; none if *from >= *to.
static void seen_keys(const struct launch* of, int kv_head, long first, long count, long* from, long* to) {
    long head = (long)kv_head * (of->heads / of->kv_heads) + first / of->tokens, token = first % of->tokens;
    *from = of->keys, *to = 0;
    for (; count > 0; head++, token = 0) {  // rows of one head at a time
        const long rows = min(of->tokens - token, count), bounds = head * of->groups / of->heads * of->tokens + token;
        extend_to_seen(of->begin + bounds, of->end + bounds, rows, from, to);
        count -= rows;
    }
    *from = max(*from, 0), *to = min(*to, of->keys);
}

// Whether any of the rows from `first` on sees any of the keys [start, stop).  It is much quicker than find_seen.
static int see_any(const struct launch* of, int kv_head, long first, long count, long start, long stop) {
    long head = (long)kv_head * (of->heads / of->kv_heads) + first / of->tokens, token = first % of->tokens;
    for (; count > 0; head++, token = 0) {  // rows of one head at a time
        const long rows = min(of->tokens - token, count), bounds = head * of->groups / of->heads * of->tokens + token;
        const int32_t *begin = of->begin + bounds, *end = of->end + bounds;
        int any = 0;
        for (long i = 0; i < rows; i++)
            any |= (begin[i] < end[i]) & (begin[i] < stop) & (end[i] > start);
        if (any)
            return 1;
        count -= rows;
    }
    return 0;
}

// Sets to -inf what a row does not see of its scores of the columns [start, stop), which are the keys from `key` on.
INLINE void hide(const struct rows* rows, long i, long key, long start, long stop, real* score) {
    const long full_from = rows->panel[i / MR].full_from - key, full_to = rows->panel[i / MR].full_to - key;
    const integer from = rows->from[i] - key, to = rows->to[i] - key;
    ivec column = lane_numbers() + (integer)start;
    for (long j = start; j < stop; j += LANES, column += LANES)
        if (j < full_from || j + LANES > full_to)
            store(score + j, choose((column >= from) & (column < to), load(score + j), splat(-INFINITY)));
}

// score = softcap * tanh(score * scale / softcap)
INLINE void apply_softcap(double softcap, real scale, long start, long stop, real* score) {
    const real inverse = scale / softcap, cap = softcap;
    for (long j = start; j < stop; j += LANES)
        store(score + j, hyperbolic_tangent(load(score + j) * inverse) * cap);
}
