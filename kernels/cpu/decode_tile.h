// A tile of rows of decoding with a block of keys: scores, softmax, sums of values.

#pragma once

#include "scratch.h"
#include "streams.h"

#define DECODE_ROWS 64                                  // share what is read

struct decode_tile {
    long first, count;                                  // of the rows of the KV head
    int width;                                          // count, or a few more
    long from[LANES], to[LANES];                        // a row sees; beyond `count` as the last one
    long lowest, highest, full_from, full_to;           // any row sees, and every row sees
    const char* bias[LANES];                            // of a row, by key of its sequence
    real *q, *acc;
    vec top, total;                                     // lane: row lane % width
};

struct decode_work {                                    // of a thread
    struct decode_tile* tile;
    struct block *block, *finite;
    real *q, *acc, *score, *row;
    char* zeros;
};

static int64_t decode_work(const struct launch* of, char* scratch, struct decode_work* work) {
    char* at = scratch;
    const long width = rounded_up(of->head_dim, LANES), value_width = rounded_up(of->value_dim, LANES);
    work->tile = take(&at, DECODE_ROWS * sizeof *work->tile);
    work->block = take(&at, sizeof(struct block));
    work->finite = take(&at, sizeof(struct block));
    work->q = take(&at, 2 * DECODE_ROWS * width * sizeof(real));
    work->acc = take(&at, 2 * DECODE_ROWS * value_width * sizeof(real));
    work->score = take(&at, BLOCK_KEYS * LANES * sizeof(real));
    work->row = take(&at, max(width, value_width) * sizeof(real));
    work->zeros = take(&at, max(width, value_width) * sizeof(double));
    return at - scratch;
}

// The address of a sequence's row in an array.
INLINE char* decode_row(const struct launch* of, const struct array* array, long s, int kv_head, long row) {
    const long per_kv = of->heads / of->kv_heads, token = s * (of->tokens / of->sequences) + row / per_kv;
    return array->data + token * array->token + (kv_head * per_kv + row % per_kv) * array->head;
}

// The keys [first, stop) of a sequence and KV head.
struct keys {
    long s;
    int kv_head;
    long first, stop;
};

// Puts the rows of the keys [first, first + count) into `row`.  array: that of the keys, or of the values.  Returns
// the place behind the last row.
static const char** put_rows(const struct launch* of, const struct array* array, const struct keys* keys, long first,
                             long count, const char** row) {
    const char *rows = array->data + keys->kv_head * array->head, **end = row + count;
    const int32_t* page = of->pages + of->tables[keys->s] + first / of->page_size;
    for (long at = first % of->page_size; row < end; page++, at = 0) {
        const char* from = rows + ((long)*page * of->page_size + at) * array->token;
        for (const char** stop = row + min(of->page_size - at, end - row); row < stop; from += array->token)
            *row++ = from;
    }
    return row;
}

// Makes the block of the keys from `first` on.  next: the keys that are read after these.
static void make_block(const struct launch* of, const struct decode_work* work, const struct keys* keys, long first,
                       const struct keys* next) {
    struct block* block = work->block;
    const char** row = block->row;
    block->first = first, block->count = min(keys->stop - first, BLOCK_KEYS);
    block->behind = rounded_up(block->count, BESIDE);
    for (int values = 0; values < 2; values++) {
        row = put_rows(of, values ? &of->v : &of->k, keys, first, block->count, row);
        while (row < block->row + (values + 1) * block->behind)
            *row++ = work->zeros;
    }
    const char** end = row + block->near;
    first += block->count;
    row = put_rows(of, &of->k, keys, first, min(keys->stop - first, end - row), row);
    row = put_rows(of, &of->k, next, next->first, min(next->stop - next->first, end - row), row);
    while (row < end)
        *row++ = work->zeros;
}

