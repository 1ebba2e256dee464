// Which weights are dropped, and what the others are multiplied by: Philox 4x32-10 (Salmon et al., SC11) of the
// positions of rows and keys, as mpiattn/backends/block.py has it.
//
// A call of Philox makes words for four keys whose positions differ in the last two bits.  Columns are added one after
// another; those that share a call are neighbours, and it is made once for each row.

#pragma once

#include "columns.h"

#define MOST_COLUMNS 384  // of a row at a time
#define CALLS (VBYTES / 4)  // of Philox at a time, one a lane
#define QUARTERS (VBYTES / 16)  // of a vector

typedef uint32_t words __attribute__((vector_size(VBYTES)));
typedef uint64_t long_words __attribute__((vector_size(VBYTES)));

struct dropped {
    long start, stop;  // columns [start, stop) of a block
    long calls;
    uint32_t last;  // counter
    int in_order;  // whether the words of the columns lie one after another
    uint32_t counter[MOST_COLUMNS + CALLS];  // of the calls, each where `lane_of` has it
    int32_t word[MOST_COLUMNS + LANES];  // of each column
};

// Where a call is among CALLS: those of one word that lie side by side are then of calls one after another.
INLINE long lane_of(long call) { return call / CALLS * CALLS + call % QUARTERS * 4 + call % CALLS / QUARTERS; }

INLINE void begin_dropped(struct dropped* dropped, long start) {
    dropped->start = dropped->stop = start, dropped->calls = dropped->last = 0, dropped->in_order = 1;
}

// Adds `count` columns: those of the keys from `first` on, or those listed.
static void add_dropped(const struct launch* of, const int32_t* key, long first, long count, struct dropped* dropped) {
    const long before = dropped->stop - dropped->start;
    long calls = dropped->calls;
    uint32_t last = dropped->last;
    int in_order = dropped->in_order;
    for (long n = before; n < before + count; n++) {
        const uint32_t position = of->dropout.keys[key ? key[n - before] : first + n - before];
        if (!calls || last != position / 4) {
            last = position / 4;
            dropped->counter[lane_of(calls++)] = last;
        }
        dropped->word[n] = 4 * (calls - 1) + position % 4;
        in_order &= dropped->word[n] == dropped->word[0] + n;
    }
    dropped->calls = calls, dropped->last = last, dropped->in_order = in_order, dropped->stop += count;
}

// The columns of a tile whose first is key `first`, or that number of the columns in work, from `start` to `stop`;
// those behind the last key have any words.
static void begin_dropped_columns(const struct launch* of, const struct rows* rows, long first, long start, long stop,
                                  struct dropped* dropped) {
    const long all = rows->columns ? rows->columns->count : of->keys;
    begin_dropped(dropped, start);
    add_dropped(of, rows->columns ? rows->columns->key + first + start : 0, first + start,
                min(stop, all - first) - start, dropped);
}

#define LOW_HALVES 0xa0  // of each product, in both of its words
#define HIGH_HALVES 0xf5

// The products of a vector's words with a number: their high halves, and in `low` the low ones.
INLINE words product_words(words x, uint32_t factor, words* low) {
#if defined(__AVX512F__)
    const __m512i by = _mm512_set1_epi32(factor), even = _mm512_mul_epu32((__m512i)x, by);
    const __m512i odd = _mm512_mul_epu32(_mm512_shuffle_epi32((__m512i)x, (_MM_PERM_ENUM)HIGH_HALVES), by);
    *low = (words)_mm512_mask_shuffle_epi32(even, 0xaaaa, odd, (_MM_PERM_ENUM)LOW_HALVES);
    return (words)_mm512_mask_shuffle_epi32(odd, 0x5555, even, (_MM_PERM_ENUM)HIGH_HALVES);
#elif defined(__AVX2__)
    const __m256i by = _mm256_set1_epi32(factor), even = _mm256_mul_epu32((__m256i)x, by);
    const __m256i odd = _mm256_mul_epu32(_mm256_shuffle_epi32((__m256i)x, HIGH_HALVES), by);
    *low = (words)_mm256_blend_epi32(even, _mm256_shuffle_epi32(odd, LOW_HALVES), 0xaa);
    return (words)_mm256_blend_epi32(_mm256_shuffle_epi32(even, HIGH_HALVES), odd, 0xaa);
#else
    const long_words even = ((long_words)x & 0xffffffff) * factor, odd = ((long_words)x >> 32) * factor;
    *low = (words)((even & 0xffffffff) | odd << 32);
    return (words)(even >> 32 | (odd & ~(uint64_t)0xffffffff));
#endif
}

