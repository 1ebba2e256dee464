// Copies of a tile's numbers in the order in which the micro-kernel reads them.
//
//     columns of a product, by key   [tile of NR keys][dim][NR]        for scores: a row of b is NR keys of one dim
//     columns of a product, by dim   [tile of NR dims][pitch][NR]      for sums over keys: a row of b is NR dims of one
//     key rows of a product              [panel of MR rows][dim][MR]
//
// Tiles and panels that are not full hold anything where they have no rows.
//
// A row that is not finite is left out, as zeros, where its product with a masked weight of 0 would be NaN; its number
// goes into a list, and `add_odd` adds what it gives to those that do see it.

#pragma once

#include "product.h"
#include "scratch.h"

INLINE real real_of(operand number) { return number; }

// Beyond a buffer's end, what reading or writing its last row in whole vectors may touch.
#define SLACK NR

// The `count` rows in `row` in the order of their dims, [dim][width].  What stands for others is arbitrary.
static __attribute__((noinline)) void turn(const real* row, int count, int dim, real* to, int width) {
    // The last rows first: their vectors may end in the next dim's first rows, or behind the end.
    for (int first = (count - 1) / LANES * LANES; first >= 0; first -= LANES) {
        const real* at[LANES];
        for (int i = 0; i < LANES; i++)
            at[i] = row + (long)min(first + i, count - 1) * dim;
        for (int next = 0; next < dim; next += LANES) {
            const int c = next + LANES <= dim ? next : max(dim - LANES, 0);
            vec x[LANES];
            UNROLLED for (int i = 0; i < LANES; i++) x[i] = load_loose(at[i] + c);
            transpose(x);
            real* into = to + (long)c * width + first;
            UNROLLED for (int i = 0; i < LANES; i++) if (c + i < dim) store_loose(into + i * width, x[i]);
        }
    }
}

// One row into its place by dim: place is that of its first NR dims, `pitch` rows before that of the next.  Returns
// bits other than 0 if a number is not finite.
INLINE ivec spread(const real* row, int dim, long pitch, real* place) {
    ivec odd = {0};
    for (int c = 0; c < dim; c += NR)
        for (int n = c; n < c + NR; n += LANES) {
            vec x = load_loose(row + n);
            if (n + LANES > dim)
                x = (vec)((ivec)x & (lane_numbers() < dim - n));
            odd |= (ivec)(x - x);
            store(place + c * pitch + n - c, x);
        }
    return odd;
}

// The `count` rows in `row` into their places by dim, from number `first` on.
static void spread_rows(const real* row, int count, int dim, long first, real* by_dim, long pitch, struct odd* odd) {
    ivec any = {0};
    for (int i = 0; i < count; i++)
        any |= spread(row + (long)i * dim, dim, pitch, by_dim + (first + i) * NR);
    if (sum_of((vec)any) == 0)
        return;
    for (int i = 0; i < count; i++)
        if (!finite_row(row + (long)i * dim, dim)) {
            odd->row[odd->count++] = first + i;
            for (int c = 0; c < dim; c += NR)
                memset(by_dim + c * pitch + (first + i) * NR, 0, NR * sizeof(real));
        }
}

// Keys [first, first + count) of a KV head, or those that `key` lists: by key if by_key is given, by dim if by_dim is.
// row: NR * dim numbers, and SLACK.
static void pack_keys(const struct launch* of, const struct array* array, int kv_head, int dim, long first, long count,
                      real* row, real* by_key, real* by_dim, long pitch, struct odd* odd, const int32_t* key) {
    const char* from = kv_rows(of, array, kv_head) + first * array->token;
    const int packed = array->token == dim * (long)sizeof(real) && dim % NR == 0;
    const int side_by_side = of->element == REAL && packed && !key;
    if (odd)
        odd->count = 0;
    for (long tile = 0; tile < count; tile += NR) {
        const int keys = min(count - tile, NR);
        const real* rows = side_by_side ? (const real*)(from + tile * array->token) : row;
        for (int i = 0; i < keys && !side_by_side; i++) {
            const long at = tile + i, later = at + AHEAD_ROWS;
            if (later < count)
                prefetch_row(from + (key ? key[later] : later) * array->token, dim * element_bytes[of->element]);
            read_row(of->element, from + (key ? key[at] : at) * array->token, row + (long)i * dim, dim, 1);
        }
        if (by_key)
            turn(rows, keys, dim, by_key + tile * dim, NR);
        if (by_dim)
            spread_rows(rows, keys, dim, tile, by_dim, pitch, odd);
    }
}

// The rows of a tile, times factor: in panels, and by dim if by_dim is given.  row: MR * dim numbers, and SLACK.
static void pack_rows(const struct launch* of, const struct array* array, int dim, const struct rows* rows, real factor,
                      real* row, real* panels, real* by_dim, long pitch, struct odd* odd) {
    if (odd)
        odd->count = 0;
    for (long first = 0; first < rows->count; first += MR) {
        const int count = min(rows->count - first, MR);
        for (int i = 0; i < count; i++) {
            prefetch_row_at(rows, array, first + i, dim * element_bytes[of->element]);
            read_row(of->element, row_at(rows, array, first + i), row + (long)i * dim, dim, factor);
        }
        turn(row, count, dim, panels + first * dim, MR);
        if (by_dim)
            spread_rows(row, count, dim, first, by_dim, pitch, odd);
    }
}