// Rows [first, first + count) of a KV head with the keys [start, stop), as a tile.
static void begin_tile(const struct launch* of, const struct decode_work* work, long s, int kv_head, long start,
                       long stop, struct decode_tile* tile) {
    const long dim = of->head_dim, vectors = vectors_of(dim), queries = of->tokens / of->sequences;
    tile->lowest = stop, tile->highest = start, tile->full_from = start, tile->full_to = stop;
    tile->top = splat(-INFINITY), tile->total = splat(0);
    memset(tile->q, 0, vectors * tile->width * LANES * sizeof(real));
    memset(tile->acc, 0, tile->width * vectors_of(of->value_dim) * LANES * sizeof(real));
    for (long i = 0; i < tile->width; i++) {
        const long row = tile->first + min(i, tile->count - 1), token = s * queries + row / (of->heads / of->kv_heads);
        const long from = max(of->begin[token], start), to = min(of->end[token], stop);
        tile->from[i] = from < to ? from : start, tile->to[i] = from < to ? to : start;
        if (from < to)
            tile->lowest = min(tile->lowest, from), tile->highest = max(tile->highest, to);
        tile->full_from = max(tile->full_from, tile->from[i]), tile->full_to = min(tile->full_to, tile->to[i]);
        if (of->bias.data)
            tile->bias[i] = decode_row(of, &of->bias, s, kv_head, row);
        if (i >= tile->count)
            continue;
        put_query(of->element, tile->width, decode_row(of, &of->q, s, kv_head, row), dim, of->scale, i, work->row,
                  tile->q);
    }
}

// Rows [first, stop) of a KV head in tiles; returns how many.
static int begin_tiles(const struct launch* of, const struct decode_work* work, long s, int kv_head, long first,
                       long stop, long start_key, long stop_key) {
    real *q = work->q, *acc = work->acc;
    int tiles = 0;
    for (struct decode_tile* tile = work->tile; first < stop; tile++, tiles++) {
        int width = 1;
        while (width < LANES && 4 * (stop - first) >= 6 * width)  // a quarter of the rows may be none
            width *= 2;
        *tile = (struct decode_tile){.first = first, .count = min(stop - first, width), .width = width};
        tile->q = q, tile->acc = acc;
        q += vectors_of(of->head_dim) * LANES * width, acc += vectors_of(of->value_dim) * LANES * width;
        first += width;
        begin_tile(of, work, s, kv_head, start_key, stop_key, tile);
    }
    return tiles;
}

// The sum, or the largest, of the lanes of each row, in all lanes of the row.
INLINE vec over_row(int largest, int width, vec x) {
#define FLIP(l, h) ((l) ^ (h))
#define OVER_HALF(half)                                         \
    if (width <= (half)) {                                      \
        const vec other = pick(x, x, ALL_LANES(FLIP, 0, half)); \
        x = largest ? larger(x, other) : x + other;             \
    }
#if VBYTES / REAL_BYTES >= 16
    OVER_HALF(8)
#endif
#if VBYTES / REAL_BYTES >= 8
    OVER_HALF(4)
#endif
#if VBYTES / REAL_BYTES >= 4
    OVER_HALF(2)
#endif
    OVER_HALF(1)
    return x;
}

// score * scale + bias, of a tile and a block.
static void add_bias_of_tile(const struct decode_tile* tile, const struct block* block, real scale, real* score) {
    const long stop = rounded_up(block->count * tile->width, LANES);
    for (long j = 0; j < stop; j += LANES)
        store(score + j, rounded_now(load(score + j) * scale));
    for (long i = 0; i < tile->width; i++) {
        const real* bias = (const real*)tile->bias[i] + block->first;
        for (long j = 0; j < block->count; j++)
            score[j * tile->width + i] += bias[j];
    }
}

