// The micro-kernel of products of bfloat16 numbers with float32 sums: MR rows times NR columns, on AMX tiles or by
// VDPBF16PS.  Both take pairs of terms: a row of b is NR columns of two terms each, [pair][NR][2].

#pragma once

#include "vector.h"

typedef uint16_t operand;
#define DEPTH(dim) rounded_up(dim, 32)          // terms of a score; those beyond dim are zeros

#ifdef __AMX_BF16__
// Tiles 0 to 3 hold the sums of 32 rows and 32 columns, 4 and 5 the rows, 6 and 7 the columns.  Between these two calls
// the thread's tiles are 16 rows of 64 bytes.
static void begin_products(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int tile = 0; tile < 8; tile++)
        shape.bytes[tile] = 64, shape.rows[tile] = 16;
    _tile_loadconfig(&shape);
}

static void end_products(void) { _tile_release(); }

// c[i][j] = (add ? c[i][j] : 0) + sum over p < count of a[i * row + p] * b[(p / 2 * NR + j) * 2 + p % 2], for i < MR
// and j < NR.  count is a multiple of 32; step is 1.
INLINE void product(int add, const operand* a, long row, long step, const operand* b, long count, real* c, long pitch) {
    (void)step;
    __asm__ volatile("" ::: "memory");  // compilers do not know that loading a tile reads memory
    if (add) {
        _tile_loadd(0, c, pitch * 4);
        _tile_loadd(1, c + 16, pitch * 4);
        _tile_loadd(2, c + 16 * pitch, pitch * 4);
        _tile_loadd(3, c + 16 * pitch + 16, pitch * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long p = 0; p < count; p += 32) {
        _tile_loadd(4, a + p, row * 2);
        _tile_loadd(6, b + p * NR, NR * 4);
        _tile_loadd(7, b + p * NR + 32, NR * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, a + 16 * row + p, row * 2);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, pitch * 4);
    _tile_stored(1, c + 16, pitch * 4);
    _tile_stored(2, c + 16 * pitch, pitch * 4);
    _tile_stored(3, c + 16 * pitch + 16, pitch * 4);
    __asm__ volatile("" ::: "memory");
}

#else
static void begin_products(void) {}
static void end_products(void) {}

#define FEW 8  // rows whose sums stay in registers

INLINE void product(int add, const operand* a, long row, long step, const operand* b, long count, real* c, long pitch) {
    (void)step;
    for (int first = 0; first < MR; first += FEW, a += FEW * row, c += FEW * pitch) {
        __m512 sum[FEW][2];
        UNROLLED for (int i = 0; i < FEW; i++) for (int n = 0; n < 2; n++) sum[i][n] = (__m512){0};
        for (long p = 0; p < count; p += 2) {
            const __m512bh left = (__m512bh)_mm512_loadu_si512(b + p * NR);
            const __m512bh right = (__m512bh)_mm512_loadu_si512(b + p * NR + 32);
            UNROLLED for (int i = 0; i < FEW; i++) {
                int32_t pair;
                memcpy(&pair, a + i * row + p, sizeof pair);
                const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
                sum[i][0] = _mm512_dpbf16_ps(sum[i][0], both, left);
                sum[i][1] = _mm512_dpbf16_ps(sum[i][1], both, right);
            }
        }
        UNROLLED for (int i = 0; i < FEW; i++) for (int n = 0; n < 2; n++) {
            real* to = c + i * pitch + n * LANES;
            store(to, add ? load(to) + (vec)sum[i][n] : (vec)sum[i][n]);
        }
    }
}
#endif
