// The micro-kernel: MR rows times NR columns of a matrix product, all of whose sums stay in registers.

#pragma once

#include "vector.h"

typedef real operand;
#define DEPTH(dim) (dim)                        // terms of a score

static void begin_products(void) {}
static void end_products(void) {}

// SVE loads a number into all lanes from an address in a register, plus 252 bytes at most.  If a number is further off,
// compilers rather load it into one lane and copy it from there, by the units that compute.
INLINE const real* at_hand(const real* address, long offset) {
#if __ARM_FEATURE_SVE_BITS
    if (offset * sizeof(real) > 252)
        __asm__("" : "+r"(address));
#endif
    (void)offset;
    return address;
}

// c[i][j] = (add ? c[i][j] : 0) + sum over p < count of a[i * row + p * step] * b[p * NR + j], for i < MR and
// j < vectors * LANES, of which there are one or two.  b and c are aligned to a vector.  row and step are constants
// wherever this is called.  What is in c is added last, so that a long sum is one of short ones and rounds less.
INLINE void product_of(int vectors, int add, const real* a, long row, long step, const real* b, long count, real* c,
                       long pitch) {
    vec sum[MR][2];
    UNROLLED for (int i = 0; i < MR; i++) for (int n = 0; n < vectors; n++) sum[i][n] = (vec){0};
    for (long p = 0; p < count; p++) {
        vec column[2];
        UNROLLED for (int n = 0; n < vectors; n++) column[n] = load(b + n * LANES);
        UNROLLED for (int i = 0; i < MR; i++) {
            const real factor = *at_hand(a + i * row, i * row);
            UNROLLED for (int n = 0; n < vectors; n++) sum[i][n] += factor * column[n];
        }
        a += step;
        b += NR;
    }
    UNROLLED for (int i = 0; i < MR; i++) for (int n = 0; n < vectors; n++)
        store(c + i * pitch + n * LANES, add ? load(c + i * pitch + n * LANES) + sum[i][n] : sum[i][n]);
}

INLINE void product(int add, const real* a, long row, long step, const real* b, long count, real* c, long pitch) {
    product_of(2, add, a, row, step, b, count, c, pitch);
}
