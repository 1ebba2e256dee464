"""Datasets read where they lie in a file."""

import os

import h5py
import numpy as np
import pytest

from mpiattn.files import mapped

WHOLE = np.arange(2 * 40 * 3 * 5, dtype=np.float32).reshape(2, 40, 3, 5)


def lies(path):
    """The file, which this system must be able to map."""
    file = mapped.mapped(path)
    if file is None:
        pytest.skip("needs Linux 5.14")
    return file


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
        data, source = file["k"], lies(tmp_path / "x.h5")
        assert source.has(data) == has
        assert not source.has(file["later"])  # has no place in the file yet
        if has:
            into = np.empty((1, 13, 3, 5), data.dtype)
            source.read(data, np.s_[1:2, 1:40:3, :, :], into)
            assert np.array_equal(into, WHOLE[1:2, 1:40:3])


@pytest.mark.parametrize("span", [4, 30, 400, 2**22])
def test_parts_of_any_strides(tmp_path, monkeypatch, span):
    monkeypatch.setattr(mapped, "SPAN", span)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["k"] = WHOLE
    with h5py.File(tmp_path / "x.h5") as file:
        source = lies(tmp_path / "x.h5")
        for part in (np.s_[:, :, :, :], np.s_[1:2, 3:40:7, :, :], np.s_[:, 5:5, :, :], np.s_[:1, 39:40, 1:2, 2:3]):
            into = np.zeros(WHOLE[part].shape[::-1], np.float32).T
            source.read(file["k"], part, into)
            assert np.array_equal(into, WHOLE[part])


@pytest.mark.parametrize("step", [1, 2])
def test_what_is_past_the_end_is_an_error(tmp_path, step):
    """It would kill the process if it were touched."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["k"] = np.zeros((1, 2**16, 1, 4), np.float32)
    with h5py.File(tmp_path / "x.h5") as file:
        source, into = lies(tmp_path / "x.h5"), np.empty((1, 10, 1, 4), np.float32)
        os.truncate(tmp_path / "x.h5", 40_000)
        with pytest.raises(OSError):
            source.read(file["k"], np.s_[:, -10 * step :: step, :, :], into)


def test_a_file_that_is_cut_short_while_a_piece_is_read_is_an_error(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["k"] = np.zeros((1, 2**16, 1, 4), np.float32)
    read = os.preadv

    def cut_then_read(*args):
        os.truncate(tmp_path / "x.h5", 40_000)
        return read(*args)

    monkeypatch.setattr(os, "preadv", cut_then_read)
    with h5py.File(tmp_path / "x.h5") as file:
        source, into = lies(tmp_path / "x.h5"), np.empty((1, 2**16, 1, 4), np.float32)
        with pytest.raises(OSError):
            source.read(file["k"], np.s_[:, :, :, :], into)


def test_pages_are_given_back(tmp_path):
    """So that a large file does not look like memory of the process."""

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[2]) * os.sysconf("SC_PAGE_SIZE")  # of files

    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["k"] = np.zeros((1, 2**20, 1, 16), np.float32)  # 64 MiB
    with h5py.File(tmp_path / "x.h5") as file:
        source, into = lies(tmp_path / "x.h5"), np.empty((1, 2**20, 1, 16), np.float32)
        before = resident()
        source.read(file["k"], (slice(None),) * 4, into)
        assert resident() - before < 2**23


def test_numbers_in_another_file(tmp_path):
    WHOLE.tofile(tmp_path / "numbers")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("k", WHOLE.shape, "f4", external=[("numbers", 0, WHOLE.nbytes)])
        assert not lies(tmp_path / "x.h5").has(file["k"])
