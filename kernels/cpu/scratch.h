// Scratch memory of a launch, and the list of what packed copies leave out.

#pragma once

#include "rows.h"

struct odd {
    long count;
    int32_t* row;
};

// Scratch memory is taken from its start on, in whole cache lines.
INLINE void* take(char** scratch, int64_t bytes) {
    char* at = *scratch;
    *scratch += rounded_up(bytes, 64);
    return at;
}
