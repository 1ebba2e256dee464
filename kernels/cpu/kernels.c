// The kernels of one instruction set and one accumulation dtype; compiled once for each, with -DTABLE=name and
// -DREAL_BYTES=4 or 8.

#ifndef __AVX512BF16__
#include "backward.h"
#endif
#include "forward.h"

#ifdef __AVX512BF16__
const struct kernels TABLE = {forward_bytes, 0, forward, 0};
#else
const struct kernels TABLE = {forward_bytes, backward_bytes, forward, backward};
#endif
