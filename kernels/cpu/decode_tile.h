// A tile of rows of decoding with a block of keys: scores, softmax, sums of values.

#pragma once

#include "scratch.h"
#include "stream.h"

#define DECODE_ROWS 64                                  // share what is read

struct decode_tile {
    long first, count;                                  // of the rows of the KV head
    int width;                                          // count, or a few more
    long from[LANES], to[LANES];                        // a row sees; beyond `count` as the last one
    long lowest, highest, full_from, full_to;           // any row sees, and every row sees
    real *q, *acc;
    vec top, total;                                     // lane: row lane % width
};

struct decode_work {                                    // of a thread
    struct decode_tile* tile;
    struct block *block, *next, *finite;
    real *q, *acc, *score, *row;
    char* zeros;
};

static int64_t decode_work(const struct launch* of, char* scratch, struct decode_work* work) {
    char* at = scratch;
    const long width = rounded_up(of->head_dim, LANES), value_width = rounded_up(of->value_dim, LANES);
    work->tile = take(&at, DECODE_ROWS * sizeof *work->tile);
    work->block = take(&at, sizeof(struct block));
    work->next = take(&at, sizeof(struct block));
    work->finite = take(&at, sizeof(struct block));
    work->q = take(&at, 2 * DECODE_ROWS * width * sizeof(real));
    work->acc = take(&at, 2 * DECODE_ROWS * value_width * sizeof(real));
    work->score = take(&at, BLOCK_KEYS * LANES * sizeof(real));
    work->row = take(&at, most(width, value_width) * sizeof(real));
    work->zeros = take(&at, most(width, value_width) * sizeof(double));
    return at - scratch;
}

// The address of a sequence's row in an array.
INLINE char* decode_row(const struct launch* of, const struct array* array, long s, int kv_head, long row) {
    const long per_kv = of->heads / of->kv_heads, token = s * (of->tokens / of->sequences) + row / per_kv;
    return array->data + token * array->token + (kv_head * per_kv + row % per_kv) * array->head;
}

// Keys of a block: half as many as BLOCK_KEYS where rows are long.
INLINE long block_keys(const struct launch* of) {
    const long bytes = (of->head_dim + of->value_dim) * element_bytes[of->element];
    return BLOCK_KEYS * bytes > BLOCK_BYTES ? BLOCK_KEYS / 2 : BLOCK_KEYS;
}

// The keys [first, stop) of a sequence, as many of them as a block has.
static void locate(const struct launch* of, const struct decode_work* work, long s, int kv_head, long first, long stop,
                   struct block* block) {
    const int32_t* page = of->pages + of->tables[s] + first / of->page_size;
    const char *keys = of->k.data + kv_head * of->k.head, *values = of->v.data + kv_head * of->v.head;
    long at = first % of->page_size;
    block->first = first, block->count = least(stop - first, block_keys(of));
    for (long j = 0; j < block->count; j++, at++) {
        if (at == of->page_size)
            at = 0, page++;
        const long slot = (long)*page * of->page_size + at;
        block->key[j] = keys + slot * of->k.token, block->value[j] = values + slot * of->v.token;
    }
    for (long j = block->count; j < BLOCK_KEYS; j++)
        block->key[j] = block->value[j] = work->zeros;
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
        const long row = tile->first + least(i, tile->count - 1),
                   token = s * queries + row / (of->heads / of->kv_heads);
        const long from = most(of->begin[token], start), to = least(of->end[token], stop);
        tile->from[i] = from < to ? from : start, tile->to[i] = from < to ? to : start;
        if (from < to)
            tile->lowest = least(tile->lowest, from), tile->highest = most(tile->highest, to);
        tile->full_from = most(tile->full_from, tile->from[i]), tile->full_to = least(tile->full_to, tile->to[i]);
        if (i >= tile->count)
            continue;
        read_row(of->element, decode_row(of, &of->q, s, kv_head, row), work->row, dim, of->scale);
        for (long c = 0; c < dim / LANES * LANES; c += LANES)
            store(tile->q + c * tile->width + i * LANES, load(work->row + c));
        for (long c = dim / LANES * LANES; c < dim; c++) {
            const long at = streamed(c, dim);
            tile->q[(at / LANES * tile->width + i) * LANES + at % LANES] = work->row[c];
        }
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
        *tile = (struct decode_tile){.first = first, .count = least(stop - first, width), .width = width};
        tile->q = q, tile->acc = acc;
        q += vectors_of(of->head_dim) * LANES * width, acc += vectors_of(of->value_dim) * LANES * width;
        first += width;
        begin_tile(of, work, s, kv_head, start_key, stop_key, tile);
    }
    return tiles;
}

// The sum, or the largest, of the lanes of each row, in all lanes of the row.
static vec over_row(int largest, int width, vec x) {
    real lane[LANES];
    memcpy(lane, &x, sizeof x);
    for (int half = LANES / 2; half >= width; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] = !largest ? lane[i] + lane[i + half] : lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    for (int i = width; i < LANES; i++)
        lane[i] = lane[i - width];
    memcpy(&x, lane, sizeof x);
    return x;
}

