"""Datasets of a number for each pair of a query and a key, of which every rank reads and writes its tile.

They are (batch or 1, heads or 1, seqlen, seqlen_k), whatever order of dimensions the tensors of the file have.  No rank
has more of one in memory than its tile and a few MB.
"""

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ..comm.agreement import agreement
from ..comm.peers import keeping
from ..comm.rounds import PIECE_BYTES

TAG = 71


def even_parts(positions):
    """Some different positions as parts of even steps: (range, slice of the positions) each."""
    parts, start = [], 0
    while start < len(positions):
        rest = positions[start : start + 2]
        step = int(rest[1] - rest[0]) if len(rest) > 1 and rest[1] > rest[0] else 1
        odd = np.flatnonzero(np.diff(positions[start:]) != step)
        stop = start + 1 + (int(odd[0]) if len(odd) else len(positions) - start - 1)
        first = int(positions[start])
        parts.append((range(first, first + step * (stop - start), step), slice(start, stop)))
        start = stop
    return parts


def read_pairs(numbers, sequences, heads, rows, columns):
    """The numbers of some pairs: (sequences, heads, rows, columns), in their dtype.

    numbers: the dataset's `Numbers`.  sequences, heads: slices of the dataset's.  rows, columns: positions.  Where
    columns lie between those of others, these are read too, some rows at a time.
    """
    dtype = np.dtype(numbers.dtype)
    tile = np.empty((sequences.stop - sequences.start, heads.stop - heads.start, len(rows), len(columns)), dtype)
    if not tile.size:
        return tile
    for of_columns, c in even_parts(columns):
        width = of_columns[-1] + 1 - of_columns[0]
        most = max(1, PIECE_BYTES // (tile.shape[0] * tile.shape[1] * width * dtype.itemsize))
        for of_rows, r in even_parts(rows):
            for first in range(0, len(of_rows), most):
                some = of_rows[first : first + most]
                starts = sequences.start, heads.start, some[0], of_columns[0]
                shape = *tile.shape[:2], len(some), len(of_columns)
                piece = numbers.read(starts, shape, steps=(1, 1, some.step, of_columns.step))
                tile[:, :, r, c][:, :, first : first + len(some)] = piece
    return tile


class Place(NamedTuple):
    """Where a rank's tile of a dataset of pairs is.

    sequences, heads: of the problem, as slices.  rows, columns: positions.
    """

    sequences: slice
    heads: slice
    rows: np.ndarray
    columns: np.ndarray

    def within(self, b, h, rows, shape):
        """(sequence, head, rows) of the tile that it gives of the rows in a range; no rows where others give them.

        shape: of the dataset; an axis of which it has 1 is the same on all planes.
        """
        numbers = [
            (0 if of.start == 0 else -1) if whole == 1 else (index - of.start if index < of.stop else -1)
            for index, whole, of in zip((b, h), shape, (self.sequences, self.heads))
        ]
        if min(numbers) < 0:
            return 0, 0, np.zeros(0, np.int64)
        return *numbers, np.flatnonzero((self.rows >= rows.start) & (self.rows < rows.stop))


def write_pairs(peers, tile, place, shape, write, progress=None):
    """Write a dataset of which every rank has a tile: rank 0 gets some whole rows at a time; collective.

    tile: (sequences or 1, heads or 1, rows, columns) at a `Place`.  shape: of the dataset.  write(starts, rows): called
    on rank 0 with an array (1, 1, rows, seqlen_k) and the indices at which it begins; what it raises is raised on every
    rank.  progress: called with the number of rows just written.
    """
    places = peers.allgather(place)
    batch, heads, seqlen, seqlen_k = shape
    step = max(1, PIECE_BYTES // max(1, seqlen_k * tile.itemsize))
    for b, h, first in np.ndindex(batch, heads, -(-seqlen // step)):
        rows = range(first * step, min((first + 1) * step, seqlen))
        own = np.ascontiguousarray(tile[place.within(b, h, rows, shape)])
        whole = np.zeros((len(rows), seqlen_k), tile.dtype) if peers.rank == 0 else None
        for rank, other in enumerate(places if peers.rank == 0 else []):
            *_, some = other.within(b, h, rows, shape)
            part = own if rank == 0 else np.empty((len(some), len(other.columns)), tile.dtype)
            if rank and part.size:
                _complete(peers, part, peers.comm.Irecv([part, MPI.BYTE], rank, TAG))
            whole[np.ix_(other.rows[some] - rows.start, other.columns)] = part
        if peers.rank and own.size:
            _complete(peers, own, peers.comm.Isend([own, MPI.BYTE], 0, TAG))
        with agreement(peers, only=0):
            if whole is not None:
                write((b, h, rows.start, 0), whole[None, None])
        if progress:
            progress(len(rows) / peers.size)


def _complete(peers, buffer, request):
    with keeping(buffer):
        peers.wait([request])
