"""What few blocks have besides, a bias and dropout: the constants, numbers and arrays that kernels get for them.

A kernel gets them as optional arguments after all others.  Blocks without them have the kernels that they had.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .tile_table import element, score_form

PAIR = 2  # numbers of a row that a kernel reads at a time, if all rows are aligned for that


class Rows(NamedTuple):
    """A bias or its gradient as kernels take it.

    element: of the kernels.  width: numbers of a row that they read at a time, `PAIR` or 1.
    shape: lengths of the axes of sequences, heads and tokens; in pages of one sequence, whose heads a block's are.
    strides: of these axes, in elements; 0 where there is one number.
    """

    element: str
    width: int
    shape: tuple
    strides: tuple

    @classmethod
    def of(cls, array, address):
        """Of an array (sequences or 1, heads or 1, tokens or 1, keys) at an address."""
        size = array.itemsize
        strides = tuple(0 if n == 1 else stride // size for n, stride in zip(array.shape[:3], array.strides))
        width = _width(size, address, (*strides, array.shape[3]))
        return cls(element(array.dtype.name), width, array.shape[:3], strides)

    @classmethod
    def of_pages(cls, array, address, sequences):
        """Of a contiguous array (tokens, heads, most), whose tokens are those of so many sequences in turn."""
        tokens, heads, most = array.shape
        tokens //= sequences
        strides = tokens * heads * most, most, heads * most
        width = _width(array.itemsize, address, strides)
        return cls(element(array.dtype.name), width, (1, heads, tokens), strides)

    def heads_of_sequence(self, heads):
        """Of so many heads of all sequences; in pages, of one."""
        sequences, own, _ = self.shape
        return own if own > 1 else heads // sequences

    def numbers(self):
        return tuple(map(np.int64, self.strides))


def _width(itemsize, address, numbers):
    """numbers: strides, and the keys of a row: a pair must not end behind them."""
    return 1 if address % (PAIR * itemsize) or any(number % PAIR for number in numbers) else PAIR


class Extras(NamedTuple):
    """What the launches of a block depend on besides; of a forward pass `dbias` is None."""

    bias: Rows | None
    dbias: Rows | None
    dropout: bool

    @classmethod
    def of(cls, block, address, dbias=None):
        """Of a `BlockInputs`, None if it has none of them.  address(array): of its first byte."""
        if block.bias is None and block.dropout is None:
            return None
        bias = None if block.bias is None else Rows.of(block.bias, address(block.bias))
        of_gradient = None if dbias is None else Rows.of(dbias, address(dbias))
        return cls(bias, of_gradient, block.dropout is not None)

    @classmethod
    def of_pages(cls, block, address, sequences):
        if block.bias is None:
            return None
        return cls(Rows.of_pages(block.bias, address(block.bias), sequences), None, False)

    @property
    def sums_keys(self):
        """Whether a bias is the same for all queries, so that gradient_kv sums its gradient."""
        return self.dbias is not None and self.dbias.shape[2] == 1

    def options(self, work):
        """The constants of a kernel: ((name, value), ...)."""
        options = []
        if self.bias is not None:
            options += [("BIAS", self.bias.width), ("BIAS_ELEMENT", self.bias.element)]
        if work == "gradient_q" and self.dbias is not None and not self.sums_keys:
            options.append(("DBIAS", self.dbias.width))
        if work == "gradient_kv" and self.sums_keys:
            options.append(("KEY_SUMS", 1))
        if self.dropout:
            options.append(("DROPOUT", 1))
        return tuple(options)

    def of_bias(self, block):
        """The arguments of a block's bias."""
        if self.bias is None:
            return ()
        _, _, factor = score_form(block.scale, block.softcap)
        # of the gradient too, which may have more sequences and heads than the bias
        given = [rows for rows in (self.bias, self.dbias) if rows is not None]
        heads = min(rows.heads_of_sequence(block.q.shape[1]) for rows in given)
        return block.bias, *self.bias.numbers(), np.int32(heads), np.float32(math.log2(math.e) / factor)


def options_of(extras, work):
    """The constants of a kernel of a block with `Extras` or None."""
    return () if extras is None else extras.options(work)


def of_dropout(dropout, contiguous):
    """The arguments of a `Dropout` or None.  contiguous(array): on the device."""
    if dropout is None:
        return ()
    low, high = dropout.seed & 0xFFFFFFFF, dropout.seed >> 32
    positions = map(contiguous, (dropout.rows, dropout.keys, dropout.heads))
    return *positions, np.uint32(dropout.threshold), np.float32(1 / dropout.kept), np.uint32(low), np.uint32(high)


class Owners(NamedTuple):
    """How thread blocks of gradient_q divide the rows whose bias has a gradient, so that each number has one writer.

    Rows are those of `packed` query heads.  The groups of heads of an owner share a bias, and it does these one after
    another: `sharers` of them, `apart` from one to the next.  Owners begin `step` groups apart.
    """

    packed: int
    number: int
    sharers: int
    apart: int
    step: int

    @classmethod
    def of(cls, dbias, heads, packed):
        """Of a gradient as `Rows`.  heads: of all sequences.  packed: query heads of a KV head."""
        of_sequence = dbias.heads_of_sequence(heads)
        shared = of_sequence > 1 and dbias.shape[1] == 1
        packed = 1 if shared else packed  # rows of one token would share numbers
        all_groups, groups = heads // packed, of_sequence // packed
        if dbias.shape[0] > 1 or all_groups == groups:
            if not shared:
                return cls(packed, all_groups, 1, 0, 1)
            return cls(packed, all_groups // groups, groups, 1, groups)
        return cls(packed, groups, all_groups // groups, groups, 1)

    def numbers(self, all_packed):
        """The arguments of a kernel.  all_packed: query heads of a KV head."""
        return tuple(map(np.int32, (self.sharers, self.apart, self.step, all_packed // self.packed)))
