// Keys and values of decoding where they lie, a block at a time, and what is prefetched meanwhile.
//
// A block's keys are read, then its values, then the keys of the next block.  With each line that is read, the line is
// prefetched that comes some KiB later in this order, line after line whatever the order of the products: memory sees
// one stream.  Rows that do not lie side by side are prefetched in the order of the products.

#pragma once

#include "element.h"
#include "rows.h"

#define BLOCK_KEYS 128          // whose scores become weights together
#define BESIDE 64               // keys of which the products of some instruction sets take all
#define GROUP 8                 // keys that are multiplied at the same time, at most
// Rows of values that several passes read one after another, so that memory is read almost in order.
#ifdef __AMX_BF16__
#define STEP_BYTES 16384
#define STEP_ROWS 64
#define MIN_STEP 32
#else
#define STEP_BYTES 4096
#define STEP_ROWS 16
#define MIN_STEP 2
#endif
#define SIDE_BY_SIDE 16  // keys of a page, at least
// So far ahead rows are prefetched, and further for each product with a line: with more products, the processor
// computes for longer before it reads on.
#define NEAR_BYTES 4096
#define NEAR_BYTES_PRODUCT 1024
#define NEAR_PRODUCTS 8  // at most
#define NEAR_ROWS BLOCK_KEYS  // at most

struct block {  // of keys
    long first, count;
    long behind;  // count, rounded up: so many rows of each kind, of which those beyond count are zeros
    long step;  // rows of values that several passes read one after another: a power of 2
    long near;  // rows ahead that are prefetched
    int side_by_side;  // whether so many rows mostly lie one behind the other
    const char* row[2 * BLOCK_KEYS + NEAR_ROWS];  // keys, values, and the first keys of the next block
};

// Prefetches the lines of `bytes` bytes.
INLINE void prefetch(const char* line, long bytes) {
    for (long at = 0; at < bytes; at += 64)
        __builtin_prefetch(line + at, 0, 3);
}

// Vectors of a row.
INLINE long vectors_of(long dim) { return (dim + LANES - 1) / LANES; }

// Where number c of a row is in its vectors: the last one ends with the row (widened_rest).
INLINE long streamed(long c, long dim) { return dim > LANES && c >= dim / LANES * LANES ? c + LANES - dim % LANES : c; }
