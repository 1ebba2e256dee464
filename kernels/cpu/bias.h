// What a launch has for each pair of a row and a key: a bias, which is added to the score after scale and softcap, and
// the bias's gradient, to which dS is added before the softcap's slope.
//
// A row has as many numbers as there are keys.  What lies before and behind them may be other rows', which other
// threads work on, or nobody's: nothing there is read or written.

#pragma once

#include "columns.h"

struct pair_row {  // of a bias or a gradient
    char* number;  // of the first column, or of key 0 where columns have a list of keys
    const int32_t* key;  // that list; 0 where columns are keys one after another
    long count;  // columns
    int element;
};

// Row i of a tile, whose columns begin with key `first`, or with that number of the columns in work.
INLINE struct pair_row pairs_of_row(const struct launch* of, const struct array* array, int element,
                                    const struct rows* rows, long i, long first) {
    char* row = row_at(rows, array, i);
    if (rows->columns)
        return (struct pair_row){row, rows->columns->key + first, rows->columns->count - first, element};
    return (struct pair_row){row + first * element_bytes[element], 0, of->keys - first, element};
}

// Where the numbers of the columns [j, j + LANES) lie if they are there side by side, else 0.
INLINE char* side_by_side_at(const struct pair_row* row, long j) {
    if (row->count - j < LANES)
        return 0;
    if (!row->key)
        return row->number + j * element_bytes[row->element];
    const int32_t* key = row->key + j;
    return key[LANES - 1] - key[0] == LANES - 1 ? row->number + key[0] * (long)element_bytes[row->element] : 0;
}

// Where that of one column lies.
INLINE char* number_at(const struct pair_row* row, long j) {
    return row->number + (row->key ? row->key[j] : j) * element_bytes[row->element];
}

static __attribute__((noinline)) vec gathered_pairs(const struct pair_row* row, long j) {
    char copy[VBYTES] __attribute__((aligned(64))) = {0};
    const int bytes = element_bytes[row->element];
    for (long l = 0; l < min(LANES, row->count - j); l++)
        memcpy(copy + l * bytes, number_at(row, j + l), bytes);
    return widened(row->element, copy);
}

// The numbers of the columns [j, j + LANES); 0 where there is no column.
INLINE vec pairs_at(const struct pair_row* row, long j) {
    const char* at = side_by_side_at(row, j);
    return at ? widened(row->element, at) : gathered_pairs(row, j);
}

static __attribute__((noinline)) void scatter_pairs(const struct pair_row* row, long j, vec some) {
    for (long l = 0; l < min(LANES, row->count - j); l++)
        *(real*)number_at(row, j + l) += some[l];
}

// Adds to the numbers of the columns [j, j + LANES), which are REAL.
INLINE void add_to_pairs(const struct pair_row* row, long j, vec some) {
    char* at = side_by_side_at(row, j);
    if (at)
        *(loose_vec*)at += some;
    else
        scatter_pairs(row, j, some);
}

// score * scale + bias, for the columns [from, to) of row i of a tile, of which `first` is the first as above.
static void add_bias(const struct launch* of, const struct rows* rows, long i, long first, long from, long to,
                     real scale, real* score) {
    const struct pair_row row = pairs_of_row(of, &of->bias, of->bias_element, rows, i, first);
    for (long j = from; j < to; j += LANES)
        store(score + j, rounded_now(load(score + j) * scale) + pairs_at(&row, j));
}

// Fetches the numbers of the keys [first, first + NR) of a panel's rows, which count from key0 on.  No hardware
// prefetches so many rows that lie far apart.
static void fetch_pairs(const struct array* array, int element, const struct rows* rows, long panel, long key0,
                        long first) {
    const long bytes = element_bytes[element], start = (key0 + first) * bytes;
    if (first >= rows->panel[panel].to || first + NR <= rows->panel[panel].from)
        return;
    for (long i = panel * MR; i < min((panel + 1) * MR, rows->count); i++)
        for (long at = 0; at < NR * bytes; at += 64)
            __builtin_prefetch(row_at(rows, array, i) + start + at, 0, 2);
}

// Fetches what the panel after this one gets with the keys [first, first + NR); what the first panel gets `block` keys
// further on if this is the last one.
INLINE void fetch_bias(const struct launch* of, const struct rows* rows, long panel, long key0, long first,
                       long block) {
    const int last = (panel + 1) * MR >= rows->count;
    if (rows->columns || !of->bias.data)
        return;
    fetch_pairs(&of->bias, of->bias_element, rows, last ? 0 : panel + 1, key0, last ? first + block : first);
    if (of->dbias.data)
        fetch_pairs(&of->dbias, REAL, rows, last ? 0 : panel + 1, key0, last ? first + block : first);
}
