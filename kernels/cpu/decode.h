// Attention of a few queries over many keys in pages, for each of a batch of sequences: limited by memory bandwidth.
//
// The rows of a KV head are those of all queries and query heads that read it, one query after another, so that keys
// and values come from memory once.  Blocks of keys go through scores, softmax and sums of values where they lie; the
// values are prefetched while their keys are multiplied, and the next keys while the values are.
//
// A sequence's keys are cut into parts by their number alone, and the parts are merged in order.  So bits depend
// neither on the threads nor on the other sequences of a batch.
#pragma once

#include "decode_tile.h"
#include "work.h"

#define PART 1024                                       // keys of a part, more if there were more than PARTS
#define PARTS 64
#define READ_BYTE 5.0                                   // operations in the time in which a byte is read

struct sequence {
    long lo, hi, part;                                  // keys that any row sees; keys of a part
    long parts, before, rows_before;  // and parts, and rows of split partials, before this sequence
};

struct decode_pieces {  // what threads share
    struct sequence* sequence;
    int32_t* left;  // parts of a sequence and KV head that are not done
    real* partial;  // of parts: [sequence][part][KV head][row]
    char* work;
    int64_t bytes;  // of a thread's scratch memory
    long count, rows, pitch;  // pieces; rows of a KV head; numbers of a row's partial
};

static int64_t decode_memory(const struct launch* of, char* scratch, struct decode_pieces* pieces) {
    char* at = scratch;
    struct decode_work none;
    struct sequence before = {0}, *sequence = take(&at, (of->sequences + 1) * sizeof *sequence);
    int32_t* left = take(&at, (int64_t)of->sequences * of->kv_heads * sizeof *left);
    pieces->rows = of->sequences ? of->tokens / of->sequences * (of->heads / of->kv_heads) : 0;
    pieces->pitch = rounded_up(of->value_dim, LANES) + LANES;
    for (long s = 0; s < of->sequences; s++) {
        const long queries = of->tokens / of->sequences;
        before.lo = before.hi = 0;
        for (long i = s * queries; i < (s + 1) * queries; i++)
            if (of->begin[i] < of->end[i]) {
                before.lo = before.lo < before.hi ? min(before.lo, of->begin[i]) : of->begin[i];
                before.hi = max(before.hi, of->end[i]);
            }
        before.part = rounded_up(max(PART, (before.hi - before.lo + PARTS - 1) / PARTS), BLOCK_KEYS);
        before.parts = max(1, (before.hi - before.lo + before.part - 1) / before.part);
        if (scratch)
            sequence[s] = before;
        for (int g = 0; scratch && g < of->kv_heads; g++)
            left[s * of->kv_heads + g] = before.parts;
        before.before += before.parts;
        before.rows_before += before.parts > 1 ? before.parts * of->kv_heads * pieces->rows : 0;
    }
    if (scratch)
        sequence[of->sequences] = before;
    pieces->sequence = sequence, pieces->left = left;
    pieces->count = before.before * of->kv_heads;
    pieces->partial = take(&at, before.rows_before * pieces->pitch * sizeof(real));
    pieces->work = at, pieces->bytes = decode_work(of, 0, &none);
    return at - scratch + of->threads * pieces->bytes;
}

static int64_t decode_bytes(const struct launch* of) {
    struct decode_pieces pieces;
    return decode_memory(of, 0, &pieces);
}

// Writes a row: out and lse of its acc, whose weights' sum is `total`, relative to `top`.
static void write_row(const struct launch* of, long s, int kv_head, long row, const real* acc, real top, real total) {
    const long dim = of->value_dim, full = dim / LANES * LANES;
    real* out = (real*)decode_row(of, &of->out, s, kv_head, row);
    const real inverse = total == 0 ? 0 : 1 / total;
    for (long c = 0; c < full; c += LANES)
        *(loose_vec*)(out + c) = load(acc + c) * inverse;
    for (long c = full; c < dim; c++)
        out[c] = acc[streamed(c, dim)] * inverse;
    *(real*)decode_row(of, &of->lse, s, kv_head, row) = top + logarithm(total);
}

// The partial of a row and of a part: acc, and in the vector behind it top and total.
INLINE real* partial_of(const struct launch* of, const struct decode_pieces* pieces, const struct sequence* sequence,
                        long part, int kv_head, long row) {
    return pieces->partial +
           (sequence->rows_before + (part * of->kv_heads + kv_head) * pieces->rows + row) * pieces->pitch;
}

