// Products of a tile of rows with keys and values where they lie, each read once for all rows.
//
// A tile has `width` rows, a power of two up to LANES.  A vector of scores or weights holds all its rows for
// LANES / width keys: [key][row].

#pragma once

#include "stream.h"

#if defined(__AVX512F__) || defined(__aarch64__)
#define SUMS 16                 // that stay in registers, of which there are 32
#else
#define SUMS 8
#endif
#define MAX_VECTORS(width) min(SUMS / (width), 8)  // of values in a pass

typedef real factor;

// From scores to weights.
INLINE vec weight_of(vec x) { return exponential(x); }

// Bytes that a product takes of a row.
INLINE int product_bytes(int element) { return element_bytes[element] * LANES; }

// What of the scale `put_query` leaves to be multiplied.
INLINE real scale_of_scores(real scale) {
    (void)scale;
    return 1;
}

// Copies a row of queries, times scale, as row i of a tile.  q: [vector][row][LANES]; row: memory for a row.
INLINE void put_query(int element, int width, const char* from, int dim, real scale, long i, real* row, real* q) {
    const long full = dim / LANES * LANES;
    read_row(element, from, row, dim, scale);
    for (long c = 0; c < full; c += LANES)
        store(q + c * width + i * LANES, load(row + c));
    for (long c = full; c < dim; c++) {
        const long at = streamed(c, dim);
        q[(at / LANES * width + i) * LANES + at % LANES] = row[c];
    }
}

// The scores of the keys of a block.  ahead: whether to prefetch.
INLINE void stream_scores(int element, int width, int dim, const real* q, const struct block* block, int ahead,
                          real* score) {
    const int keys = max(LANES / width, min(SUMS / width, LANES)), bytes = element_bytes[element] * LANES;
    const int full = dim / LANES;
    const int few = keys < GROUP ? keys : GROUP;
    const long stride = block->side_by_side ? few : 1;
    for (long j = 0; j < block->count; j += keys) {
        vec sum[LANES * LANES];
        UNROLLED for (int i = 0; i < keys * width; i++) sum[i] = splat(0);
        UNROLLED for (int first = 0; first < keys; first += few) {
            const char *const *key = block->row + j + first, *near[LANES];
            UNROLLED for (int n = 0; n < few; n++) near[n] =
                block->side_by_side ? key[block->near] + n * 64 : key[block->near + n];
            const real* row = q;
            for (long at = 0; at < full * bytes; at += bytes, row += width * LANES)
                UNROLLED for (int n = 0; n < few; n++) {
                    const vec numbers = widened(element, key[n] + at);
                    if (ahead && at % 64 == 0)
                        prefetch(near[n] + at * stride, 64);
                    UNROLLED for (int i = 0; i < width; i++) sum[(first + n) * width + i] +=
                        load(row + i * LANES) * numbers;
                }
            if (dim % LANES)
                UNROLLED for (int n = 0; n < few; n++) {
                    const vec numbers = widened_rest(element, key[n], dim);
                    UNROLLED for (int i = 0; i < width; i++) sum[(first + n) * width + i] +=
                        load(row + i * LANES) * numbers;
                }
        }
        UNROLLED for (int i = 0; i < keys * width; i += LANES) store(score + j * width + i, sums_of(sum + i));
    }
}

// The weights of a block as `stream_columns` takes them.
INLINE const factor* factors_of(int width, long count, const real* weight, factor* memory) {
    (void)width, (void)count, (void)memory;
    return weight;
}

// Adds the values of the keys [first, stop) of a block by their weights to acc: `vectors` vectors from vector `from`
// on.  rest: whether these are the last numbers of rows, fewer than a vector.
INLINE void stream_columns(int element, int width, int vectors, int rest, int dim, int from, const struct block* block,
                           int ahead, long first, long stop, const factor* weight, real* acc, long pitch) {
    const int bytes = element_bytes[element] * LANES;
    const char* const* value = block->row + block->behind;
    const int in_steps = block->side_by_side && vectors < dim / LANES;
    const char* near = value[first + block->near] + from * bytes * (stop - first);  // where prefetching goes on
    long read = from * bytes * (stop - first);
    vec sum[LANES * 8];
    UNROLLED for (int i = 0; i < width * vectors; i++) sum[i] = splat(0);
    weight += first * width;
    for (long j = first; j < stop; j++, weight += width) {
        vec numbers[8];
        if (ahead && in_steps && (vectors * bytes >= 64 || read % 64 == 0))
            prefetch(near, vectors * bytes);
        else if (ahead && !in_steps && (vectors * bytes >= 64 || from * bytes % 64 == 0))
            prefetch(value[j + block->near] + from * bytes, vectors * bytes);
        near += vectors * bytes, read += vectors * bytes;
        UNROLLED for (int n = 0; n < vectors; n++) numbers[n] =
            rest ? widened_rest(element, value[j], dim) : widened(element, value[j] + (from + n) * bytes);
        UNROLLED for (int i = 0; i < width; i++) {
            const real each = weight[i];
            UNROLLED for (int n = 0; n < vectors; n++) sum[i * vectors + n] += each * numbers[n];
        }
    }
    UNROLLED for (int i = 0; i < width; i++) UNROLLED for (int n = 0; n < vectors; n++) {
        real* to = acc + i * pitch + (from + n) * LANES;
        store(to, load(to) + sum[i * vectors + n]);
    }
}
