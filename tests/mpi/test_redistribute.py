"""Tokens from files to chunks and back."""

import os
import random
import shutil
import tempfile
import time

import divisions
import h5py
import numpy as np
import pytest

from mpiattn import Layout, errors
from mpiattn.backends import wire
from mpiattn.comm import rounds, shared_memory
from mpiattn.comm.peers import Peers
from mpiattn.comm.redistribute import Redistribution, all_on
from mpiattn.decode.token_owners import Ledger
from mpiattn.files import access, hdf5, own_tokens, staged
from mpiattn.files.input import Input, Wanted
from mpiattn.files.output import Contents, Output, Written
from mpiattn.problem.grid import even_dims
from mpiattn.problem.problem import dtype_name


def uneven(seqlen, ranks):
    sizes = [0] * ranks
    sizes[-1] = seqlen - seqlen // 3
    sizes[0] += seqlen - sum(sizes)
    return Layout("contiguous", seqlen, ranks, tuple(sizes))


def ledger(seqlen, ranks):
    """Tokens that ranks hold already, and others that are dealt."""
    tokens = Ledger(ranks)
    tokens.place(uneven(seqlen // 2, ranks))
    tokens.deal(seqlen - seqlen // 2)
    return tokens


def layout_of(kind, seqlen, ranks):
    return kind(seqlen, ranks) if callable(kind) else Layout(kind, seqlen, ranks)


def drawn(seqlen, ranks):
    return divisions.either(random.Random(f"{seqlen} {ranks}"), seqlen, ranks)


LAYOUTS = ("contiguous", "striped", "zigzag", uneven, ledger, drawn)


def positions(layout, rank):
    return [position for tokens in layout.ranges(rank) for position in tokens]


@pytest.mark.draw(12)
@pytest.mark.many
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("seqlen", [0, 1, 7, 61])
@pytest.mark.parametrize("piece", [1, 100, 2**20])
def test_there_and_back(comm, monkeypatch, kind, seqlen, piece):
    monkeypatch.setattr(rounds, "PIECE_BYTES", piece)
    if (comm.rank + seqlen) % 3:  # one end may pack what the other end takes as it lies
        monkeypatch.setattr(wire, "BLOCK_BYTES", 1)
    layout, whole = layout_of(kind, seqlen, comm.size), np.arange(seqlen * 6, dtype=np.int32).reshape(seqlen, 2, 3)
    at, calls = positions(layout, comm.rank), []

    def read(tokens, rows):
        calls.append(len(tokens))
        rows[...] = whole[tokens.start : tokens.stop : tokens.step]

    slabs = Layout("contiguous", seqlen, comm.size)
    chunk = Redistribution(Peers(comm), slabs, layout, (2, 3), whole.dtype).to_chunk(read)
    assert np.array_equal(chunk, whole[at])
    assert len(set(comm.allgather(len(calls)))) == 1  # reading may be collective
    assert comm.allreduce(sum(calls)) == seqlen
    for of_file in (slabs, all_on(comm.size - 1, layout)):
        written = []

        def write(_, rows, written=written):
            written.append(rows.copy())

        strided = np.ascontiguousarray(chunk.swapaxes(0, 1)).swapaxes(0, 1)
        Redistribution(Peers(comm), of_file, layout, (2, 3), whole.dtype).from_chunk(strided, write)
        assert len(set(comm.allgather(len(written)))) == 1
        back = np.concatenate([*written, whole[:0]])
        assert np.array_equal(back, whole[positions(of_file, comm.rank)])


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("failing", [0, -1])
def test_an_error_of_one_rank_is_raised_on_all(comm, monkeypatch, kind, failing):
    """In the middle; the others go on, and no message is left over for the next call."""
    monkeypatch.setattr(rounds, "PIECE_BYTES", 16)
    layout, peers, victim = layout_of(kind, 61, comm.size), Peers(comm), failing % comm.size
    slabs, calls = Layout("contiguous", 61, comm.size), []

    def broken(*_):
        calls.append(1)
        if comm.rank == victim and len(calls) == 3:
            raise OSError("the disk is gone")

    def move():
        calls.clear()
        return Redistribution(peers, slabs, layout, (), np.dtype(float))

    for call in (
        lambda: move().to_chunk(broken),
        lambda: move().from_chunk(np.zeros(layout.length(comm.rank)), broken),
    ):
        with pytest.raises(errors.FileError, match="the disk is gone") as caught:
            call()
        assert len(set(comm.allgather(str(caught.value)))) == 1

    def read(tokens, rows):
        rows[...] = tokens

    chunk = move().to_chunk(read)
    assert chunk.tolist() == positions(layout, comm.rank)


@pytest.mark.draw(30)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("axes", hdf5.AXES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("apart", [False, True, "large"])
def test_files(comm, tmp_path_factory, monkeypatch, kind, axes, dtype, batch, apart):
    """apart: each rank reads its own tokens, and all write together, where they lie; large: token by token."""
    monkeypatch.setattr(rounds, "PIECE_BYTES", 300)
    monkeypatch.setattr(own_tokens, "SPAN", 100)
    monkeypatch.setattr(staged, "ROUND_BYTES", 700)
    monkeypatch.setattr(staged, "STRETCH_BYTES", 200)
    if apart == "large":
        monkeypatch.setattr(own_tokens, "APART", 1)
        monkeypatch.setattr(staged, "LARGE", 1)
    if not apart:
        monkeypatch.setattr(access, "on_one_host", lambda *_: False)
    folder = comm.bcast(str(tmp_path_factory.mktemp("files")) if comm.rank == 0 else None)
    layout, peers = layout_of(kind, 29, comm.size), Peers(comm)
    whole = np.random.default_rng(1).standard_normal((batch, 29, 2, 5)).astype(dtype_name(dtype))
    at = positions(layout, comm.rank)
    shapes = {name: (whole.shape, dtype) for name in "qkv"} | {"lse": ((batch, 2, 29), "float32")}
    output = Output(peers, f"{folder}/x.h5", {"": Contents(shapes, {"axes": axes})})
    if apart and not access.parallel():
        monkeypatch.setattr(hdf5, "write", None)
    for name in "qkv":
        output.write(name, whole[:, at], layout)
    lse = whole[..., 0].swapaxes(1, 2).astype("float32")
    output.write("lse", lse[:, :, at].astype("float64"), layout, axis=2)  # converted
    output.commit()
    source = Input(peers, f"{folder}/x.h5", axes=axes)
    if apart and not access.parallel():
        monkeypatch.setattr(hdf5, "read", None)
    for entry in (None, batch - 1):
        given = whole if entry is None else whole[entry : entry + 1]
        (chunk,) = source.chunks([Wanted("k", layout, entry)])
        assert chunk.dtype == whole.dtype and np.array_equal(chunk, given[:, at])
        some = layout_of(kind, 20, comm.size)
        (chunk,) = source.chunks([Wanted("v", some, entry, first=9)])
        assert np.array_equal(chunk, given[:, 9:][:, positions(some, comm.rank)])
    source.close()
    with h5py.File(f"{folder}/x.h5", "r") as file:
        assert np.array_equal(file["lse"][()], lse)
    comm.Barrier()


@pytest.fixture
def memory_folder(comm, monkeypatch):
    """A folder in shared memory for this test alone: another launch may have its files in the usual one."""
    usual = shared_memory.FOLDER
    folder = comm.bcast(tempfile.mkdtemp(dir=usual) if comm.rank == 0 and os.path.isdir(usual) else usual)
    monkeypatch.setattr(shared_memory, "FOLDER", folder)
    yield folder
    comm.Barrier()
    if comm.rank == 0 and folder != usual:
        shutil.rmtree(folder)


def test_memory_that_ranks_share(comm, memory_folder):
    """It is the same on all, and leaves no file; on a system that has none it is None."""
    memory, peers = shared_memory.shared_memory(Peers(comm), 5000), Peers(comm)
    if comm.size > 1 and not os.path.isdir(memory_folder):
        assert memory is None
        return
    assert memory.shape == (5000,)
    memory[comm.rank :: comm.size] = comm.rank
    peers.barrier()
    assert np.array_equal(memory, np.arange(5000) % comm.size)
    assert not os.path.isdir(memory_folder) or not os.listdir(memory_folder)


def test_no_memory_that_ranks_share(comm, monkeypatch):
    monkeypatch.setattr(shared_memory, "FOLDER", "/no such folder")
    assert (shared_memory.shared_memory(Peers(comm), 5000) is None) == (comm.size > 1)


def test_memory_that_there_is_no_room_for(comm, memory_folder):
    assert comm.size == 1 or shared_memory.shared_memory(Peers(comm), 2**50) is None
    assert not os.path.isdir(memory_folder) or not os.listdir(memory_folder)


def striped_file(comm, tmp_path_factory, tokens):
    """Write a striped tensor into a file, and compare what is in it on every rank."""
    folder = comm.bcast(str(tmp_path_factory.mktemp("files")) if comm.rank == 0 else None)
    whole = np.arange(tokens * 10, dtype=np.float32).reshape(1, tokens, 2, 5)
    layout = Layout("striped", tokens, comm.size)
    output = Output(Peers(comm), f"{folder}/x.h5", {"": Contents({"k": (whole.shape, "float32")})})
    output.write("k", whole[:, layout.positions(comm.rank)], layout)
    output.commit()
    with h5py.File(f"{folder}/x.h5", "r") as file:
        assert np.array_equal(file["k"][()], whole)
    comm.Barrier()


def test_written_by_rank_0_where_no_memory_is_shared(comm, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(shared_memory, "FOLDER", "/no such folder")
    striped_file(comm, tmp_path_factory, 29)


def test_ranks_that_write_late(comm, tmp_path_factory, monkeypatch):
    """What they have yet to write, the others leave in the memory that all share; a call may write a part of it."""
    monkeypatch.setattr(staged, "ROUND_BYTES", 700)
    monkeypatch.setattr(staged, "STRETCH_BYTES", 200)
    write = os.pwrite

    def late(file, data, start):
        time.sleep(0.01 * (comm.rank == 0))
        return write(file, data[:150], start)  # as the system does of 2 GiB

    monkeypatch.setattr(os, "pwrite", late)
    striped_file(comm, tmp_path_factory, 61)


def test_progress_of_files(comm, tmp_path_factory, monkeypatch):
    """Every token counts once: of what is read on the rank that reads it, of what is written on all ranks."""
    monkeypatch.setattr(staged, "ROUND_BYTES", 700)
    monkeypatch.setattr(staged, "STRETCH_BYTES", 200)
    folder = comm.bcast(str(tmp_path_factory.mktemp("files")) if comm.rank == 0 else None)
    for kind in LAYOUTS:
        layout, whole, done = layout_of(kind, 29, comm.size), np.ones((3, 29, 2, 5), np.float32), []
        output = Output(
            Peers(comm), f"{folder}/x.h5", {"": Contents({"k": (whole.shape, "float32")}, {"axes": "bhsd"})}
        )
        output.write("k", whole[:, positions(layout, comm.rank)], layout, progress=done.append)
        output.commit()
        assert comm.allreduce(sum(done)) == pytest.approx(29 * comm.size)
        source = Input(Peers(comm), f"{folder}/x.h5", look=lambda path, axes: ({}, axes), axes="bhsd")
        done.clear()
        source.chunks([Wanted("k", layout)], done.append)
        source.close()
        assert comm.allreduce(sum(done)) == pytest.approx(29)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_error_of_making_a_chunk_is_raised_on_all(comm, tmp_path_factory, monkeypatch, in_place):
    """In the middle of those to write, on the last rank."""
    if not in_place:
        monkeypatch.setattr(access, "on_one_host", lambda *_: False)
    folder = comm.bcast(str(tmp_path_factory.mktemp("files")) if comm.rank == 0 else None)
    layout, peers = Layout("striped", 29, comm.size), Peers(comm)

    def chunks():
        for name in "kv":
            if name == "v" and comm.rank == comm.size - 1:
                raise MemoryError("no memory for v")
            yield Written(name, np.zeros((1, layout.length(comm.rank), 2, 5), np.float32), layout)

    output = Output(peers, f"{folder}/x.h5", {"": Contents({name: ((1, 29, 2, 5), "float32") for name in "kv"})})
    with pytest.raises(errors.MpiattnError, match="no memory for v"):
        output.write_each(chunks())
    output.abandon()
    comm.Barrier()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("axes", hdf5.AXES)
@pytest.mark.parametrize("apart", [False, True])
def test_files_with_the_axes_of_a_grid(comm, tmp_path_factory, monkeypatch, axes, apart):
    """Where others have one of tokens: written and read where they lie, or by slabs of rows, compressed ones too."""
    monkeypatch.setattr(rounds, "PIECE_BYTES", 300)
    if not apart:
        monkeypatch.setattr(access, "on_one_host", lambda *_: False)
    folder = comm.bcast(str(tmp_path_factory.mktemp("files")) if comm.rank == 0 else None)
    layout, shape, peers = Layout.grid((3, 4, 5), even_dims(comm.size, 2)), (2, 60, 3, 7), Peers(comm)
    whole, at = np.arange(np.prod(shape), dtype=np.float32).reshape(shape), layout.positions(comm.rank)
    shapes = {"q": (shape, "float32"), "lse": ((2, 3, 60), "float32")}
    output = Output(peers, f"{folder}/x.h5", {"": Contents(shapes, {"axes": axes}, (3, 4, 5))})
    output.write("q", whole[:, at], layout)
    output.write("lse", whole[:, at][..., 0].swapaxes(1, 2), layout, axis=2)
    output.commit()
    stored = whole.reshape(2, 3, 4, 5, 3, 7)
    if axes == "bhsd":
        stored = np.moveaxis(stored, 4, 1)
    with h5py.File(f"{folder}/x.h5", "r") as file:
        assert np.array_equal(file["q"], stored)
        assert np.array_equal(file["lse"], whole[..., 0].swapaxes(1, 2).reshape(2, 3, 3, 4, 5))
    comm.Barrier()
    if comm.rank == 0:
        with h5py.File(f"{folder}/x.h5", "r+") as file:
            file.create_dataset("k", data=stored, compression="gzip", chunks=True)
            file["v"] = whole if axes == "bshd" else whole.swapaxes(1, 2)
    comm.Barrier()
    source = Input(peers, f"{folder}/x.h5", look=lambda path, axes: ({}, axes), axes=axes, grid=(3, 4, 5))
    assert source.grid_of("q") == source.grid_of("k") == (3, 4, 5) and source.grid_of("v") is None
    for name in "qkv":
        for entry in (None, 1):
            given = whole if entry is None else whole[1:]
            (chunk,) = source.chunks([Wanted(name, layout, entry)])
            assert np.array_equal(chunk, given[:, at]), (name, entry)
        for start, stop in ((0, 60), (0, 1), (7, 8), (3, 58), (20, 40), (17, 43), (31, 34), (33, 33)):
            assert np.array_equal(source.tokens(name, start, stop), whole[:, start:stop])
            assert np.array_equal(source.tokens(name, start, stop, entry=1), whole[1:, start:stop])
    source.close()
    comm.Barrier()
