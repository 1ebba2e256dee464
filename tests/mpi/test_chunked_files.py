"""Compressed chunks of input files: each is decompressed once, however many ranks and pieces have parts of it."""

import counted_filter
import h5py
import numpy as np
import pytest

from mpiattn.comm import rounds
from mpiattn.comm.peers import Peers
from mpiattn.files import access, hdf5
from mpiattn.files.input import Input, Wanted
from mpiattn.problem.layout import Layout

SHAPE = 2, 210, 4, 8
PIECE = 5 * 2 * 4 * 8 * 4  # bytes of five tokens


@pytest.fixture
def path(comm, tmp_path):
    return comm.bcast(str(tmp_path / "in.h5"), root=0)


def write(comm, path, chunks, axes="bshd"):
    """Write q, k and v in chunks that are counted; returns them."""
    arrays = {name: np.random.default_rng(i).standard_normal(SHAPE, np.float32) for i, name in enumerate("qkv")}
    counted_filter.register()  # on every rank, since all of them read
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            file.attrs["axes"] = axes
            for name, array in arrays.items():
                stored = array if axes == "bshd" else np.ascontiguousarray(array.swapaxes(1, 2))
                counted_filter.dataset(file, name, stored, chunks)
    comm.barrier()
    return arrays


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize(
    "axes, chunks",
    [
        ("bshd", SHAPE),
        ("bshd", (2, 210, 1, 8)),
        ("bshd", (1, 64, 2, 8)),
        ("bshd", (2, 7, 4, 8)),
        ("bshd", (1, 1, 4, 8)),
        ("bhsd", (2, 4, 210, 8)),
        ("bhsd", (1, 1, 64, 8)),
    ],
)
def test_each_is_decompressed_once(comm, path, monkeypatch, axes, chunks, layout):
    """Also where HDF5's cache of itself holds no chunk, as it does of large ones."""
    monkeypatch.setattr(rounds, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(hdf5, "OTHER_CHUNKS", PIECE)
    monkeypatch.setattr(access, "open_file", lambda path, mode, comm: h5py.File(path, mode, rdcc_nbytes=1))
    arrays, layout = write(comm, path, chunks, axes), Layout(layout, SHAPE[1], comm.size)
    before = counted_filter.counts["read"]
    source = Input(Peers(comm), path)
    chunks_read = source.chunks([Wanted(name, layout) for name in "qkv"])
    source.close()
    count = comm.allreduce(counted_filter.counts["read"] - before)
    for name, chunk in zip("qkv", chunks_read):
        assert np.array_equal(chunk, arrays[name][:, layout.positions(comm.rank)])
    lengths = SHAPE if axes == "bshd" else (2, 4, 210, 8)
    assert count == 3 * np.prod([-(-length // of_chunk) for length, of_chunk in zip(lengths, chunks)])


def test_parts_of_the_tokens(comm, path):
    """Tokens that begin within a chunk, as sequences of a cache do, of one entry of the batch."""
    arrays = write(comm, path, (1, 64, 2, 8))
    source = Input(Peers(comm), path)
    for first, count in ((0, 210), (3, 100), (63, 2), (70, 140), (209, 1), (5, 0)):
        for kind in ("contiguous", "striped"):
            layout = Layout(kind, count, comm.size)
            (chunk,) = source.chunks([Wanted("k", layout, entry=1, first=first)])
            assert np.array_equal(chunk, arrays["k"][1:, first + layout.positions(comm.rank)])
    source.close()
