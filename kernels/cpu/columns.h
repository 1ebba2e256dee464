// Rows that see several intervals of keys each, in tiles of rows that see much the same.
//
// The keys that some row of a tile sees are its columns, side by side and in order, and a row sees some of these: it
// has a bit for each.  Between two columns there may be any number of keys.  So what a tile costs does not depend on
// how far apart intervals lie, nor on which list they are in.
//
// Columns are made for the keys of a window, and worked on COLUMNS at a time.

#pragma once

#include "order.h"
#include "scratch.h"

#define COLUMNS 2048
#define WORDS (COLUMNS / 64)  // of a row's bits
#define WINDOW_KEYS 65536
#define WINDOW_WORDS (WINDOW_KEYS / 64)
struct columns {
    uint64_t* seen;                 // [MAX_ROWS][WORDS], and a word: a bit for each column that a row sees
    uint64_t* any;                  // [MAX_ROWS / MR][WORDS], that some row of a panel sees
    int32_t* key;                   // [COLUMNS]
    uint64_t* window;  // [WINDOW_WORDS + 1], a bit for each key of a window that some row of a tile sees
    int32_t* before;  // [WINDOW_WORDS + 1], columns before those of a word of it
    int8_t* shift;  // [MAX_ROWS], by how much the intervals of a row lie behind those of the row before
    long first_key, first, count;  // of the window; of the columns in work among its columns
};

INLINE uint64_t* bits_of(const struct columns* columns, long i) { return columns->seen + i * WORDS; }

INLINE void columns_work(char** at, struct columns* columns) {
    columns->seen = take(at, (MAX_ROWS * WORDS + 1) * sizeof(uint64_t));
    columns->any = take(at, MAX_ROWS / MR * WORDS * sizeof(uint64_t));
    columns->key = take(at, COLUMNS * sizeof(int32_t));
    columns->window = take(at, (WINDOW_WORDS + 1) * sizeof(uint64_t));
    columns->before = take(at, (WINDOW_WORDS + 1) * sizeof(int32_t));
    columns->shift = take(at, MAX_ROWS * sizeof(int8_t));
}

// Sets the bits [from, to), and touches the word after them.
INLINE void set_bits(uint64_t* bits, long from, long to) {
    uint64_t* word = bits + from / 64;
    long left = to - from, shift = from % 64;
    for (; left > 64; left -= 64 - shift, shift = 0)
        *word++ |= ~(uint64_t)0 << shift;
    const uint64_t some = ~(uint64_t)0 >> (64 - left);
    word[0] |= some << shift;
    word[1] |= some >> 1 >> (63 - shift);
}

// The rows of a tile: of each token of a patch those of the query heads of a KV head.
static void place_rows(const struct launch* of, const struct order* order, long tile, int kv_head, struct rows* rows) {
    const long queries = of->heads / of->kv_heads, part = tile % order->parts * order->heads;
    const long first = kv_head * queries + part, last = first + min(order->heads, queries - part);
    const struct patch patch = patch_of(of, order, tile / order->parts);
    long i = 0, token = patch.first;
    for (long n = 0; n < patch.count; n++) {
        for (long head = first; head < last; head++)
            rows->place[i++] = (struct place){token, head, sequence_of(of, head)};
        token += n % patch.width == patch.width - 1 ? patch.period - patch.width + 1 : 1;
    }
    rows->columns = 0, rows->count = i;
}

INLINE long group_of(const struct launch* of, struct place at) { return at.head * of->groups / of->heads; }

// The keys [*from, *to) hold all that any row of a tile sees; none if *from >= *to.
static void find_hull(const struct launch* of, const struct rows* rows, long* from, long* to) {
    *from = 0, *to = of->keys;
    if (of->keys <= WINDOW_KEYS)
        return;  // one window holds them
    *from = of->keys, *to = 0;
    for (long i = 0; i < rows->count; i++)
        for (long list = 0; list < of->lists; list++) {
            long begin, end;
            interval_of(of, group_of(of, rows->place[i]), rows->place[i].token, list, &begin, &end);
            if (begin < end)
                *from = min(*from, begin), *to = max(*to, end);
        }
}

