// Tokens copied into pages: the rows of a token's KV heads lie side by side where they come from, and as far apart as a
// pool is long where they go.

#include <stdint.h>
#include <string.h>

#define LINE 64
#define AHEAD_ROWS 4  // a row's lines of the pool are on their way while so many rows before it are copied

// Row `head` of token i, of `row` bytes, goes to slots[i].  Other strides are in bytes too.  tokens: NULL if all are 0.
void mpiattn_scatter(char* pool, int64_t pool_head, int64_t row, const int64_t* slots, const char* from,
                     int64_t from_entry, int64_t from_token, int64_t from_head, const int64_t* entries,
                     const int64_t* tokens, int64_t count, int64_t heads) {
    int64_t ahead = 0, ahead_head = 0;
    for (int64_t i = 0; i < count; i++) {
        const char* rows = from + entries[i] * from_entry + (tokens ? tokens[i] * from_token : 0);
        for (int64_t head = 0; head < heads; head++) {
            while (ahead < count && (ahead - i) * heads + ahead_head - head <= AHEAD_ROWS) {
                const char* to = pool + ahead_head * pool_head + slots[ahead] * row;
                for (int64_t at = 0; at < row; at += LINE)
                    __builtin_prefetch(to + at, 1);
                if (++ahead_head == heads)
                    ahead++, ahead_head = 0;
            }
            memcpy(pool + head * pool_head + slots[i] * row, rows + head * from_head, row);
        }
    }
}
