// What a launch of a block is, between Python (mpiattn/backends/cpu/library.py), choose.c and the kernels.
//
// The batch is folded into the heads: q, out, dout and dq are (tokens, heads, dim), k, v, dk and dv (keys, kv_heads,
// dim), lse and delta (tokens, heads).  The numbers of a row lie one after another; tokens, heads and sequences, which
// are heads / sequences consecutive heads each, have any stride.  Query head h reads KV head h / (heads / kv_heads),
// and row i of it sees the keys begin[g][i][n] <= j < end[g][i][n] of each list n, where g is the head's group.  A
// row's intervals are disjoint.

#pragma once

#include <stddef.h>
#include <stdint.h>

enum element { FLOAT32, FLOAT64, FLOAT16, BFLOAT16 };
enum operation { FORWARD, BACKWARD, DECODE, MERGE, SINK, DELTA, NARROW, OPERATIONS };

struct array {
    char* data;
    int64_t token, head;                        // strides in bytes
    int64_t sequence;                           // and, beyond its heads' strides, from one sequence to the next
};

// Weights are dropped by these positions, see dropout.h; the heads' are numbers among those of the whole problem.
struct dropout {
    const int32_t *rows, *keys, *heads;         // (tokens,), (keys,), (heads,)
    uint64_t seed;
    uint32_t threshold;                         // 0: none is dropped
};

struct launch {
    int32_t element;                            // of q, k, v and dout; all else is float32, or float64 for float64
    int32_t groups, heads, kv_heads, head_dim, value_dim;
    int32_t threads;                            // that may work on it
    int32_t lists;                              // of intervals; decoding has one
    int64_t tokens, keys;
    double scale, softcap;                      // softcap 0: none
    const int32_t *begin, *end;                 // (groups, tokens, lists)
    struct array q, k, v, out, lse;             // lse: read and written forward, only read backward
    struct array dout, delta, dq, dk, dv;       // backward only
    struct array other, other_lse;              // merged into out and lse; other_lse: also sinks, and dlse of delta
    struct array bias, dbias;                   // (sequences, heads, tokens, keys), data NULL: none; see below
    struct dropout dropout;
    int32_t bias_element;
    int32_t sequences;                          // of the batch; 0 if no array has a stride of them
    int32_t page_size;                          // of decoding: see below
    const int32_t* pages;
    const int64_t* tables;
    int32_t (*poll)(double share);              // called between pieces of work, unless NULL; not 0: give up
    char* scratch;                              // of at least the bytes that the kernel asks for
};

// A bias's rows have as many numbers as there are keys, of the launch's element or real.  Strides are 0 where an axis
// has the length 1, also that from one sequence to the next: sequence + heads / sequences * head.  dbias is real; rows
// that share its numbers add to them in one order.
//
// Decoding: k and v are pools of slots; a page is page_size consecutive ones.  The tokens are the queries of each
// sequence in turn, as many of each, and begin and end, (tokens), are keys of its sequence, whose pages are
// pages[tables[s]] and those that follow.  out and lse are only written.  bias is real, (tokens, heads, keys of a
// sequence); there is no dropout.
//
// Narrowing: out, of the element, becomes other, which is float32.

// The kernels of one instruction set and one accumulation dtype.  They return 0, or 1 if `poll` said to give up.
struct kernels {
    struct {
        int64_t (*bytes)(const struct launch*);         // of scratch memory
        int32_t (*run)(const struct launch*);
    } of[OPERATIONS];
};
