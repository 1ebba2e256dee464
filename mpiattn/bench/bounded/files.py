"""Files of tokens: writing and reading their bytes once by h5py bounds saving, loading and reading them.

The files are in rank 0's folder for temporary files, so all ranks must be on one host.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import h5py
import numpy as np

from ...comm.agreement import agreement, from_rank_0
from ...decode.cache import KVCache
from ...files.hdf5 import file_errors
from ...files.input import Input, Wanted
from ...problem.layout import Layout, even_part
from ...system import partial_files
from .operation import HEAD_DIM, HEADS, Bench, Operation

SEQUENCES, KEYS = 64, 2048  # of the cache, 64 MiB
ARGUMENT = "a temporary file"  # in messages
TOKENS = 8192  # of each of q, k and v, 16 MiB


def files(bench: Bench) -> Iterator[Operation]:
    """A cache saved and loaded, and inputs read as `mpiattn run` reads them."""
    saved, plain, inputs = bench.stack.enter_context(_temporary(bench.peers, 3))
    yield from _cache(bench, saved, plain)
    yield from _inputs(bench, inputs)


@contextmanager
def _temporary(peers, count):
    """Paths of new files, which are removed at the end however the job ends."""
    folder, base = tempfile.gettempdir(), "mpiattn-limits"

    def make():
        partial_files.remove_stale(folder, base)
        return [partial_files.create(ARGUMENT, folder, base) for _ in range(count)]

    paths = from_rank_0(peers, make)
    for path in paths:
        partial_files.share(ARGUMENT, path)
    try:
        yield paths
    finally:
        for path in paths:
            partial_files.discard(path)


def _cache(bench, saved, plain):
    peers, how = bench.peers, {"backend": bench.backend, "timeout": bench.peers.timeout}
    cache, tokens = bench.cache(SEQUENCES, KEYS)
    cache.save(saved)
    with KVCache.load(peers.comm, saved, **how) as loaded:
        held = zip(loaded.local(SEQUENCES - 1), tokens[:, -1, loaded.positions(SEQUENCES - 1)])
        bench.equal(held, "a cache that was saved and loaded does not hold the tokens that it held")
    whole = dict(zip("kv", tokens.reshape(2, 1, -1, *tokens.shape[-2:])))

    def write():
        if peers.rank == 0:
            _write(plain, whole)

    with agreement(peers, only=0):  # the disk may be full
        write()
    yield Operation("save a cache of 64 MiB", "writing it by h5py, fsync", lambda: cache.save(saved), write)
    yield Operation(
        "load a cache of 64 MiB",
        "reading it by h5py",
        lambda: KVCache.load(peers.comm, saved, **how).close(),
        _reading(peers, plain, whole, cache.storage.pools[0].nbytes),
    )


def _inputs(bench, path):
    peers = bench.peers
    shape = 1, TOKENS, HEADS, HEAD_DIM
    inputs = dict(zip("qkv", np.random.default_rng(0).standard_normal((3, *shape), np.float32)))
    with agreement(peers, only=0):
        if peers.rank == 0:
            _write(path, inputs)
    for kind in ("contiguous", "striped"):
        layout = Layout(kind, TOKENS, peers.size)
        positions = layout.positions(peers.rank)
        chunks = _read(peers, path, layout)
        pairs = [(chunks[name], inputs[name][:, positions]) for name in inputs]
        bench.equal(pairs, f"reading {kind} tokens of a file does not give what was written")
        yield Operation(
            f"read q, k, v of 48 MiB, {kind}",
            "reading slabs by h5py",
            lambda layout=layout: _read(peers, path, layout),
            _reading(peers, path, inputs),
        )


def _read(peers, path, layout):
    source = Input(peers, path)
    chunks = dict(zip("qkv", source.chunks([Wanted(name, layout) for name in "qkv"])))
    source.close()
    return chunks


def _write(path, arrays):
    with file_errors(ARGUMENT, path, "written"):
        with h5py.File(path, "w") as file:
            for name, array in arrays.items():
                file[name] = array
        with open(path, "rb") as written:
            os.fsync(written.fileno())


def _reading(peers, path, arrays, room=0):
    """A function by which every rank reads its share of the tokens of every array, into new memory.

    room: bytes of this memory, for each array, if its share takes fewer.
    """

    def read():
        with h5py.File(path, "r") as file:
            return [_share(file[name], peers, room) for name in arrays]

    return read


def _share(dataset, peers, room):
    tokens = even_part(dataset.shape[1], peers.size, peers.rank)
    shape = dataset.shape[0], len(tokens), *dataset.shape[2:]
    nbytes = dataset.dtype.itemsize * prod(shape)
    share = np.empty(max(nbytes, room), np.uint8)[:nbytes].view(dataset.dtype).reshape(shape)
    dataset.read_direct(share, np.s_[:, tokens.start : tokens.stop])
    return share
