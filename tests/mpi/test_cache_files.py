"""A cache's file, written and read from where the tokens are."""

import h5py
import numpy as np
import pytest

from mpiattn import ArgumentError, FileError, KVCache
from mpiattn.comm import rounds
from mpiattn.decode import cache_file
from mpiattn.files import hdf5
from mpiattn.problem.problem import dtype_name


@pytest.fixture
def path(comm, tmp_path_factory):
    yield comm.bcast(str(tmp_path_factory.mktemp("cache") / "x.h5") if comm.rank == 0 else None)
    comm.Barrier()


def filled(comm, kv, lengths, **how):
    """A cache whose sequences grow in turns, by pages of two tokens, so that their slots are in several stretches."""
    cache = KVCache(
        comm, capacity=sum(lengths), kv_heads=3, head_dim=5, value_dim=4, page_size=2, sequences=len(lengths), **how
    )
    for start in range(0, max(lengths), 7):
        for sequence, length in enumerate(lengths):
            if start < length:
                part = [tensor[sequence][None, start : min(start + 7, length)] for tensor in kv]
                part += [None] * (len(part) == 1)
                cache.append(*part, sequences=[sequence])
    return cache


@pytest.mark.draw(12)
@pytest.mark.many
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("piece, run", [(60, 2**16), (2**20, 2**16), (2**20, 240), (60, 480)])
@pytest.mark.parametrize("lengths", [(40,), (60, 0, 10), (1, 23)])
@pytest.mark.parametrize("shared_kv", [False, True])
def test_saved_and_loaded(comm, monkeypatch, path, dtype, piece, run, lengths, shared_kv):
    """piece: bytes that a rank reads or sends at a time.  run: bytes that a rank gets at a time."""
    monkeypatch.setattr(rounds, "PIECE_BYTES", piece)
    monkeypatch.setattr(cache_file, "RUN_BYTES", run)
    rng, dims = np.random.default_rng(1), (5,) if shared_kv else (5, 4)
    kv = [[rng.standard_normal((length, 3, dim)).astype(dtype_name(dtype)) for length in lengths] for dim in dims]
    with filled(comm, kv, lengths, dtype=dtype, shared_kv=shared_kv) as cache:
        places = [cache.storage.places(sequence) for sequence in range(len(lengths))]
        if len(lengths) == 3 and comm.rank == 0 and comm.size <= 3:
            assert None in places  # this too is tested
        for sequence, place in enumerate(places):
            for held, copied in zip(place or (), cache.local(sequence)):
                assert np.array_equal(held, copied)
        cache.save(path)
    with h5py.File(path) as file:
        for name, given in zip("kv", kv):
            stored = hdf5.read(file[name], (0, 0, 0, 0), file[name].shape)
            assert np.array_equal(stored[0], np.concatenate(given))
    with KVCache.load(comm, path, page_size=2) as cache:
        assert cache.lengths == lengths
        for sequence in range(len(lengths)):
            at = [position for part in cache.storage.ledgers[sequence].ranges(comm.rank) for position in part]
            for given, held in zip(kv, cache.local(sequence)):
                assert np.array_equal(held, given[sequence][at])
        cache.save(path)
    with h5py.File(path) as file:
        for name, given in zip("kv", kv):
            stored = hdf5.read(file[name], (0, 0, 0, 0), file[name].shape)
            assert np.array_equal(stored[0], np.concatenate(given)), "as it was loaded"


def test_too_small_a_cache_and_padding_that_is_not_asked_for_are_refused(comm, path):
    kv = [np.ones((1, 40, 3, dim), np.float32) for dim in (5, 4)]
    with KVCache(comm, capacity=40, kv_heads=3, head_dim=5, value_dim=4) as cache:
        cache.append(*kv)
        cache.save(path)
    with pytest.raises(ArgumentError, match="the cache is full"):
        KVCache.load(comm, path, capacity=8, page_size=1)
    KVCache.load(comm, path).close()
    if comm.rank == 0:
        with h5py.File(path, "r+") as file:
            file["cu_seqlens"][...] = 3, 30
    comm.Barrier()
    with pytest.raises(FileError, match=r"its cu_seqlens is \[ 3 30\]; it must begin with 0 and end with 40"):
        KVCache.load(comm, path)
    with pytest.raises(ArgumentError, match="padding is 'no'; it must be True or False"):
        KVCache.load(comm, path, padding="no")
    with KVCache.load(comm, path, padding=True) as cache:
        assert cache.lengths == (27,)