// Merges the parts of a sequence and KV head in their order.
static void merge_parts(const struct launch* of, const struct decode_pieces* pieces, long s, int kv_head) {
    const struct sequence* sequence = pieces->sequence + s;
    const long width = pieces->pitch - LANES;
    for (long row = 0; row < pieces->rows; row++) {
        real *sum = partial_of(of, pieces, sequence, 0, kv_head, row), top = -INFINITY, total = 0;
        for (long part = 0; part < sequence->parts; part++) {
            const real of_part = partial_of(of, pieces, sequence, part, kv_head, row)[width];
            top = of_part > top ? of_part : top;
        }
        for (long part = 0; part < sequence->parts; part++) {
            const real* each = partial_of(of, pieces, sequence, part, kv_head, row);
            const vec weight = exponential(splat(each[width] - (top == -INFINITY ? 0 : top)));
            total += each[width + 1] * weight[0];
            for (long c = 0; c < width; c += LANES)
                store(sum + c, (part ? load(sum + c) : splat(0)) + load(each + c) * weight);
        }
        write_row(of, s, kv_head, row, sum, top, total);
    }
}

// The keys of a piece, which is a part of a sequence with a KV head; none behind the last piece.  s: the sequence of
// this piece, or of one before it.
static struct keys keys_of(const struct launch* of, const struct decode_pieces* pieces, long piece, long s) {
    if (piece >= pieces->count)
        return (struct keys){0};
    while (piece >= pieces->sequence[s + 1].before * of->kv_heads)
        s++;
    const struct sequence* sequence = pieces->sequence + s;
    const long at = piece - sequence->before * of->kv_heads;
    const long first = sequence->lo + at % sequence->parts * sequence->part;
    return (struct keys){s, at / sequence->parts, first, min(sequence->hi, first + sequence->part)};
}

// A piece of work; returns whether to go on.  next: the keys of the piece behind it.
static int decode_piece(struct job* job, int thread, const struct decode_pieces* pieces, struct decode_work* work,
                        const struct keys* keys, const struct keys* next) {
    const struct launch* of = job->of;
    const long s = keys->s, start = keys->first, stop = keys->stop, pitch = vectors_of(of->value_dim) * LANES;
    const int kv_head = keys->kv_head;
    const struct sequence* sequence = pieces->sequence + s;
    const long part = (start - sequence->lo) / sequence->part;
    for (long first = 0; first < pieces->rows; first += DECODE_ROWS) {
        const long end = min(first + DECODE_ROWS, pieces->rows);
        const int tiles = begin_tiles(of, work, s, kv_head, first, end, start, stop);
        set_ahead(of, work->tile->width, work->block);
        for (long key = start; key < stop; key += BLOCK_KEYS) {
            make_block(of, work, keys, key, end < pieces->rows ? keys : next);
            for (int t = 0; t < tiles; t++)
                if (work->tile[t].lowest < key + BLOCK_KEYS && key < work->tile[t].highest)
                    decode_block(of, work, work->tile + t, t == 0);
            if (give_up(job, thread))
                return 0;
        }
        for (struct decode_tile* tile = work->tile; tile < work->tile + tiles; tile++) {
            const vec total = over_row(0, tile->width, tile->total);
            for (long i = 0; i < tile->count; i++) {
                const real* acc = tile->acc + i * pitch;
                if (sequence->parts == 1) {
                    write_row(of, s, kv_head, tile->first + i, acc, tile->top[i], total[i]);
                    continue;
                }
                real* partial = partial_of(of, pieces, sequence, part, kv_head, tile->first + i);
                memcpy(partial, acc, pitch * sizeof(real));
                partial[pitch] = tile->top[i], partial[pitch + 1] = total[i];
            }
        }
    }
    if (sequence->parts > 1 && !__atomic_sub_fetch(pieces->left + s * of->kv_heads + kv_head, 1, __ATOMIC_ACQ_REL))
        merge_parts(of, pieces, s, kv_head);
    count_done(job, max(stop - start, 0));
    return 1;
}

static void decode_worker(struct job* job, int thread, void* with) {
    const struct decode_pieces* pieces = with;
    const struct launch* of = job->of;
    struct decode_work work;
    decode_work(of, pieces->work + thread * pieces->bytes, &work);
    memset(work.zeros, 0, rounded_up(max(of->head_dim, of->value_dim), LANES) * sizeof(double));
    for (long piece, s = 0; (piece = take_piece(job)) < pieces->count;) {
        const struct keys keys = keys_of(of, pieces, piece, s);  // pieces come in their order
        const struct keys next = keys_of(of, pieces, piece + 1, keys.s);
        s = keys.s;
        if (give_up(job, thread) || !decode_piece(job, thread, pieces, &work, &keys, &next))
            break;
    }
}

static int32_t decode(const struct launch* of) {
    struct job job;
    struct decode_pieces pieces;
    int64_t keys = 0;
    decode_memory(of, of->scratch, &pieces);
    for (long s = 0; s < of->sequences; s++)
        keys += (pieces.sequence[s].hi - pieces.sequence[s].lo) * of->kv_heads;
    const double bytes = (double)keys * (of->head_dim + of->value_dim) * element_bytes[of->element];
    begin_job(&job, of, max(keys, 1));
    return in_threads(&job, threads_for(of, bytes * READ_BYTE, pieces.count), decode_worker, &pieces);
}