// The words of CALLS calls, those of one after another, from vectors of each call's first word, second and so on.
INLINE void interleave_words(const words* c, uint32_t* to) {
#if defined(__AVX512F__)
#define INTERLEAVE(bits, half, x, y) (words) _mm512_unpack##half##_epi##bits((__m512i)(x), (__m512i)(y))
#elif defined(__AVX2__)
#define INTERLEAVE(bits, half, x, y) (words) _mm256_unpack##half##_epi##bits((__m256i)(x), (__m256i)(y))
#endif
#ifdef INTERLEAVE
    const words low = INTERLEAVE(32, lo, c[0], c[1]), low2 = INTERLEAVE(32, lo, c[2], c[3]);
    const words high = INTERLEAVE(32, hi, c[0], c[1]), high2 = INTERLEAVE(32, hi, c[2], c[3]);
    const words made[4] = {INTERLEAVE(64, lo, low, low2), INTERLEAVE(64, hi, low, low2),
                           INTERLEAVE(64, lo, high, high2), INTERLEAVE(64, hi, high, high2)};
    memcpy(to, made, sizeof made);
#else
    uint32_t each[4][CALLS];
    memcpy(each, c, sizeof each);
    for (int call = 0; call < CALLS; call++)
        for (int i = 0; i < 4; i++)
            to[4 * call + i] = each[i][lane_of(call)];
#endif
}

// The words of CALLS calls, those of one after another: 4 * CALLS.
INLINE void philox(const uint32_t* counter, uint32_t row, uint32_t head, uint64_t seed, uint32_t* to) {
    const words zero = {0};
    words c[4] = {zero, zero + row, zero + head, zero};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    memcpy(&c[0], counter, sizeof c[0]);
    for (int round = 0; round < 10; round++) {
        words low, low2;
        const words high = product_words(c[0], 0xD2511F53u, &low), high2 = product_words(c[2], 0xCD9E8D57u, &low2);
        c[0] = high2 ^ c[1] ^ key[0], c[1] = low2, c[2] = high ^ c[3] ^ key[1], c[3] = low;
        key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
    }
    interleave_words(c, to);
}

// What the weights of row i of a tile are multiplied by, from column `start` on, in whole NR.
static void find_factors(const struct launch* of, const struct rows* rows, long i, const struct dropped* dropped,
                         real* factor) {
    uint32_t made[4 * (MOST_COLUMNS + CALLS) + LANES] __attribute__((aligned(VBYTES)));
    const uint32_t threshold = of->dropout.threshold;
    const real kept = 1 - threshold / 4294967296.0, inverse = 1 / kept;
    const uint32_t row = of->dropout.rows[rows->place[i].token], head = of->dropout.heads[rows->place[i].head];
    const long count = dropped->stop - dropped->start, whole = rounded_up(count, NR);
    for (long call = 0; call < dropped->calls; call += CALLS)
        philox(dropped->counter + call, row, head, of->dropout.seed, made + 4 * call);
#if REAL_BYTES == 4
    typedef uint32_t loose_words __attribute__((vector_size(VBYTES), aligned(4), may_alias));
    for (long j = 0; j < whole && dropped->in_order; j += LANES) {
        const words each = *(const loose_words*)(made + dropped->word[0] + j);
        store(factor + j, (vec)((ivec)(each >= threshold) & (ivec)splat(inverse)));
    }
    if (dropped->in_order)
        return;
#endif
    for (long j = 0; j < count; j++)
        factor[j] = made[dropped->word[j]] < threshold ? 0 : inverse;
    for (long j = count; j < whole; j++)
        factor[j] = 0;
}

// Multiplies the weights of row i of a tile; weight: of the columns from 0 on.
INLINE void drop(const struct launch* of, const struct rows* rows, long i, const struct dropped* dropped,
                 real* weight) {
    real factor[MOST_COLUMNS] __attribute__((aligned(64)));
    find_factors(of, rows, i, dropped, factor);
    for (long j = 0; j < dropped->stop - dropped->start; j += LANES)
        store(weight + dropped->start + j, load(weight + dropped->start + j) * load(factor + j));
}
