"""Tokens from consecutive slabs to a layout's chunks and back, piece by piece.

A slab is what a rank reads from or writes to a file, or, where one rank has all tokens, the whole array.  Both
ends of every message know from the layouts alone which tokens it holds, so only tokens travel.
"""

import math

import numpy as np
from mpi4py import MPI

from .agreement import agree_on, agreement
from .errors import ArgumentError
from .exchange import Exchange
from .layout import Layout, within

PIECE_BYTES = 8 * 2 ** 20       # what a rank reads or writes at a time; memory holds about three pieces


def _shared(layout, chunk, start, stop):
    """The tokens of a chunk in [start, stop): pairs of slices, in the chunk and in what starts at `start`."""
    pairs, before = [], 0
    for tokens in layout.ranges(chunk):
        first, last = within(tokens, start, stop)
        if first < last:
            shared = slice(tokens[first] - start, tokens[last - 1] + 1 - start, tokens.step)
            pairs.append((slice(before + first, before + last), shared))
        before += len(tokens)
    return pairs


def _count(pairs):
    return sum(at.stop - at.start for at, _ in pairs)


def _starts(counts):
    return [sum(counts[:i]) for i in range(len(counts))]


class Redistribution:
    """Moves rows of tokens between `slabs`, a contiguous layout, and `layout` on a communicator.

    shape, dtype: of one token's row.
    """

    def __init__(self, comm, slabs, layout, shape, dtype):
        self.comm, self.slabs, self.layout = comm, slabs, layout
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.row_bytes = self.dtype.itemsize * math.prod(self.shape)
        self.tokens = max(1, PIECE_BYTES // max(self.row_bytes, 1))

    def _pieces(self):
        """For every round, the [start, stop) that each rank handles of its slab."""
        bounds = [(r.start, r.stop) for r in (self.slabs.ranges(rank)[0] for rank in range(self.comm.size))]
        for first in range(0, max(self.slabs.lengths), self.tokens):
            yield [(min(start + first, stop), min(start + first + self.tokens, stop)) for start, stop in bounds]

    def _rows(self, count):
        return np.empty((count, *self.shape), self.dtype)

    def _trade(self, exchange, outgoing, out_counts, incoming, in_counts):
        exchange.wait(exchange.alltoall(
            self.comm, outgoing.reshape(-1).view(np.uint8), out_counts, _starts(out_counts),
            incoming.reshape(-1).view(np.uint8), in_counts, _starts(in_counts), self.row_bytes, self.tokens))

    def to_chunk(self, read):
        """This rank's chunk (tokens, *shape); read(start, stop) gives tokens of my slab, (stop - start, *shape).

        Every rank calls `read` equally often, with start = stop where its slab has ended, so it may be collective.
        """
        me, ranks, exchange = self.comm.rank, range(self.comm.size), Exchange()
        chunk = self._rows(self.layout.length(me))
        for pieces in self._pieces():
            start, stop = pieces[me]
            mine = [_shared(self.layout, rank, start, stop) for rank in ranks]     # of my piece, for each rank
            theirs = [_shared(self.layout, me, *piece) for piece in pieces]        # of each piece, for me
            with agreement(self.comm):
                slab = read(start, stop)
                outgoing = np.concatenate([slab[at] for pairs in mine for _, at in pairs] or [self._rows(0)])
                incoming = self._rows(sum(map(_count, theirs)))
            self._trade(exchange, outgoing, list(map(_count, mine)), incoming, list(map(_count, theirs)))
            done = 0
            for at, _ in (pair for pairs in theirs for pair in pairs):
                chunk[at] = incoming[done:done + at.stop - at.start]
                done += at.stop - at.start
        exchange.close()
        return chunk

    def from_chunk(self, chunk, write):
        """Give this rank's chunk back; write(start, rows) takes tokens of my slab in order.

        Every rank calls `write` equally often, with no rows where its slab has ended.
        """
        me, ranks, exchange = self.comm.rank, range(self.comm.size), Exchange()
        for pieces in self._pieces():
            start, stop = pieces[me]
            mine = [_shared(self.layout, rank, start, stop) for rank in ranks]
            theirs = [_shared(self.layout, me, *piece) for piece in pieces]
            outgoing = np.concatenate([chunk[at] for pairs in theirs for at, _ in pairs] or [self._rows(0)])
            incoming = self._rows(stop - start)
            self._trade(exchange, outgoing, list(map(_count, theirs)), incoming, list(map(_count, mine)))
            with agreement(self.comm):
                slab, done = self._rows(stop - start), 0
                for at, local in (pair for pairs in mine for pair in pairs):
                    slab[local] = incoming[done:done + at.stop - at.start]
                    done += at.stop - at.start
                write(start, slab)
        exchange.close()


def all_on(root, layout):
    """The slabs of a sequence that one rank holds whole."""
    sizes = tuple(layout.seqlen if rank == root else 0 for rank in range(layout.chunks))
    return Layout("contiguous", layout.seqlen, layout.chunks, sizes)


def _check_tokens(array, layout, axis, length):
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"array is a {type(array).__name__}; it must be a NumPy array")
    if not 0 <= axis < array.ndim or array.shape[axis] != length:
        raise ArgumentError(f"array has shape {array.shape}; it must have {length} tokens along axis {axis}")