// By how much all intervals of a token lie behind those of another one, whose keys they meet; -1 if they do not.
static int shift_of(const struct launch* of, long from, long to) {
    const int32_t *begin = of->begin + from * of->lists, *end = of->end + from * of->lists;
    const int32_t *begin2 = of->begin + to * of->lists, *end2 = of->end + to * of->lists, keys = of->keys;
    int32_t shift = 0, all = 1;
    for (long list = 0; list < of->lists; list++)
        if (begin[list] < end[list]) {
            shift = begin2[list] - begin[list];
            break;
        }
    if (shift < 0 || shift > 63)
        return -1;
    for (long list = 0; list < of->lists; list++) {
        const int32_t none = (begin[list] >= end[list]) & (begin2[list] >= end2[list]);
        const int32_t inside = (begin[list] >= 0) & (end2[list] <= keys) & (end[list] - begin[list] >= max(shift, 1));
        const int32_t shifted = (begin2[list] - begin[list] == shift) & (end2[list] - end[list] == shift);
        all &= none | (inside & shifted);
    }
    return all ? shift : -1;
}

// Finds by how much each row's intervals lie behind those of the row before: neighbours on a grid often differ by that.
static void find_shifts(const struct launch* of, const struct rows* rows, struct columns* columns) {
    long before = -1;
    for (long i = 0; i < rows->count; i++) {
        const long at = group_of(of, rows->place[i]) * of->tokens + rows->place[i].token;
        columns->shift[i] = before < 0 ? -1 : before == at ? 0 : shift_of(of, before, at);
        before = at;
    }
}

// Words of a window of keys.
INLINE long window_words(const struct launch* of, long first_key) {
    return (min(of->keys - first_key, WINDOW_KEYS) + 63) / 64;
}

// Begins with the columns among the keys of the window from `first_key` on.
static void begin_columns(const struct launch* of, long first_key, struct columns* columns) {
    columns->first_key = first_key;
    memset(columns->window, 0, window_words(of, first_key) * sizeof(uint64_t));
}

// Adds those of a tile, of which the shifts are found.
static void join_columns(const struct launch* of, const struct rows* rows, struct columns* columns) {
    const long first_key = columns->first_key, stop = min(of->keys - first_key, WINDOW_KEYS);
    for (long i = 0, last; i < rows->count; i = last + 1) {
        for (last = i; last + 1 < rows->count && columns->shift[last + 1] >= 0;)
            last++;  // what these rows see of a list has no gaps
        for (long list = 0; list < of->lists; list++) {
            long begin, end, unused;
            interval_of(of, group_of(of, rows->place[last]), rows->place[last].token, list, &unused, &end);
            interval_of(of, group_of(of, rows->place[i]), rows->place[i].token, list, &begin, &unused);
            if (begin >= unused)
                continue;
            begin = max(begin - first_key, 0), end = min(end - first_key, stop);
            if (begin < end)
                set_bits(columns->window, begin, end);
        }
    }
}

// Numbers them; returns how many there are.
static long count_columns(const struct launch* of, struct columns* columns) {
    const long words = window_words(of, columns->first_key);
    long count = 0;
    for (long word = 0; word < words; word++) {
        columns->before[word] = count;
        count += __builtin_popcountll(columns->window[word]);
    }
    columns->before[words] = count;
    return count;
}

// The column of a key that is one.
INLINE long column_of(const struct columns* columns, long key) {
    const uint64_t below = ((uint64_t)1 << key % 64) - 1;
    return columns->before[key / 64] + __builtin_popcountll(columns->window[key / 64] & below);
}

// Takes those of the window's columns in work that begin with number `first`: finds their keys.
static void take_columns(const struct launch* of, long first, long all, struct columns* columns) {
    const long words = window_words(of, columns->first_key);
    long word = 0, count = 0;
    columns->first = first, columns->count = min(all - first, COLUMNS);
    while (columns->before[word + 1] <= first && word + 1 < words)
        word++;
    uint64_t left = columns->window[word];
    for (long skipped = first - columns->before[word]; skipped; skipped--)
        left &= left - 1;
    while (count < columns->count) {
        while (!left)
            left = columns->window[++word];
        columns->key[count++] = columns->first_key + word * 64 + __builtin_ctzll(left);
        left &= left - 1;
    }
}

