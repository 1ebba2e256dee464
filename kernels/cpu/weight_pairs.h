// From scores to weights that bfloat16 will hold.

#pragma once

#include "vector.h"

INLINE vec scaled(vec score, real scale) { return rounded_now(score * scale); }

// e^x, off by 2e-7 of it at most where x is small; NaN for NaN.
INLINE vec weight_of(vec x) {
    const vec y = x * 1.44269504088896341f;
    const vec f = (vec)_mm512_reduce_ps((__m512)y, 0x09);           // y less the integer below it; 0 for -inf
    vec p = f * 1.86713017e-03f + 9.01702978e-03f;
    p = p * f + 5.57999127e-02f;
    p = p * f + 2.40164444e-01f;
    p = p * f + 6.93151295e-01f;
    p = p * f + 1.0f;
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)y);             // times 2 to the integer below y
}