def _checked_row(comm, layout, array, root, axis, length):
    """Shape and dtype of one token's row of an array that `root`, or for None every rank, must hold."""
    with agreement(comm):
        if root is not None and not 0 <= root < comm.size:
            raise ArgumentError(f"root is {root!r}; it must be None or a rank from 0 to {comm.size - 1}")
        if root in (None, comm.rank):
            _check_tokens(array, layout, axis, length)
    row = None if array is None else (array.shape[:axis] + array.shape[axis + 1:], array.dtype.str)
    if root is not None:
        return comm.bcast(row, root)
    agree_on(comm, {"shape of a token and dtype of array": row})
    return row


def scatter(comm, layout, array, root, axis):
    """A rank's chunk of the whole `array`, which `root` has, or for None every rank."""
    shape, dtype = _checked_row(comm, layout, array, root, axis, layout.seqlen)
    if root is None:
        whole = np.moveaxis(array, axis, 0)
        rows = np.concatenate([whole[t.start:t.stop:t.step] for t in layout.ranges(comm.rank)])
    else:
        whole = np.moveaxis(array, axis, 0) if comm.rank == root else np.empty((0, *shape), dtype)
        rows = Redistribution(comm, all_on(root, layout), layout, shape, dtype).to_chunk(
            lambda start, stop: whole[start:stop])
    return np.ascontiguousarray(np.moveaxis(rows, 0, axis))


def gather(comm, layout, chunk, root, axis):
    """The whole array of all chunks on `root`, or for None on every rank; None elsewhere."""
    with agreement(comm):
        if root is not None and not 0 <= root < comm.size:
            raise ArgumentError(f"root is {root!r}; it must be None or a rank from 0 to {comm.size - 1}")
    shape, dtype = _checked_row(comm, layout, chunk, None, axis, layout.length(comm.rank))
    at = 0 if root is None else root
    whole = np.empty((layout.seqlen if root in (None, comm.rank) else 0, *shape), dtype)

    def keep(start, rows):
        whole[start:start + len(rows)] = rows
    move = Redistribution(comm, all_on(at, layout), layout, shape, dtype)
    move.from_chunk(np.moveaxis(chunk, axis, 0), keep)
    if root not in (None, comm.rank):
        return None
    if root is None:
        for start in range(0, len(whole), move.tokens):
            comm.Bcast([whole[start:start + move.tokens].reshape(-1).view(np.uint8), MPI.BYTE], at)
    return np.ascontiguousarray(np.moveaxis(whole, 0, axis))
