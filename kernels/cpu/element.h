// Numbers of the inputs as real ones.

#pragma once

#include "launch.h"
#include "vector.h"

static const int element_bytes[] = {4, 8, 2, 2};

// A float16's value by integer operations alone, so that a loop over it becomes vectors on any processor: exponent and
// mantissa are shifted to where float32 has them, where the value is 2^112 times too small.
INLINE float from_float16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    union {
        uint32_t bits;
        float value;
    } wide = {rest << 13};
    wide.value *= 0x1p112f;
    wide.bits |= sign | (rest >= 0x7c00 ? 0x7f800000 : 0);
    return wide.value;
}

INLINE float from_bfloat16(uint16_t half) {
    union {
        uint32_t bits;
        float value;
    } wide = {(uint32_t)half << 16};
    return wide.value;
}

// to[i] = from[i] * factor for the n numbers of a row.
static void read_row(int element, const char* from, real* restrict to, int n, real factor) {
    if (element == FLOAT16)
        for (int i = 0; i < n; i++)
            to[i] = from_float16(((const uint16_t*)from)[i]) * factor;
    else if (element == BFLOAT16)
        for (int i = 0; i < n; i++)
            to[i] = from_bfloat16(((const uint16_t*)from)[i]) * factor;
    else
        for (int i = 0; i < n; i++)
            to[i] = ((const real*)from)[i] * factor;
}
