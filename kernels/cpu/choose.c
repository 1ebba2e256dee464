// The kernels by name of the instruction set, and which of them this processor has.

#include <string.h>

#include "launch.h"

#define BOTH(set) extern const struct kernels set##_float, set##_double;
#define ENTRY(set, has) {#set, {&set##_float, &set##_double}, has},

BOTH(plain)
#ifdef WITH_avx2
BOTH(avx2)
#endif
#ifdef WITH_avx512
BOTH(avx512)
#endif

static int always(void) { return 1; }
#ifdef WITH_avx2
static int has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif
#ifdef WITH_avx512
static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}
#endif

// The best first.
static const struct {
    const char* name;
    const struct kernels* of[2];
    int (*has)(void);
} sets[] = {
#ifdef WITH_avx512
    ENTRY(avx512, has_avx512)
#endif
#ifdef WITH_avx2
        ENTRY(avx2, has_avx2)
#endif
            ENTRY(plain, always)};

// Of the sources that this was compiled from: setup.py and library.py make it alike.
const char* sources_digest(void) { return DIGEST; }

// The name of the set with a number, best first; NULL beyond the last.
const char* instruction_set(int number) {
    return number < 0 || number >= (int)(sizeof sets / sizeof *sets) ? 0 : sets[number].name;
}

// Whether this processor has the set with that number.
int supported(int number) { return sets[number].has(); }

static const struct kernels* kernels_of(int number, const struct launch* of) {
    return sets[number].of[of->element == FLOAT64];
}

// Bytes of scratch memory of a launch, and the launch, on the set with that number.
int64_t scratch_bytes(int number, const struct launch* of, int is_backward) {
    const struct kernels* kernels = kernels_of(number, of);
    return is_backward ? kernels->backward_bytes(of) : kernels->forward_bytes(of);
}

int32_t run(int number, const struct launch* of, int is_backward) {
    const struct kernels* kernels = kernels_of(number, of);
    return is_backward ? kernels->backward(of) : kernels->forward(of);
}