// Turns a tile's scores of a block into weights relative to the largest so far, and those of pairs that are not seen
// into 0.  decay: by how much earlier weights have shrunk.
static void decode_weigh(const struct launch* of, struct decode_tile* tile, const struct block* block, int masked,
                         real* score, real* decay) {
    const int width = tile->width, keys = LANES / width;
    const long stop = rounded_up(block->count, keys) * width;
    if (of->softcap)
        bend(of->softcap, 1, 0, stop, score);
    if (masked) {
        ivec key, from, to;
        for (int l = 0; l < LANES; l++) {
            key[l] = l / width;
            from[l] = most(tile->from[l % width] - block->first, 0);
            to[l] = least(tile->to[l % width] - block->first, block->count);
        }
        for (long j = 0; j < stop; j += LANES, key += keys)
            store(score + j, choose((key >= from) & (key < to), load(score + j), splat(-INFINITY)));
    }
    vec high = splat(-INFINITY);
    for (long j = 0; j < stop; j += LANES)
        high = larger(load(score + j), high);
    const vec top = larger(over_row(1, width, high), tile->top);
    const vec base = choose(top == -INFINITY, splat(0), top);
    const vec shrunk = exponential(tile->top - base);
    vec sum = splat(0);
    for (long j = 0; j < stop; j += LANES) {
        const vec weight = exponential(load(score + j) - base);
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
    for (long j = 0; j < block->count; j++) {
        const long key = block->first + j;
        if (tile->full_from <= key && key < tile->full_to)
            continue;
        read_row(of->element, block->value[j], work->row, of->value_dim, 1);
        if (!finite_row(work->row, of->value_dim))
            work->finite->value[j] = work->zeros, any = 1;
    }
    return any;
}

// Adds what was left out to the rows that see it.
static void add_odd_rows(const struct launch* of, const struct decode_work* work, const struct decode_tile* tile,
                         const struct block* block, long pitch) {
    const long dim = of->value_dim;
    for (long j = 0; j < block->count; j++) {
        if (work->finite->value[j] == block->value[j])
            continue;
        read_row(of->element, block->value[j], work->row, dim, 1);
        for (long i = 0; i < tile->count; i++)
            if (tile->from[i] <= block->first + j && block->first + j < tile->to[i])
                for (long c = 0; c < dim; c++)
                    tile->acc[i * pitch + streamed(c, dim)] += work->score[j * tile->width + i] * work->row[c];
    }
}

#if REAL_BYTES == 8
#define FOR_ELEMENT(call, ...) call(FLOAT64, __VA_ARGS__)
#else
#define FOR_ELEMENT(call, ...)       \
    if (of->element == FLOAT32)      \
        call(FLOAT32, __VA_ARGS__);  \
    else if (of->element == FLOAT16) \
        call(FLOAT16, __VA_ARGS__);  \
    else                             \
        call(BFLOAT16, __VA_ARGS__)
#endif

// The same for each element and width of a tile, each compiled by itself.
#define SPECIALIZED(call, ...)                               \
    do {                                                     \
        if (tile->width == 1) {                              \
            FOR_ELEMENT(call, 1, __VA_ARGS__);               \
        } else if (tile->width == 2) {                       \
            FOR_ELEMENT(call, 2, __VA_ARGS__);               \
        } else if (LANES >= 4 && tile->width == 4) {         \
            FOR_ELEMENT(call, least_lanes(4), __VA_ARGS__);  \
        } else if (LANES >= 8 && tile->width == 8) {         \
            FOR_ELEMENT(call, least_lanes(8), __VA_ARGS__);  \
        } else if (LANES >= 16) {                            \
            FOR_ELEMENT(call, least_lanes(16), __VA_ARGS__); \
        }                                                    \
    } while (0)
#define least_lanes(width) (LANES < (width) ? LANES : (width))

// A tile with the block in work.  next: the block to prefetch, or NULL.
static void decode_block(const struct launch* of, const struct decode_work* work, struct decode_tile* tile,
                         const struct block* next) {
    const struct block* block = work->block;
    const long pitch = vectors_of(of->value_dim) * LANES, last = block->first + block->count;
    const int masked = tile->full_from > block->first || tile->full_to < last || block->count * tile->width % LANES;
    real decay[LANES];
    SPECIALIZED(stream_scores, of->head_dim, tile->q, block, work->score);
    decode_weigh(of, tile, block, masked, work->score, decay);
    const int odd = masked && leave_out_odd(of, work, tile, block);
    SPECIALIZED(stream_values, of->value_dim, odd ? work->finite : block, next,
                of->head_dim * element_bytes[of->element], work->score, decay, tile->acc, pitch);
    if (odd)
        add_odd_rows(of, work, tile, block, pitch);
}