// Finds which of the columns in work a row sees; returns the number after the last one.
static long see_columns(const struct launch* of, const struct columns* columns, struct place at, uint64_t* seen) {
    const long first_key = columns->first_key, stop = min(of->keys - first_key, WINDOW_KEYS);
    long last = 0;
    memset(seen, 0, (columns->count + 63) / 64 * sizeof(uint64_t));
    for (long list = 0; list < of->lists; list++) {
        long begin, end;
        interval_of(of, group_of(of, at), at.token, list, &begin, &end);
        begin = max(begin - first_key, 0), end = min(end - first_key, stop);
        if (begin >= end)
            continue;
        const long column = column_of(columns, begin) - columns->first;
        const long from = max(column, 0), to = min(column + end - begin, columns->count);
        if (from < to)
            set_bits(seen, from, to), last = max(last, to);
    }
    return last;
}

// Finds which of the columns in work the rows see.  all: columns of the window.
static void find_seen_columns(const struct launch* of, long all, struct columns* columns, struct rows* rows) {
    const long words = (columns->count + 63) / 64, panels = (rows->count + MR - 1) / MR;
    const int whole = columns->count == all && of->keys <= WINDOW_KEYS;  // no interval is cut
    for (long i = 0; i < panels * MR; i++) {
        uint64_t* seen = bits_of(columns, i);
        rows->from[i] = rows->to[i] = 0;
        if (i >= rows->count)
            memset(seen, 0, words * sizeof(uint64_t));
        else if (whole && columns->shift[i] >= 0) {
            const int shift = columns->shift[i];
            uint64_t carried = 0;
            for (long word = 0; word < words; word++) {
                const uint64_t before = bits_of(columns, i - 1)[word];
                seen[word] = before << shift | carried;
                carried = before >> 1 >> (63 - shift);
            }
            rows->to[i] = rows->to[i - 1] ? rows->to[i - 1] + shift : 0;
        } else
            rows->to[i] = see_columns(of, columns, rows->place[i], seen);
    }
    for (long panel = 0; panel < panels; panel++)
        for (long word = 0; word < words; word++) {
            uint64_t any = 0;
            for (long i = panel * MR; i < (panel + 1) * MR; i++)
                any |= bits_of(columns, i)[word];
            columns->any[panel * WORDS + word] = any;
        }
    rows->columns = columns;
}

// The first of the columns [from, to) with a bit, or `to`.
INLINE long first_column(const uint64_t* bits, long from, long to) {
    while (from < to) {
        const uint64_t left = bits[from / 64] >> from % 64;
        if (left)
            return min(from + __builtin_ctzll(left), to);
        from = (from / 64 + 1) * 64;
    }
    return to;
}

// One after the last of the columns [from, to) with a bit; one has.
INLINE long last_column(const uint64_t* bits, long from, long to) {
    while (to > from && !(bits[(to - 1) / 64] >> (to - 1) % 64 & 1))
        to--;
    return to;
}

// Whether any of `step` columns has a bit: a power of two that divides the first one.
INLINE int any_column(const uint64_t* bits, long first, int step) {
    return (bits[first / 64] >> first % 64 & ~(uint64_t)0 >> (64 - step)) != 0;
}

// Whether row i of a tile sees one of the keys in work.
INLINE int sees(const struct rows* rows, long i, long key) {
    if (rows->columns)
        return bits_of(rows->columns, i)[key / 64] >> key % 64 & 1;
    return rows->from[i] <= key && key < rows->to[i];
}

// Sets to -inf what a row does not see of its scores of the columns [start, stop).
INLINE void hide_columns(const struct columns* columns, long i, long start, long stop, real* score) {
    const uint64_t* bits = bits_of(columns, i);
    for (long j = start; j < stop; j += LANES, score += LANES)
        store(score, choose(lanes_of(bits[j / 64] >> j % 64), load(score), splat(-INFINITY)));
}
