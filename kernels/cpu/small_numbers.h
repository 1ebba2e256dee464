// Whether the processor takes subnormal numbers for 0.  Each of them costs a product about a hundred times as long as
// others.  A bias that falls with the distance gives every row many weights between the smallest normal number and 0.

#pragma once

#include "launch.h"

#if defined(__x86_64__)
#define SMALL_AS_ZERO 0x8040  // of results and of operands
INLINE uint64_t mode_now(void) { return __builtin_ia32_stmxcsr(); }
INLINE void set_mode(uint64_t mode) { __builtin_ia32_ldmxcsr((unsigned)mode); }
#elif defined(__aarch64__)
#define SMALL_AS_ZERO (1 << 24)
INLINE uint64_t mode_now(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
INLINE void set_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
#define SMALL_AS_ZERO 0
INLINE uint64_t mode_now(void) { return 0; }
INLINE void set_mode(uint64_t mode) { (void)mode; }
#endif

// In launches with a bias; all others have the same results as ever.  Returns the mode before.
INLINE uint64_t drop_small_numbers(const struct launch* of) {
    const uint64_t before = mode_now();
    if (of->bias.data)
        set_mode(before | SMALL_AS_ZERO);
    return before;
}

// For the caller's own work; returns the mode before.
INLINE uint64_t count_small_numbers(void) {
    const uint64_t before = mode_now();
    set_mode(before & ~(uint64_t)SMALL_AS_ZERO);
    return before;
}
