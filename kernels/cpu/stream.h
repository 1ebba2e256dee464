// Keys and values of decoding where they lie, a block at a time, and what is prefetched meanwhile.

#pragma once

#include "element.h"
#include "rows.h"

#define BLOCK_KEYS 128          // whose scores become weights together
#define FAR_KEYS 64             // behind a block, whose addresses are known, at most
#define NEAR_BYTES 6144         // so far ahead rows are prefetched into the L1 cache
#define FAR_BYTES 16384         // and into the L2 cache
#define FEW_ROWS 2              // with so many the processor itself fills the L2 cache in time

struct block {                                          // of keys, and of those behind it
    long first, count;
    long near, far;                                     // so many keys ahead rows are prefetched
    const char *key[BLOCK_KEYS + FAR_KEYS], *value[BLOCK_KEYS + FAR_KEYS];
};

// Prefetches the lines of `bytes` bytes, from byte `at` on, of two rows: the near row's into the L1 cache, the far
// row's into the L2 cache.  width: rows of the tile.
INLINE void prefetch(int width, const char* near, const char* far, long at, long bytes) {
    for (long to = at + bytes; at < to; at += 64)
        if (bytes >= 64 || at % 64 == 0) {
            __builtin_prefetch(near + at, 0, 3);
            if (width > FEW_ROWS)
                __builtin_prefetch(far + at, 0, 2);
        }
}

// Vectors of a row.
INLINE long vectors_of(long dim) { return (dim + LANES - 1) / LANES; }

// Where number c of a row is in its vectors: the last one ends with the row (widened_rest).
INLINE long streamed(long c, long dim) { return dim > LANES && c >= dim / LANES * LANES ? c + LANES - dim % LANES : c; }
