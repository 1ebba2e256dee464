// Keys and values of decoding where they lie, a block at a time, and what is prefetched meanwhile.
//
// A block's keys are read, then its values, then the keys of the next block.  With each line that is read, the line is
// prefetched that comes some KiB later in this order, line after line whatever the order of the products: memory sees
// one stream.  Rows that do not lie side by side are prefetched in the order of the products.

#pragma once

#include "element.h"
#include "rows.h"

#define BLOCK_KEYS 128          // whose scores become weights together
#define GROUP 4                 // keys that are multiplied at the same time, at most
#define STEP_BYTES 4096         // of values that several passes read one after another: memory is idle meanwhile
#define STEP_ROWS 16            // of them, at most
// Where a pass reads so many bytes of a row or more, a step has two rows, so that memory is read almost in order.
#define LONG_RUN 256
#define NEAR_BYTES 6144         // so far ahead rows are prefetched, or up to a step more
#define NEAR_ROWS 64            // at most

struct block {  // of keys
    long first, count;
    long behind;  // count, rounded up to a vector: so many rows of each kind
    long step;  // rows of values that several passes read one after another: a power of 2
    long near;  // rows ahead that are prefetched
    int side_by_side;  // whether so many rows mostly lie one behind the other
    const char* row[2 * BLOCK_KEYS + NEAR_ROWS];  // keys, values, and the first keys of the next block
};

// Sets how far ahead rows are prefetched.
INLINE void set_ahead(const struct launch* of, struct block* block) {
    const int element = element_bytes[of->element];
    const long key = of->head_dim * element, value = of->value_dim * element, row = most(key, value);
    block->step = 2;
    while (block->step < STEP_ROWS && 2 * block->step * value <= STEP_BYTES)
        block->step *= 2;
    block->near = least(rounded_up(most(NEAR_BYTES / row, 1), block->step), NEAR_ROWS);
    block->side_by_side = of->k.token == key && of->v.token == value && of->page_size >= block->step;
}

// Prefetches the lines of `bytes` bytes.
INLINE void prefetch(const char* line, long bytes) {
    for (long at = 0; at < bytes; at += 64)
        __builtin_prefetch(line + at, 0, 3);
}

// Vectors of a row.
INLINE long vectors_of(long dim) { return (dim + LANES - 1) / LANES; }

// Where number c of a row is in its vectors: the last one ends with the row (widened_rest).
INLINE long streamed(long c, long dim) { return dim > LANES && c >= dim / LANES * LANES ? c + LANES - dim % LANES : c; }
