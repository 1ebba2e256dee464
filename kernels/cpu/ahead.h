// Copies of what a thread's next piece of work reads, made while it computes the current one.
//
// Where blocks are small, there are many heads, and the rows of one lie far apart: to read them would take as long as
// to compute.  So, with every step of the current piece, a few rows of the next KV head are copied to where they lie
// side by side, and those that follow are prefetched.  Few are on their way at a time: they often belong in the same
// cache set, and a core waits for more than a dozen lines.

#pragma once

#include <limits.h>

#include "scratch.h"

#define AHEAD_KEYS 256          // at most; a tile of more rows or keys computes for long

struct rows_ahead {  // of q, and backward of dout, by head; then those of k and of v
    int array;
    long left, bytes, stride;
    const char* row;
};

struct ahead {
    int on;  // whether the current piece copies
    const struct launch* from;  // where its own inputs are: `near`, or the launch
    struct launch near;  // the launch, with q, dout, k and v where the copies are
    const struct launch* of;
    int backward;
    long kv_head, share;  // rows to copy with each step: a row of weights, or a product
    struct rows_ahead copied, fetched;
    char *copies, *to;
};

static int is_small(const struct launch* of) { return rows_of(of) <= MAX_ROWS && of->keys <= AHEAD_KEYS; }

// Bytes of the copies.  They do not grow with blocks that are not small.
static int64_t ahead_bytes(const struct launch* of, int backward) {
    const long rows = min(rows_of(of), MAX_ROWS), keys = min(of->keys, AHEAD_KEYS);
    const long head_rows = rows + keys, value_rows = keys + (backward ? rows : 0);
    return element_bytes[of->element] * (head_rows * of->head_dim + value_rows * of->value_dim);
}

// Goes on to the next row; returns whether there is one.
INLINE int next_row(const struct ahead* ahead, struct rows_ahead* rows) {
    const struct launch* of = ahead->of;
    const long queries = of->heads / of->kv_heads;
    if (rows->left) {
        rows->left--, rows->row += rows->stride;
        return 1;
    }
    const long of_rows = ahead->backward ? 2 * queries : queries;
    if (rows->array == of_rows + 2)
        return 0;
    const int is_row = rows->array < of_rows, is_value = is_row ? rows->array >= queries : rows->array > of_rows;
    const struct array* array = is_row ? is_value ? &of->dout : &of->q : is_value ? &of->v : &of->k;
    const long head = is_row ? ahead->kv_head * queries + rows->array % queries : ahead->kv_head;
    rows->row = head_rows(array, head, is_row ? sequence_of(of, head) : sequence_of_kv(of, head));
    rows->stride = array->token;
    rows->left = (is_row ? of->tokens : of->keys) - 1;
    rows->bytes = element_bytes[of->element] * (is_value ? of->value_dim : of->head_dim);
    rows->array++;
    return 1;
}

static void fetch_row(struct ahead* ahead) {
    if (next_row(ahead, &ahead->fetched))
        prefetch_row(ahead->fetched.row, ahead->fetched.bytes);
}

// Copies so many rows, or those that are left.
static __attribute__((noinline)) void copy_ahead(struct ahead* ahead, long count) {
    for (; count && next_row(ahead, &ahead->copied); count--) {
        const char* row = ahead->copied.row;
        const long bytes = ahead->copied.bytes;
        long at = 0;
        fetch_row(ahead);
        for (; at + VBYTES <= bytes; at += VBYTES)
            *(loose_bytes*)(ahead->to + at) = *(const loose_bytes*)(row + at);
        if (at < bytes)
            memcpy(ahead->to + at, row + at, bytes - at);
        ahead->to += bytes;
    }
}

INLINE void step_ahead(struct ahead* ahead) {
    if (ahead->on)
        copy_ahead(ahead, ahead->share);
}

// Takes scratch memory, before the first piece of work.
INLINE void no_ahead(struct ahead* ahead, const struct launch* of, int backward, char** scratch) {
    ahead->of = ahead->from = of, ahead->backward = backward, ahead->on = 0;
    ahead->copies = take(scratch, ahead_bytes(of, backward));
}

// Begins with a KV head, which is a piece of work; the current one has so many steps.
static void begin_ahead(struct ahead* ahead, long kv_head, long steps) {
    const struct launch* of = ahead->of;
    const long rows = (ahead->backward ? 2 : 1) * rows_of(of) + 2 * of->keys;
    ahead->on = 1, ahead->kv_head = kv_head, ahead->to = ahead->copies;
    ahead->share = (rows + steps - 1) / steps;
    ahead->copied = ahead->fetched = (struct rows_ahead){0};
    for (int i = 0; i < AHEAD_ROWS; i++)
        fetch_row(ahead);
}

// Copies what is left, which the next piece of work then reads.
static void end_ahead(struct ahead* ahead) {
    if (!ahead->on)
        return;
    const struct launch* of = ahead->of;
    const long bytes = element_bytes[of->element], row = bytes * of->head_dim, value = bytes * of->value_dim;
    const long first = ahead->kv_head * (of->heads / of->kv_heads) * of->tokens;
    char *dout = ahead->copies + row * rows_of(of), *keys = dout + (ahead->backward ? value * rows_of(of) : 0);
    copy_ahead(ahead, LONG_MAX);
    ahead->on = 0, ahead->from = &ahead->near;
    ahead->near = *of;
    ahead->near.q = (struct array){ahead->copies - first * row, row, row * of->tokens, 0};
    ahead->near.dout = (struct array){dout - first * value, value, value * of->tokens, 0};
    ahead->near.k = (struct array){keys, row, 0, 0};
    ahead->near.v = (struct array){keys + row * of->keys, value, 0, 0};
}
