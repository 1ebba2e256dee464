// An order of tokens that see several intervals each, in which those that see much the same keys are neighbours.
//
// The tokens of a grid lie row after row, and those that see the same rows of keys lie a period apart.  The period is
// looked for in the intervals themselves: one interval of a token is seen by those near it, then by none, and a period
// later by others again.  Tiles of rows are then patches of the grid, as wide as makes the keys few that they see.

#pragma once

#include "rows.h"

#define LONGEST 4096  // period
#define SAMPLES 16    // tokens, of which the last that sees most keys stands for all
#define PACKING 25    // pairs of a row and a key are computed in the time in which a key is packed
#ifdef __AVX512BF16__
#define STEP NR  // columns that a product begins and ends with
#else
#define STEP LANES
#endif

// Patches of `height` periods and of `width` tokens in each; they follow each other along the period.  The last ones
// are smaller, and tokens after the last whole period have patches of their own.
struct order {
    long heads, parts;  // of a KV head's query heads those of a tile; tiles that share a patch
    long period, periods, width, height;
    long strips, bands, rest;  // patches along a period, and across; those of the tokens after the last period
    double along, across;  // keys that a token sees: of each of some rows, and the rows
};

struct patch {
    long first, width, count, period;  // of tokens: of a period `width`, beginning with `first`
};

// The tiles of a KV head's rows.
INLINE long tiles_of(const struct order* order) { return (order->strips * order->bands + order->rest) * order->parts; }

INLINE struct patch patch_of(const struct launch* of, const struct order* order, long number) {
    const long size = order->width * order->height, along = number % order->strips * order->width;
    const long across = number / order->strips * order->height;
    if (number >= order->strips * order->bands) {
        const long first = order->period * order->periods + (number - order->strips * order->bands) * size;
        const long count = min(of->tokens - first, size);
        return (struct patch){first, count, count, count};
    }
    const long width = min(order->width, order->period - along), high = min(order->height, order->periods - across);
    return (struct patch){across * order->period + along, width, width * high, order->period};
}

// The keys [*from, *to) of an interval of a token.
INLINE void interval_of(const struct launch* of, long group, long token, long list, long* from, long* to) {
    const long at = (group * of->tokens + token) * of->lists + list;
    *from = max(of->begin[at], 0), *to = min(of->end[at], of->keys);
}

// How many of the keys [from, to) a token sees, in the first group.
static long count_shared(const struct launch* of, long token, long from, long to) {
    const int32_t *begin = of->begin + token * of->lists, *end = of->end + token * of->lists;
    long shared = 0;
    for (long list = 0; list < of->lists; list++)
        shared += max(min(end[list], to) - max(begin[list], from), 0);
    return shared;
}

// How many of the keys of a token another one sees.
static double count_both(const struct launch* of, long token, long other) {
    long both = 0, from, to;
    for (long list = 0; list < of->lists; list++) {
        interval_of(of, 0, token, list, &from, &to);
        both += count_shared(of, other, from, to);
    }
    return both;
}

// The token that stands for all.
static long find_sample(const struct launch* of) {
    double most = -1;
    long token = 0;
    for (long sample = 0; sample < SAMPLES; sample++) {
        const long each = (2 * sample + 1) * of->tokens / (4 * SAMPLES + 1);  // of the first half, in any column
        const double keys = count_both(of, each, each);
        if (keys >= most)
            most = keys, token = each;
    }
    return token;
}

// The period after which tokens see the keys of one of them again; 0 if there is none.
static long find_period(const struct launch* of, long token) {
    long from, to, lists[2] = {of->lists, -1};  // the first and the last one in which it sees some
    for (long list = 0; list < of->lists; list++) {
        interval_of(of, 0, token, list, &from, &to);
        if (from < to)
            lists[0] = min(lists[0], list), lists[1] = list;
    }
    if (lists[1] < 0)
        return 0;
    interval_of(of, 0, token, (lists[0] + lists[1]) / 2, &from, &to);
    const long count = min(of->tokens - token, LONGEST);
    long near = 1, best = 0, most = (to - from) / 2;
    while (near < count && 2 * count_shared(of, token + near, from, to) > to - from)
        near++;
    for (long i = near; i < count; i++) {
        const long shared = count_shared(of, token + i, from, to);
        if (shared > most)
            best = i, most = shared;
    }
    return best;
}

// The keys that a patch sees of which a token sees `along` keys of each of `across` rows.
static double keys_seen(double width, double height, double along, double across) {
    return (along + width - 1) * (across + height - 1);
}

// The order of a launch's tokens in which tiles of so many rows see fewest keys.
static struct order find_order(const struct launch* of, long max_rows) {
    const long queries = of->heads / of->kv_heads, heads = min(queries, max_rows), most = max_rows / heads;
    const long token = find_sample(of), period = find_period(of, token);
    const double panel = MR > heads ? (double)MR / heads : 1, all = count_both(of, token, token);
    struct order order = {.heads = heads, .parts = (queries + heads - 1) / heads};
    order.period = order.strips = of->tokens, order.periods = order.height = order.bands = 1, order.width = most;
    order.along = all, order.across = 1;
    if (period) {
        const double next = all - count_both(of, token, token + 1);
        const double later = all - count_both(of, token, token + period);
        const double along = all / (next > 1 ? next : 1), across = all / (later > 1 ? later : 1);
        double least = INFINITY;
        order.along = along, order.across = across;
        order.period = period, order.periods = of->tokens / period;
        for (long width = 1; width <= min(period, most); width++) {
            const long bands = (order.periods + most / width - 1) / (most / width);
            const long height = (order.periods + bands - 1) / bands;
            const double rows = width * height * heads, deep = panel / width;
            const double of_panel = deep <= 1 ? keys_seen(panel, 1, along + (width > panel ? STEP : 0), across)
                                              : keys_seen(width, deep > (long)deep ? deep + 0.5 : deep, along, across);
            const double of_tile = keys_seen(width, height, along, across);
            const double cost = (rounded_up(rows, MR) * of_panel + PACKING * of_tile) / rows;
            if (cost < least)
                least = cost, order.width = width, order.height = height, order.bands = bands;
        }
    }
    order.strips = (order.period + order.width - 1) / order.width;
    const long size = order.width * order.height;
    order.rest = (of->tokens - order.period * order.periods + size - 1) / size;
    return order;
}
