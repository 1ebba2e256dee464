"""Moves tokens from consecutive slabs to a layout's chunks and back, piece by piece.

A slab is what a rank reads from or writes to a file or, where one rank has all tokens, the whole array.  Sender and
receiver know from the layouts which tokens a message holds, so messages contain nothing but tokens.
"""

import math

import numpy as np

from ..problem.layout import Layout
from . import rounds
from .agreement import agreement
from .exchange import MAX_MESSAGE, Exchange


def _shared(layout, chunk, start, stop):
    """The tokens of a chunk in [start, stop), as pairs of slices: in the chunk, and relative to `start`."""
    pairs, (before, parts) = [], layout.between(chunk, start, stop)
    for tokens in parts:
        pairs.append(
            (slice(before, before + len(tokens)), slice(tokens[0] - start, tokens[-1] + 1 - start, tokens.step))
        )
        before += len(tokens)
    return pairs


def _count(pairs):
    return sum(in_chunk.stop - in_chunk.start for in_chunk, _ in pairs)


def _starts(counts):
    return [sum(counts[:i]) for i in range(len(counts))]


class Redistribution:
    """Moves rows of tokens between `slabs`, a contiguous layout, and `layout` among `Peers`.

    shape, dtype: of one token's row, which is sent in this machine's byte order.  max_message: as for `MeshAttention`.
    """

    def __init__(self, peers, slabs, layout, shape, dtype, max_message=MAX_MESSAGE):
        self.peers, self.slabs, self.layout, self.max_message = peers, slabs, layout, max_message
        self.shape, self.dtype = tuple(shape), rounds.native(dtype)
        self.row_bytes = self.dtype.itemsize * math.prod(self.shape)
        self.tokens = max(1, rounds.PIECE_BYTES // max(self.row_bytes, 1))

    def _rounds(self):
        """For every round: the bounds of this rank's piece of its slab, then two lists by rank.

        The first has the tokens of that rank's piece that belong to this rank's chunk, the second the tokens of this
        rank's piece that belong to that rank's chunk.  Tokens are pairs of slices, in the chunk and in the piece.
        """
        me, ranks = self.peers.rank, range(self.peers.size)
        bounds = [(r.start, r.stop) for r in (self.slabs.ranges(rank)[0] for rank in ranks)]
        for first in range(0, max(self.slabs.lengths), self.tokens):
            pieces = [(min(start + first, stop), min(start + first + self.tokens, stop)) for start, stop in bounds]
            yield (
                pieces[me],
                [_shared(self.layout, me, *piece) for piece in pieces],
                [_shared(self.layout, rank, *pieces[me]) for rank in ranks],
            )

    def _rows(self, count):
        return np.empty((count, *self.shape), self.dtype)

    def _trade(self, outgoing, leaving, incoming, arriving):
        """Send `outgoing` and receive `incoming`; leaving, arriving: their tokens by rank."""
        if not self.row_bytes:
            return
        exchange = Exchange(self.peers, self.max_message)
        counts, in_counts = list(map(_count, leaving)), list(map(_count, arriving))
        exchange.wait(
            exchange.alltoall(
                self.peers.comm,
                outgoing.reshape(-1).view(np.uint8),
                counts,
                _starts(counts),
                incoming.reshape(-1).view(np.uint8),
                in_counts,
                _starts(in_counts),
                self.row_bytes,
                min(self.tokens, max(self.slabs.lengths)),
            )
        )
        exchange.close()

    def _packed(self, rows, pairs, side):
        """The tokens of all pairs, concatenated.  side: 0 if rows are the chunk, 1 if they are the piece."""
        return np.concatenate(
            [rows[pair[side]] for of_rank in pairs for pair in of_rank] or [self._rows(0)], dtype=self.dtype
        )

    @staticmethod
    def _unpack(packed, rows, pairs, side):
        done = 0
        for pair in (pair for of_rank in pairs for pair in of_rank):
            count = _count([pair])
            rows[pair[side]] = packed[done : done + count]
            done += count

    def to_chunk(self, read):
        """This rank's chunk (tokens, *shape); read(start, stop) returns tokens of its slab, (stop - start, *shape).

        Every rank calls `read` equally often, with start = stop after the end of its slab, so it may be collective.
        """
        with agreement(self.peers):
            chunk = self._rows(self.layout.length(self.peers.rank))
        for (start, stop), in_chunk, in_piece in self._rounds():
            with agreement(self.peers):
                outgoing = self._packed(read(start, stop), in_piece, 1)
                incoming = self._rows(sum(map(_count, in_chunk)))
            self._trade(outgoing, in_piece, incoming, in_chunk)
            self._unpack(incoming, chunk, in_chunk, 0)
        return chunk

    def from_chunk(self, chunk, write):
        """Send this rank's chunk back; write(start, rows) takes the tokens of its slab in order.

        Every rank calls `write` equally often, with no rows after the end of its slab.
        """
        for (start, stop), in_chunk, in_piece in self._rounds():
            with agreement(self.peers):
                outgoing = self._packed(chunk, in_chunk, 0)
                incoming, slab = self._rows(stop - start), self._rows(stop - start)
            self._trade(outgoing, in_chunk, incoming, in_piece)
            with agreement(self.peers):
                self._unpack(incoming, slab, in_piece, 1)
                write(start, slab)


def all_on(root, layout):
    """The slabs of a sequence that is whole on one rank."""
    sizes = tuple(layout.seqlen if rank == root else 0 for rank in range(layout.chunks))
    return Layout("contiguous", layout.seqlen, layout.chunks, sizes)
