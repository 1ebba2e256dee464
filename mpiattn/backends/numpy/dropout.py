"""Which weights of a score tile are dropped: Philox 4x32-10 of positions, in NumPy (see `mpiattn.backends.block`)."""

import numpy as np

MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEPS = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
ROUNDS = 10
HALF = np.uint64(32)


def philox(counter, seed):
    """The four words of Philox 4x32-10 (Salmon et al., SC11) for counters.

    counter: four uint32 arrays of shapes that broadcast.  seed: from 0 to 2^64 - 1.  Returns four uint32 arrays.
    """
    key = [np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)]
    with np.errstate(over="ignore"):
        for _ in range(ROUNDS):
            products = [number * each for number, each in zip(MULTIPLIERS, (counter[0], counter[2]))]
            (high, low), (high_2, low_2) = (
                ((product >> HALF).astype(np.uint32), product.astype(np.uint32)) for product in products
            )
            counter = high_2 ^ counter[1] ^ key[0], low_2, high ^ counter[3] ^ key[1], low
            key = [word + step for word, step in zip(key, KEY_STEPS)]
    return counter


def factors(dropout, head, rows, keys, dtype):
    """What the weights of some rows and keys of a head are multiplied by: 0, or one over the probability to be kept.

    rows, keys: slices of the block's tokens and keys.
    """
    positions = dropout.keys[keys].astype(np.uint32)
    groups, inverse = np.unique(positions // 4, return_inverse=True)
    of_rows = dropout.rows[rows].astype(np.uint32)[:, None]
    zero = np.uint32(0)
    words = np.stack(philox((groups, of_rows, np.uint32(dropout.heads[head]), zero), dropout.seed), axis=-1)
    kept = words[:, inverse, positions % 4] >= dropout.threshold
    return kept.astype(dtype) / dtype.type(dropout.kept)
