"""A rank's own tokens read where they lie in a file."""

import contextlib
import os

import h5py
import numpy as np
import pytest

from mpiattn.decode.ledgers import Ledgers
from mpiattn.files import mapped, own_tokens
from mpiattn.files.hdf5 import place_of
from mpiattn.files.lines import Lines
from mpiattn.problem.layout import Layout

WHOLE = np.arange(2 * 40 * 3 * 5, dtype=np.float32).reshape(2, 40, 3, 5)


@pytest.mark.parametrize(
    "how, has",
    [
        ({}, True),
        ({"chunks": True}, False),
        ({"compression": "gzip"}, False),
        ({"dtype": ">f4"}, False),
        ({"dtype": "f8"}, True),
        ({"dtype": "i4"}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("userblock", [0, 512])
def test_only_what_lies_as_in_memory(tmp_path, how, has, userblock):
    with h5py.File(tmp_path / "x.h5", "w", userblock_size=userblock) as file:
        file.create_dataset("k", data=WHOLE, **how)
        file.create_dataset("later", WHOLE.shape, "f4")
    with h5py.File(tmp_path / "x.h5") as file:
        assert (place_of(file["k"], file) is not None) == has
        assert place_of(file["later"], file) is None  # has no place in the file yet
        if has:
            into = np.empty((1, 13, 3, 5), file["k"].dtype)
            read(tmp_path / "x.h5", into, Layout("striped", 38, 3), 1, place_of(file["k"], file), first=1, entry=1)
            assert np.array_equal(into, WHOLE[1:2, 2:39:3])


def test_numbers_in_another_file(tmp_path):
    WHOLE.tofile(tmp_path / "numbers")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("k", WHOLE.shape, "f4", external=[("numbers", 0, WHOLE.nbytes)])
        assert place_of(file["k"], file) is None


def read(path, into, layout, rank, place, axis=1, **which):
    """Read a rank's tokens of a layout."""
    with open(path, "rb") as file:
        source = own_tokens.OwnTokens(file, contextlib.nullcontext)
    try:
        source.read_each([Lines.of(into, layout, axis, place=place, **{"first": 0, **which})], rank)
    finally:
        source.close()


@pytest.mark.parametrize("span", [4, 30, 400, 2**22])
@pytest.mark.parametrize("apart", [1, 2**20, "mapped"])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_tokens_of_any_rank(tmp_path, monkeypatch, span, apart, axis, kind):
    """Of any memory, and of any axis."""
    monkeypatch.setattr(own_tokens, "MAPPED", 1 if apart == "mapped" else 2**20)
    monkeypatch.setattr(own_tokens, "APART", 2**20 if apart == "mapped" else apart)
    for module in (own_tokens, mapped):
        monkeypatch.setattr(module, "SPAN", span)
    whole = np.moveaxis(WHOLE, 1, axis)
    whole.tofile(tmp_path / "numbers")
    place = 0, whole.shape, whole.dtype
    for ranks in (1, 3, 50):
        layout = Layout(kind, 40, ranks)
        for rank in range(0, ranks, 2):
            right = WHOLE[:, layout.positions(rank)]
            into = np.zeros(right.shape[::-1], np.float32).T
            read(tmp_path / "numbers", np.moveaxis(into, 1, axis), layout, rank, place, axis)
            assert np.array_equal(into, right)


@pytest.mark.parametrize("least", [1, 2**20])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_file_that_ends_too_early(tmp_path, monkeypatch, ranks, least):
    """Also if it is cut while it is read."""
    monkeypatch.setattr(own_tokens, "MAPPED", least)
    np.zeros((1, 2**16, 1, 4), np.float32).tofile(tmp_path / "numbers")
    os.truncate(tmp_path / "numbers", 40_000)
    layout, into = Layout("striped", 2**16, ranks), np.empty((1, 2**16 // ranks, 1, 4), np.float32)
    with pytest.raises(OSError, match="it ends before its datasets do"):
        read(tmp_path / "numbers", into, layout, 0, (0, (1, 2**16, 1, 4), into.dtype))


@pytest.mark.parametrize("least", [1, 2**20])
def test_a_file_that_is_cut_short_after_it_was_opened(tmp_path, monkeypatch, least):
    """An error, where touching its pages would kill the process."""
    monkeypatch.setattr(own_tokens, "MAPPED", least)
    shape = 1, 2**16, 1, 4
    np.zeros(shape, np.float32).tofile(tmp_path / "numbers")
    with open(tmp_path / "numbers", "rb") as file:
        source, into = own_tokens.OwnTokens(file, contextlib.nullcontext), np.empty(shape, np.float32)
    os.truncate(tmp_path / "numbers", 40_000)
    layout = Layout("striped", 2**16, 2)
    lines = Lines.of(into[:, ::2], layout, 1, 0, (0, shape, into.dtype))
    try:
        with pytest.raises(OSError, match=r"it ends before its datasets do|its pages cannot be read"):
            source.read_each([lines], 0)
    finally:
        source.close()


@pytest.mark.parametrize("span", [4, 100, 2**22])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("run", [1, 2, 7])
def test_tokens_in_runs(tmp_path, monkeypatch, span, axis, run):
    """Runs, and the tokens behind them that are dealt one by one; of any memory, and of any axis."""
    monkeypatch.setattr(own_tokens, "SPAN", span)
    np.moveaxis(WHOLE, 1, axis).tofile(tmp_path / "numbers")
    place = 0, np.moveaxis(WHOLE, 1, axis).shape, WHOLE.dtype
    for ranks in (1, 2, 3):
        ledgers = Ledgers(ranks, 1)
        ledgers.deal_runs(np.array([WHOLE.shape[1]]), run)
        for rank in range(ranks):
            right = WHOLE[:, ledgers[0].positions(rank)]
            for into in (np.zeros(right.shape[::-1], np.float32).T, np.zeros_like(right)):
                read(tmp_path / "numbers", np.moveaxis(into, 1, axis), ledgers[0], rank, place, axis)
                assert np.array_equal(into, right)
