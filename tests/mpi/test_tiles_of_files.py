"""A dataset of pairs that rank 0 writes from every rank's tile: whole, and an error of rank 0 is one of all ranks."""

import numpy as np
import pytest
from test_agreement import same_error

from mpiattn import FileError
from mpiattn.comm.peers import Peers
from mpiattn.files import pairs


@pytest.fixture
def parts(comm, monkeypatch):
    """The whole, this rank's tile of every rank-th row, in two planes of heads if ranks are even, and its place."""
    monkeypatch.setattr(pairs, "PIECE_BYTES", 300)  # a few rows at a time
    whole = np.random.default_rng(0).standard_normal((2, 4, 11, 13)).astype(np.float32)
    planes = 2 - comm.size % 2
    rows = np.arange(11)[::-1][comm.rank // planes :: comm.size // planes].copy()
    first = comm.rank % planes * (4 // planes)
    heads = slice(first, first + 4 // planes)
    place = pairs.Place(slice(0, 2), heads, rows, np.arange(13))
    return whole, whole[:, heads][:, :, rows], place


@pytest.mark.parametrize("shared", [False, True])
def test_whole(comm, parts, shared):
    whole, tile, place = parts
    if shared:  # one for all heads, the same on every plane
        whole, tile = whole[:, :1], whole[:, :1][:, :, place.rows]
    written = np.full(whole.shape, np.nan, np.float32)

    def write(starts, rows):
        b, h, first, _ = starts
        written[b, h, first : first + rows.shape[2]] = rows[0, 0]

    pairs.write_pairs(Peers(comm), tile, place, whole.shape, write)
    assert np.array_equal(written, whole) if comm.rank == 0 else np.isnan(written).all()


def test_a_full_disk(comm, parts):
    whole, tile, place = parts

    def write(starts, rows):
        if starts[2]:
            raise FileError("OUT is 'out.h5'; it cannot be written: no space left on device")

    text = same_error(comm, lambda: pairs.write_pairs(Peers(comm), tile, place, whole.shape, write), FileError)
    assert "no space left" in text
