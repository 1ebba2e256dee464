"""Inputs of a benchmark: every element of q, k, v and dout is a hash of its position.

So each rank makes its own tokens, for any layout, and a check can make any others.
"""

import math
from itertools import product

import numpy as np

NAMES = ("q", "k", "v", "dout")
BIAS = 2**63  # hashed for the first number of a bias: tensors have smaller ones
PIECE = 2**20  # elements that are made at a time


def _mixed(counter):
    """Hash an array of uint64 in place (the finalizer of splitmix64)."""
    counter *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        counter ^= counter >> np.uint64(shift)
        counter *= np.uint64(factor)
    counter ^= counter >> np.uint64(31)
    return counter


class Tensors:
    """The tensors of a `Problem`: uniform numbers of mean 0 and variance 1, in its dtype."""

    def __init__(self, problem):
        p = self.problem = problem
        self.rows = {
            "q": (p.heads, p.head_dim),
            "k": (p.kv_heads, p.head_dim),
            "v": (p.kv_heads, p.value_dim),
            "dout": (p.heads, p.value_dim),
        }

    def tokens(self, name, positions):
        """The tokens of a tensor at some positions: (batch, tokens, heads, dim)."""
        row, batch = self.rows[name], self.problem.batch
        width, positions = math.prod(row), np.asarray(positions, np.uint64)
        tokens = np.empty((batch, len(positions), width), self.problem.dtype)
        step = max(1, PIECE // width)
        for b in range(batch):
            first = (NAMES.index(name) * batch + b) << 48  # sequences have fewer than 2^48 elements
            within = np.arange(first, first + width, dtype=np.uint64)
            for start in range(0, len(positions), step):
                some = slice(start, start + step)
                bits = _mixed(positions[some, None] * np.uint64(width) + within) >> np.uint64(11)
                tokens[b, some] = (bits * 2.0**-52 - 1) * math.sqrt(3)  # 53 bits as [-1, 1)
        return tokens.reshape(batch, len(positions), *row)

    def pairs(self, sequences, heads, rows, columns):
        """A bias of some sequences and heads, slices, and of queries and keys at some positions."""
        p = self.problem
        rows, columns = (np.asarray(positions, np.uint64) for positions in (rows, columns))
        numbers, heads = range(p.batch)[sequences], range(p.heads)[heads]
        bias = np.empty((len(numbers), len(heads), len(rows), len(columns)), p.partial_dtype)
        step = max(1, PIECE // max(1, len(columns)))
        for (b, h), start in product(np.ndindex(bias.shape[:2]), range(0, len(rows), step)):
            first = BIAS + (numbers[b] * p.heads + heads[h]) * p.seqlen * p.seqlen_k
            some = slice(start, start + step)
            bits = _mixed(rows[some, None] * np.uint64(p.seqlen_k) + columns + np.uint64(first)) >> np.uint64(11)
            bias[b, h, some] = (bits * 2.0**-52 - 1) * math.sqrt(3)
        return bias

    def read(self, name, start, stop):
        """The tokens of a tensor at positions [start, stop), as `mpiattn.verify.compare.Source` reads them."""
        return self.tokens(name, np.arange(start, stop))

    def inputs(self, positions, positions_k, dout=True):
        """q, k, v and dout at some positions; None for the v that keys hold, and for dout if it is not wanted."""
        unused = {"v"} if self.problem.shared_kv else set()
        unused |= set() if dout else {"dout"}
        return [
            None if name in unused else self.tokens(name, positions_k if name in "kv" else positions) for name in NAMES
        ]
