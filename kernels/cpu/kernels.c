// The kernels of one instruction set and one accumulation dtype; compiled once for each, with -DTABLE=name and
// -DREAL_BYTES=4 or 8.

#include "backward.h"
#include "forward.h"

const struct kernels TABLE = {forward_bytes, backward_bytes, forward, backward};
