// Copies of a tile's numbers in the order in which the micro-kernel reads them.
//
//     columns of a product, by key   [tile of NR keys][dim][NR]        for scores: a row of b is NR keys of one dim
//     columns of a product, by dim   [tile of NR dims][pitch][NR]      for sums over keys: a row of b is NR dims of one
//     key rows of a product              [panel of MR rows][dim][MR]
//
// A row that is not finite is left out, as zeros, where its product with a masked weight of 0 would be NaN; its number
// goes into a list, and `add_odd` adds what it gives to those that do see it.

#pragma once

#include "product.h"
#include "scratch.h"

INLINE real real_of(operand number) { return number; }

// Rows in the order of their dims, [dim][width], of the `count` rows in `row`; the others are zeros.
INLINE void turn(const real* row, long pitch, int count, int dim, real* to, int width) {
    for (int c = 0; c < dim; c++)
        for (int i = 0; i < width; i++)
            to[(long)c * width + i] = i < count ? row[i * pitch + c] : 0;
}

// One row into its place by dim: place is that of its first NR dims, `pitch` rows before that of the next.
INLINE void spread(const real* row, int dim, long pitch, int odd, real* place) {
    int c = 0;
    for (; !odd && c + NR <= dim; c += NR)
        memcpy(place + c * pitch, row + c, NR * sizeof(real));
    for (; c < dim; c += NR) {
        const int count = odd ? 0 : dim - c;
        memcpy(place + c * pitch, row + c, count * sizeof(real));
        memset(place + c * pitch + count, 0, (NR - count) * sizeof(real));
    }
}

// Keys [first, first + count) of a KV head: by key if by_key is given, by dim if by_dim is.  row: NR * dim numbers.
static void pack_keys(const struct launch* of, const struct array* array, int kv_head, int dim, long first, long count,
                      real* row, real* by_key, real* by_dim, long pitch, struct odd* odd) {
    const char* from = array->data + first * array->token + kv_head * array->head;
    if (odd)
        odd->count = 0;
    for (long tile = 0; tile < count; tile += NR) {
        const int keys = least(count - tile, NR);
        for (int i = 0; i < keys; i++)
            read_row(of->element, from + (tile + i) * array->token, row + (long)i * dim, dim, 1);
        if (by_key)
            turn(row, dim, keys, dim, by_key + tile * dim, NR);
        if (by_dim) {
            for (int i = 0; i < keys; i++) {
                const int is_odd = !finite_row(row + (long)i * dim, dim);
                if (is_odd)
                    odd->row[odd->count++] = tile + i;
                spread(row + (long)i * dim, dim, pitch, is_odd, by_dim + (tile + i) * NR);
            }
            for (int i = keys; i < NR; i++)
                spread(row, dim, pitch, 1, by_dim + (tile + i) * NR);
        }
    }
}

// The rows of a tile, times factor: in panels, and by dim if by_dim is given.  row: MR * dim numbers.
static void pack_rows(const struct launch* of, const struct array* array, int kv_head, int dim, const struct rows* rows,
                      real factor, real* row, real* panels, real* by_dim, long pitch, struct odd* odd) {
    if (odd)
        odd->count = 0;
    for (long first = 0; first < rows->count; first += MR) {
        const int count = least(rows->count - first, MR);
        for (int i = 0; i < count; i++)
            read_row(of->element, row_at(of, array, kv_head, rows->first + first + i), row + (long)i * dim, dim,
                     factor);
        turn(row, dim, count, dim, panels + first * dim, MR);
        if (by_dim)
            for (int i = 0; i < MR; i++) {
                const int is_odd = i < count && !finite_row(row + (long)i * dim, dim);
                if (is_odd)
                    odd->row[odd->count++] = first + i;
                spread(row + (long)i * dim, dim, pitch, is_odd || i >= count, by_dim + (first + i) * NR);
            }
    }
}
