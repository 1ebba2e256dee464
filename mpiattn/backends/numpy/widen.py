"""Cast float16 to float32 at memory speed.  NumPy's own cast works element by element and takes seven times as long."""

import numpy as np

INFINITE = 0x7C00  # bits of float16's infinity; larger values, without the sign bit, are nan


def _finite(bits):
    return bits.size == 0 or (bits.view(np.int16).max() < INFINITE and bits.view(np.uint16).max() < 0x8000 | INFINITE)


def widen(dst, src):
    """dst = src, for any dtypes; exact if dst has the wider one.

    A finite float16 is shifted to the exponent and mantissa bits of float32.  That value is 2^112 times too small,
    because the exponent biases differ by 112.  The product with 2^112 is exact, for subnormal numbers too.
    """
    if src.dtype != np.float16 or dst.dtype != np.float32 or not _finite(src):
        np.copyto(dst, src)
        return
    bits = dst.view(np.int32)
    np.copyto(bits, src.view(np.int16))  # sign extension copies the sign into the upper bits
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, np.int32(-0x7000_2000), out=bits)  # 0x8fffe000: sign, 5 exponent and 10 mantissa bits
    np.multiply(dst, np.float32(2.0**112), out=dst)
