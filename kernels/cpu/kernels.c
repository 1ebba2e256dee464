// The kernels of one instruction set and one accumulation dtype; compiled once for each, with -DTABLE=name and
// -DREAL_BYTES=4 or 8.  -DSET_name, which setup.py gives too, lets compiler.h check the compiler's options.

// clang-format off
#include "compiler.h"  // before all others, which ask for the macros that it sets
// clang-format on

#include "backward.h"
#include "decode.h"
#include "forward.h"
#ifndef __AVX512BF16__
#include "narrow.h"
#include "partials.h"
#endif

const struct kernels TABLE = {{
    [FORWARD] = {forward_bytes, forward},
    [BACKWARD] = {backward_bytes, backward},
    [DECODE] = {decode_bytes, decode},
#ifndef __AVX512BF16__
    [MERGE] = {no_bytes, merge},
    [SINK] = {no_bytes, sink},
    [DELTA] = {no_bytes, delta},
#if REAL_BYTES == 4
    [NARROW] = {no_bytes, narrow},
#endif
#endif
}};
