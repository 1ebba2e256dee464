// The kernels by name of the instruction set, and which of them this processor has.
//
// setup.py compiles the sets WITH_avx2 and so on.  All others of the architecture are named here too, so that it is
// known what the processor could do; setup.py itself asks that first, of this file alone.

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18
#endif
#elif defined(__aarch64__) && defined(__linux__)
#define HAS_SVE
#include <sys/auxv.h>
#include <sys/prctl.h>
#ifndef HWCAP_SVE
#define HWCAP_SVE (1 << 22)
#endif
#endif

#include "launch.h"

#define MIN_ROWS 6  // of a KV head that is decoded on AMX tiles

#define DECLARE(set) extern const struct kernels set##_float, set##_double;
#define TABLES(set) {&set##_float, &set##_double, &set##_float, &set##_float}
#define TABLES_OF_PAIRS(set) {&avx512_float, &avx512_double, &avx512_float, &set##_pairs}
#define NONE {0}

#ifdef WITH_plain
DECLARE(plain)
#define TABLES_plain TABLES(plain)
#else
#define TABLES_plain NONE
#endif
#ifdef WITH_avx2
DECLARE(avx2)
#define TABLES_avx2 TABLES(avx2)
#else
#define TABLES_avx2 NONE
#endif
#ifdef WITH_avx512
DECLARE(avx512)
#define TABLES_avx512 TABLES(avx512)
#else
#define TABLES_avx512 NONE
#endif
#ifdef WITH_avx512bf16
extern const struct kernels avx512bf16_pairs;
#define TABLES_avx512bf16 TABLES_OF_PAIRS(avx512bf16)
#else
#define TABLES_avx512bf16 NONE
#endif
#ifdef WITH_amx
extern const struct kernels amx_pairs;
#define TABLES_amx TABLES_OF_PAIRS(amx)
#else
#define TABLES_amx NONE
#endif
#ifdef WITH_sve256
DECLARE(sve256)
#define TABLES_sve256 TABLES(sve256)
#else
#define TABLES_sve256 NONE
#endif
#ifdef WITH_sve512
DECLARE(sve512)
#define TABLES_sve512 TABLES(sve512)
#else
#define TABLES_sve512 NONE
#endif

static int always(void) { return 1; }
#ifdef __x86_64__
static int has_avx2(void) {
    unsigned a, b, c = 0, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           c & bit_F16C;
}

static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}

static int has_avx512bf16(void) {
    unsigned a, b, c, d;
    return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1;
}
#endif
#if defined(__x86_64__) && defined(__linux__)
// Linux lets a process use tiles after it has asked for them.
static int has_amx(void) {
    unsigned a, b, c, d;
    return has_avx512bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1 && d >> 24 & 1 &&
           !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}
#endif
#ifdef HAS_SVE
// Whether SVE's registers have so many bits, which may be fewer than the processor can have.
static int has_sve(int bits) {
    return getauxval(AT_HWCAP) & HWCAP_SVE && (prctl(PR_SVE_GET_VL) & PR_SVE_VL_LEN_MASK) == bits / 8;
}

static int has_sve256(void) { return has_sve(256); }

static int has_sve512(void) { return has_sve(512); }
#endif

// The best first.
static const struct {
    const char* name;
    const struct kernels* of[4];                        // by element; NULL if the set was not compiled
    int (*has)(void);
} sets[] = {
#if defined(__x86_64__) && defined(__linux__)
    {"amx", TABLES_amx, has_amx},
#endif
#ifdef __x86_64__
    {"avx512bf16", TABLES_avx512bf16, has_avx512bf16},
    {"avx512", TABLES_avx512, has_avx512},
    {"avx2", TABLES_avx2, has_avx2},
#endif
#ifdef HAS_SVE
    {"sve512", TABLES_sve512, has_sve512},
    {"sve256", TABLES_sve256, has_sve256},
#endif
    {"plain", TABLES_plain, always},
};

// Of the sources that this was compiled from: setup.py and library.py make it alike.
const char* mpiattn_sources_digest(void) { return DIGEST; }

// Of a launch, of which library.py has another description.
int64_t mpiattn_launch_bytes(void) { return sizeof(struct launch); }

// The name of the set with a number; NULL beyond the last.
const char* mpiattn_instruction_set(int number) {
    return number < 0 || number >= (int)(sizeof sets / sizeof *sets) ? 0 : sets[number].name;
}

// Whether this library has the set with that number.
int mpiattn_compiled(int number) { return sets[number].of[FLOAT32] != 0; }

// Whether this processor has it.
int mpiattn_supported(int number) { return sets[number].has(); }

// Whether a set after it, which this processor has too, is faster.  VDPBF16PS computes half of what products of
// float32 do on Intel's processors.
int mpiattn_slow(int number) {
#ifdef __x86_64__
    return sets[number].has == has_avx512bf16 && __builtin_cpu_is("intel");
#else
    (void)number;
    return 0;
#endif
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
