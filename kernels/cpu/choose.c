// The kernels by name of the instruction set, and which of them this processor has.

#ifdef WITH_avx2
#include <cpuid.h>
#endif
#ifdef WITH_amx
#include <sys/syscall.h>
#include <unistd.h>
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18
#endif
#if defined(WITH_sve256) || defined(WITH_sve512)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

#include "launch.h"

#define MIN_ROWS 6  // of a KV head that is decoded on AMX tiles

#define DECLARE(set) extern const struct kernels set##_float, set##_double;
#define ENTRY(set, has) {#set, {&set##_float, &set##_double, &set##_float, &set##_float}, has},
#define ENTRY_OF_PAIRS(set, has) {#set, {&avx512_float, &avx512_double, &avx512_float, &set##_pairs}, has},

DECLARE(plain)
#ifdef WITH_avx2
DECLARE(avx2)
#endif
#ifdef WITH_avx512
DECLARE(avx512)
#endif
#ifdef WITH_avx512bf16
extern const struct kernels avx512bf16_pairs;
#endif
#ifdef WITH_amx
extern const struct kernels amx_pairs;
#endif
#ifdef WITH_sve256
DECLARE(sve256)
#endif
#ifdef WITH_sve512
DECLARE(sve512)
#endif

static int always(void) { return 1; }
#ifdef WITH_avx2
static int has_avx2(void) {
    unsigned a, b, c = 0, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           c & bit_F16C;
}
#endif
#ifdef WITH_avx512
static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}
#endif
#ifdef WITH_avx512bf16
static int has_avx512bf16(void) {
    unsigned a, b, c, d;
    return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1;
}
#endif
#ifdef WITH_amx
// Linux lets a process use tiles after it has asked for them.
static int has_amx(void) {
    unsigned a, b, c, d;
    return has_avx512bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1 && d >> 24 & 1 &&
           !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}
#endif
#if defined(WITH_sve256) || defined(WITH_sve512)
// Whether SVE's registers have so many bits, which may be fewer than the processor can have.
static int has_sve(int bits) {
    return getauxval(AT_HWCAP) & HWCAP_SVE && (prctl(PR_SVE_GET_VL) & PR_SVE_VL_LEN_MASK) == bits / 8;
}
#endif
#ifdef WITH_sve256
static int has_sve256(void) { return has_sve(256); }
#endif
#ifdef WITH_sve512
static int has_sve512(void) { return has_sve(512); }
#endif

static const struct {
    const char* name;
    const struct kernels* of[4];                        // by element
    int (*has)(void);
} sets[] = {
#ifdef WITH_amx
    ENTRY_OF_PAIRS(amx, has_amx)
#endif
#ifdef WITH_avx512bf16
        ENTRY_OF_PAIRS(avx512bf16, has_avx512bf16)
#endif
#ifdef WITH_avx512
            ENTRY(avx512, has_avx512)
#endif
#ifdef WITH_avx2
                ENTRY(avx2, has_avx2)
#endif
#ifdef WITH_sve512
                    ENTRY(sve512, has_sve512)
#endif
#ifdef WITH_sve256
                        ENTRY(sve256, has_sve256)
#endif
                            ENTRY(plain, always)};

// Of the sources that this was compiled from: setup.py and library.py make it alike.
const char* mpiattn_sources_digest(void) { return DIGEST; }

// Of a launch, of which library.py has another description.
int64_t mpiattn_launch_bytes(void) { return sizeof(struct launch); }

// The name of the set with a number; NULL beyond the last.
const char* mpiattn_instruction_set(int number) {
    return number < 0 || number >= (int)(sizeof sets / sizeof *sets) ? 0 : sets[number].name;
}

// Whether this processor has the set with that number.
int mpiattn_supported(int number) { return sets[number].has(); }

// VDPBF16PS computes half of what products of float32 do on Intel's processors.
static int slow(int number) {
#ifdef WITH_avx512bf16
    return sets[number].has == has_avx512bf16 && __builtin_cpu_is("intel");
#else
    (void)number;
    return 0;
#endif
}

// The number of the set to take.
int mpiattn_best_set(void) {
    int number = 0;
    while (!mpiattn_supported(number) || slow(number))
        number++;
    return number;
}

// Whether a tile would be nearly empty.  Products of so few rows take little of the time, and float32 computes them
// sooner.
static int has_few_rows(const struct kernels* kernels, const struct launch* of, enum operation operation) {
#ifdef WITH_amx
    return kernels == &amx_pairs && operation == DECODE &&
           of->tokens * of->heads < (int64_t)MIN_ROWS * of->sequences * of->kv_heads;
#else
    (void)kernels, (void)of, (void)operation;
    return 0;
#endif
}

// Products of pairs are there for some operations alone.
static const struct kernels* kernels_of(int number, const struct launch* of, enum operation operation) {
    const struct kernels* kernels = sets[number].of[of->element];
    const int pairs = kernels->of[operation].run && !has_few_rows(kernels, of, operation);
    return pairs ? kernels : sets[number].of[FLOAT32];
}

// Bytes of scratch memory of a launch, and the launch, on the set with that number.
int64_t mpiattn_scratch_bytes(int number, const struct launch* of, enum operation operation) {
    return kernels_of(number, of, operation)->of[operation].bytes(of);
}

int32_t mpiattn_run(int number, const struct launch* of, enum operation operation) {
    return kernels_of(number, of, operation)->of[operation].run(of);
}
