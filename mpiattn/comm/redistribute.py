"""Moves tokens from files to a layout's chunks and back, piece by piece.

A slab is what a rank reads from or writes to a file: consecutive tokens.  Sender and receiver know from the layouts
which tokens a message holds, so messages contain nothing but tokens.
"""

import math
from functools import partial
from itertools import zip_longest

import numpy as np

from ..problem.layout import Layout
from . import rounds
from .agreement import agreement
from .exchange import MAX_MESSAGE


def shared_tokens(layout, chunk, piece):
    """The tokens of a chunk in a range of step 1, as pairs of indices: in the chunk, a slice, and in the range.

    Those in the range are a slice or, of more than two ranges, an array, in one pair.
    """
    if not piece:
        return []
    start, stop = piece.start, piece.stop
    pairs, (before, parts) = [], layout.between(chunk, start, stop)
    if len(parts) > 2:
        in_piece = np.concatenate([np.arange(t.start - start, t.stop - start, t.step) for t in parts])
        return [(slice(before, before + len(in_piece)), in_piece)]
    for tokens in parts:
        pairs.append(
            (slice(before, before + len(tokens)), slice(tokens[0] - start, tokens[-1] + 1 - start, tokens.step))
        )
        before += len(tokens)
    return pairs


def pieces(layout, rank, row_bytes):
    """The tokens of a rank's chunk as ranges, each of which is read, written or sent at a time."""
    most = max(1, rounds.PIECE_BYTES // max(row_bytes, 1))
    cut = []
    for part in layout.ranges(rank):
        if len(part) > most:
            cut += (part[first : first + most] for first in range(0, len(part), most))
        elif part:
            cut.append(part)
    return cut


def _ranks_read_their_own(layout, row_bytes):
    """Whether every rank reads its own tokens: ranges of step 1, at most two a rank and one more a PIECE_BYTES."""
    parts = [part for rank in range(layout.chunks) for part in layout.ranges(rank)]
    most = 2 * layout.chunks + layout.seqlen * row_bytes // rounds.PIECE_BYTES
    return all(part.step == 1 for part in parts) and len(parts) <= most


class Redistribution:
    """Moves rows of tokens between `slabs`, a contiguous layout, and `layout` among `Peers`.

    shape, dtype: of one token's row, which is sent in this machine's byte order.  max_message: as for `MeshAttention`.

    An error of `read` or `write` is raised on all ranks when the tokens have moved, since the other ranks go on.
    """

    def __init__(self, peers, slabs, layout, shape, dtype, max_message=MAX_MESSAGE):
        self.peers, self.slabs, self.layout, self.max_message = peers, slabs, layout, max_message
        self.shape, self.dtype = tuple(shape), rounds.native(dtype)
        self.row_bytes = self.dtype.itemsize * math.prod(self.shape)
        self._error = None

    def _rounds(self, layout):
        """For every round: every rank's piece of its tokens in `layout`."""
        each = (pieces(layout, rank, self.row_bytes) for rank in range(self.peers.size))
        return zip_longest(*each, fillvalue=range(0))

    def _rows(self, count):
        return np.empty((count, *self.shape), self.dtype)

    def _buffers(self):
        """For a piece each, of the rounds that are under way and of the next."""
        longest = max(map(len, pieces(self.slabs, self.peers.rank, self.row_bytes)), default=0)
        return [self._rows(longest) for _ in range(rounds.AHEAD + 1)]

    def _attempt(self, call, *arguments):
        """Call `read` or `write` and keep its first error, so that no rank is left waiting for messages."""
        try:
            call(*arguments)
        except Exception as error:
            self._error = self._error or error

    def _end(self, messages):
        messages.end()
        with agreement(self.peers):
            if self._error:
                raise self._error

    def to_chunk(self, read, chunk=None, slabs_only=False):
        """This rank's chunk (tokens, *shape); read(tokens, rows) reads a range of tokens into rows (tokens, *shape).

        chunk: the array to fill; by default a new one.

        Every rank reads its slab and sends what belongs to others, or its own tokens if they lie in few ranges and it
        is not slabs_only.  Every rank calls `read` equally often, with no tokens at last, so it may be collective.
        """
        me, others = self.peers.rank, [rank for rank in range(self.peers.size) if rank != self.peers.rank]
        own_tokens = not slabs_only and _ranks_read_their_own(self.layout, self.row_bytes)
        with agreement(self.peers):
            chunk = self._rows(self.layout.length(me)) if chunk is None else chunk
            buffers = [] if own_tokens else self._buffers()
        with rounds.Rounds(self.peers, self.max_message) as messages:
            done = 0
            for number, of_ranks in enumerate(self._rounds(self.layout if own_tokens else self.slabs)):
                piece = of_ranks[me]
                if own_tokens:
                    self._attempt(read, piece, chunk[done : done + len(piece)])
                    done += len(piece)
                    continue
                rows = buffers[number % len(buffers)][: len(piece)]
                self._attempt(read, piece, rows)
                for rank in others:
                    for _, in_piece in shared_tokens(self.layout, rank, piece):
                        messages.send(rank, rows[in_piece])
                    for in_chunk, _ in shared_tokens(self.layout, me, of_ranks[rank]):
                        messages.receive(rank, chunk[in_chunk])
                for in_chunk, in_piece in shared_tokens(self.layout, me, piece):
                    chunk[in_chunk] = rows[in_piece]
                messages.turn()
            self._end(messages)
        return chunk

    def from_chunk(self, chunk, write):
        """Send this rank's chunk back; write(tokens, rows) takes a range of tokens, those of its slab in order.

        Every rank calls `write` equally often, with no tokens at last.
        """
        me = self.peers.rank
        with agreement(self.peers):
            buffers = self._buffers()
        with rounds.Rounds(self.peers, self.max_message) as messages:
            for number, of_ranks in enumerate(self._rounds(self.slabs)):
                own = of_ranks[me]
                rows = buffers[number % len(buffers)][: len(own)]
                for rank, piece in enumerate(of_ranks):
                    if rank != me:
                        for in_chunk, _ in shared_tokens(self.layout, me, piece):
                            messages.send(rank, chunk[in_chunk])
                    for in_chunk, in_piece in shared_tokens(self.layout, rank, own):
                        if rank != me:
                            messages.receive(rank, rows, in_piece)
                        elif isinstance(in_piece, slice) and in_piece == slice(0, len(own), 1):
                            rows = chunk[in_chunk]  # the whole piece, where it is
                        else:
                            rows[in_piece] = chunk[in_chunk]
                messages.turn(partial(self._attempt, write, own, rows))
            self._end(messages)


def all_on(root, layout):
    """The slabs of a sequence that is whole on one rank."""
    sizes = tuple(layout.seqlen if rank == root else 0 for rank in range(layout.chunks))
    return Layout("contiguous", layout.seqlen, layout.chunks, sizes)
