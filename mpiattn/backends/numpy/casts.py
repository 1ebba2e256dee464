"""Cast float16 to float32 and back at memory speed.  NumPy's own casts work element by element, many times as long."""

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


def narrow(dst, src):
    """dst = src, of float32 as float16, rounded to the nearest, of two as near to the even one.

    The exponent and mantissa bits, with the exponent's bias of float16, are rounded as one number.  Below 2^-14 float16
    has fixed steps of 2^-24: the last bit of 0.5 in float32, so that adding 0.5 rounds.
    """
    half, bits = dst.view(np.uint16), src.view(np.uint32)
    size = np.bitwise_and(bits, np.uint32(0x7FFFFFFF))
    if size.max(initial=0) >= 0x47800000:  # 2^16 and above, and nan
        np.copyto(dst, src, casting="same_kind")
        return
    rounded = np.right_shift(size, 13)
    np.bitwise_and(rounded, np.uint32(1), out=rounded)
    np.add(rounded, size, out=rounded)
    np.add(rounded, np.uint32(0xC8000FFF), out=rounded)  # less 112 of exponent, more half of the last bit that stays
    np.right_shift(rounded, 13, out=rounded)
    small = np.add(size.view(np.float32), np.float32(0.5)).view(np.uint32)
    np.subtract(small, np.uint32(0x3F000000), out=small)
    np.copyto(rounded, small, where=size < 0x38800000)
    np.right_shift(bits, 16, out=small)
    np.bitwise_and(small, np.uint32(0x8000), out=small)
    np.bitwise_or(rounded, small, out=half, casting="same_kind")
