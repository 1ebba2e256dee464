// Stops the compiler where its options make these kernels wrong: a site's CFLAGS, or what a compiler takes by itself.
//
// setup.py sets back what it knows of before the options of each set.  Here is what must hold after that.

#pragma once

// Clang before 16 has other names.
#if defined(__AMXTILE__) && !defined(__AMX_TILE__)
#define __AMX_TILE__ 1
#endif
#if defined(__AMXBF16__) && !defined(__AMX_BF16__)
#define __AMX_BF16__ 1
#endif

// Rows that see nothing have an lse of -inf, NaN has to pass through, and exp rounds by adding and subtracting.
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "-ffast-math or -ffinite-math-only is in force; the kernels need -fno-fast-math"
#endif
#if defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__)
#error "-funsafe-math-optimizations or a part of it is in force; the kernels need -fno-unsafe-math-optimizations"
#endif

// Which kernels are compiled goes by these macros, so a set with more of them is another set, or a mixture.
#if defined(SET_plain) && (defined(__AVX__) || defined(__ARM_FEATURE_SVE))
#error "plain is compiled for a processor with AVX or SVE: is a -march or -m option after setup.py's?"
#elif defined(SET_avx2) && (!defined(__AVX2__) || defined(__AVX512F__))
#error "avx2 is compiled without AVX2 or with AVX-512: is a -march or -m option after setup.py's?"
#elif defined(SET_avx512) && (!defined(__AVX512F__) || defined(__AVX512BF16__))
#error "avx512 is compiled without AVX-512 or with its bfloat16: is a -march or -m option after setup.py's?"
#elif defined(SET_avx512bf16) && (!defined(__AVX512BF16__) || defined(__AMX_TILE__))
#error "avx512bf16 is compiled without it or with AMX: is a -march or -m option after setup.py's?"
#elif defined(SET_amx) && (!defined(__AVX512BF16__) || !defined(__AMX_TILE__) || !defined(__AMX_BF16__))
#error "amx is compiled without AMX: is a -march or -m option after setup.py's?"
#elif defined(SET_sve256) && (!defined(__ARM_FEATURE_SVE_BITS) || __ARM_FEATURE_SVE_BITS != 256)
#error "sve256 is compiled for vectors of another length: is an -msve-vector-bits option after setup.py's?"
#elif defined(SET_sve512) && (!defined(__ARM_FEATURE_SVE_BITS) || __ARM_FEATURE_SVE_BITS != 512)
#error "sve512 is compiled for vectors of another length: is an -msve-vector-bits option after setup.py's?"
#endif
