// What a launch of a block is, between Python (mpiattn/backends/cpu/library.py), choose.c and the kernels.
//
// The batch is folded into the heads: q, out, dout and dq are (tokens, heads, dim), k, v, dk and dv (keys, kv_heads,
// dim), lse and delta (tokens, heads).  The numbers of a row lie one after another; tokens and heads have any stride.
// Query head h reads KV head h / (heads / kv_heads), and row i of it sees the keys begin[g][i] <= j < end[g][i], where
// g is the head's group.

#pragma once

#include <stddef.h>
#include <stdint.h>

enum element { FLOAT32, FLOAT64, FLOAT16, BFLOAT16 };

struct array {
    char* data;
    int64_t token, head;                        // strides in bytes
};

struct launch {
    int32_t element;                            // of q, k, v and dout; all else is float32, or float64 for float64
    int32_t groups, heads, kv_heads, head_dim, value_dim;
    int32_t threads;                            // that may work on it
    int64_t tokens, keys;
    double scale, softcap;                      // softcap 0: none
    const int32_t *begin, *end;                 // (groups, tokens)
    struct array q, k, v, out, lse;             // lse: read and written forward, only read backward
    struct array dout, delta, dq, dk, dv;       // backward only
    int32_t (*poll)(double share);              // called between pieces of work, unless NULL; not 0: give up
    char* scratch;                              // of at least the bytes that the kernel asks for
};

// The kernels of one instruction set and one accumulation dtype.  They return 0, or 1 if `poll` said to give up.
struct kernels {
    int64_t (*forward_bytes)(const struct launch*), (*backward_bytes)(const struct launch*);
    int32_t (*forward)(const struct launch*), (*backward)(const struct launch*);
};