// Turns a tile's scores of a block into weights relative to the largest so far, and those of pairs that are not seen
// into 0.  decay: by how much earlier weights have shrunk.
static void decode_weigh(const struct launch* of, struct decode_tile* tile, const struct block* block, int masked,
                         real* score, real* decay) {
    const int width = tile->width, keys = LANES / width;
    const long stop = rounded_up(block->count, keys) * width;
    real scale = of->softcap ? 1 : scale_of_scores(of->scale);
    vec high = splat(-INFINITY);
    if (of->softcap)
        apply_softcap(of->softcap, scale_of_scores(of->scale), 0, stop, score);
    if (of->bias.data)
        add_bias_of_tile(tile, block, scale, score), scale = 1;
    if (masked) {
        ivec key = {0}, from = {0}, to = {0};
        for (int l = 0; l < LANES; l++) {
            key[l] = l / width;
            from[l] = max(tile->from[l % width] - block->first, 0);
            to[l] = min(tile->to[l % width] - block->first, block->count);
        }
        for (long j = 0; j < stop; j += LANES, key += keys)
            store(score + j, choose((key >= from) & (key < to), load(score + j), splat(-INFINITY)));
    }
    for (long j = 0; j < stop; j += LANES) {
        const vec each = rounded_now(load(score + j) * scale);
        store(score + j, each);
        high = larger(each, high);
    }
    const vec top = larger(over_row(1, width, high), tile->top);
    const vec base = choose(top == -INFINITY, splat(0), top);
    const vec shrunk = exponential(tile->top - base);
    vec sum = splat(0);
    for (long j = 0; j < stop; j += LANES) {
        const vec weight = weight_of(load(score + j) - base);
        store(score + j, weight);
        sum += weight;
    }
    tile->total = tile->total * shrunk + sum;
    tile->top = top;
    memcpy(decay, &shrunk, sizeof shrunk);
}

// Replaces values that are not finite, and that some row of the tile does not see, by zeros, in the block `finite`.
// Returns whether there are any.
static int leave_out_odd(const struct launch* of, const struct decode_work* work, const struct decode_tile* tile,
                         const struct block* block) {
    int any = 0;
    *work->finite = *block;
    const char** value = work->finite->row + block->behind;
    for (long j = 0; j < block->count; j++) {
        const long key = block->first + j;
        if (tile->full_from <= key && key < tile->full_to)
            continue;
        read_row(of->element, value[j], work->row, of->value_dim, 1);
        if (!finite_row(work->row, of->value_dim))
            value[j] = work->zeros, any = 1;
    }
    return any;
}

// Adds what was left out to the rows that see it.
static void add_odd_rows(const struct launch* of, const struct decode_work* work, const struct decode_tile* tile,
                         const struct block* block, long pitch) {
    const long dim = of->value_dim;
    const char *const *value = block->row + block->behind, *const *finite = work->finite->row + block->behind;
    for (long j = 0; j < block->count; j++) {
        if (finite[j] == value[j])
            continue;
        read_row(of->element, value[j], work->row, dim, 1);
        for (long i = 0; i < tile->count; i++)
            if (tile->from[i] <= block->first + j && block->first + j < tile->to[i])
                for (long c = 0; c < dim; c++)
                    tile->acc[i * pitch + streamed(c, dim)] += work->score[j * tile->width + i] * work->row[c];
    }
}

// A tile with the current block.  ahead: whether to prefetch.
static void decode_block(const struct launch* of, const struct decode_work* work, struct decode_tile* tile, int ahead) {
    const struct block* block = work->block;
    const long pitch = vectors_of(of->value_dim) * LANES, last = block->first + block->count;
    const int masked = tile->full_from > block->first || tile->full_to < last || block->count * tile->width % LANES;
    const struct streams* stream = &streams[of->element][__builtin_ctz(tile->width)];
    real decay[LANES];
    stream->scores(of->head_dim, tile->q, block, ahead, work->score);
    decode_weigh(of, tile, block, masked, work->score, decay);
    const int odd = masked && leave_out_odd(of, work, tile, block);
    for (long i = 0; i < tile->width; i++)
        if (decay[i] != 1)
            for (long c = 0; c < pitch; c += LANES)
                store(tile->acc + i * pitch + c, load(tile->acc + i * pitch + c) * decay[i]);
    stream->values(of->value_dim, odd ? work->finite : block, ahead, work->score, tile->acc, pitch);
    if (odd)
        add_odd_rows(of, work, tile, block, pitch);
}
