"""Input files as nobody would write them: clear errors or right numbers.  fuzzed_files.py makes more of them."""

import contextlib
import faulthandler
import os
import subprocess
import sys

import draws
import fuzzed_files
import h5py
import launch
import numpy as np
import pytest
from files import write_input
from fuzzed_promises import judge

from mpiattn.cli.documents import read_file
from mpiattn.decode.cache_file import read_cache_shapes
from mpiattn.errors import FileError
from mpiattn.files.hdf5 import contents
from mpiattn.files.shapes import read_shapes

pytest.importorskip("hypothesis")
from hypothesis import given, seed, settings
from hypothesis import strategies as st

EXAMPLES = [100, pytest.param(2000, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def time_limit():
    """Opening a pipe may wait for ever, and HDF5 goes on after signals: ends the process, with what it was at."""
    faulthandler.dump_traceback_later(launch.patience(fuzzed_files.SECONDS), exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_odd_files(examples, tmp_path_factory):
    @seed(draws.seed())
    @settings(max_examples=examples, deadline=None, database=None)
    @given(rng=st.randoms(use_true_random=False))
    def check(rng):
        with time_limit():
            judge(fuzzed_files.make(rng, tmp_path_factory.mktemp("odd")))

    check()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_files(examples):
    """HDF5 itself may crash, so in child processes."""
    command = [sys.executable, fuzzed_files.__file__, "--damaged", f"--examples={examples}"]
    outcome = subprocess.run(
        [*command, f"--seed={draws.seed() * 10_000}"],
        env=launch.environment(),
        text=True,
        capture_output=True,
        timeout=launch.patience(examples),
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


# What was wrong


@pytest.fixture
def source():
    return str(write_input("in.h5", seqlen=6, heads=2, kv_heads=2, head_dim=4))


def virtual(file, *parts, shape=(1, 6, 2, 4)):
    """q as a virtual dataset.  parts: (slice of tokens, file, dataset, its shape) each."""
    layout = h5py.VirtualLayout(shape, "f4")
    for tokens, path, name, of in parts:
        layout[:, tokens] = h5py.VirtualSource(path, name, of)
    file.create_virtual_dataset("q", layout)


WHOLE, NUMBERS = (1, 6, 2, 4), np.ones((1, 6, 2, 4), "f4")


def raw(nbytes):
    def make(file):
        with open("numbers", "wb") as other:
            other.write(bytes(nbytes))
        file.create_dataset("q", WHOLE, "f4", external=[("numbers", 8, NUMBERS.nbytes)])

    return make


def some_chunks(file):
    file.create_dataset("q", WHOLE, "f4", chunks=(1, 2, 2, 4), compression="gzip")[:, :3] = 1


def of_pipe(make):
    def made(file):
        os.mkfifo("pipe")
        make(file)

    return made


def cycle(file):
    file["q"], file["a"] = h5py.SoftLink("/a"), h5py.SoftLink("/q")


def through_itself(file):
    file["q"] = h5py.ExternalLink("in.h5", "q")


def unwritten_part(file):
    file.create_dataset("x", WHOLE, "f4")
    virtual(file, (np.s_[:], ".", "x", WHOLE))


def short_part(file):
    file["x"] = NUMBERS[:, :4]
    virtual(file, (np.s_[:], ".", "x", WHOLE))


def two_parts(file):
    file["x"] = NUMBERS[:, :2]
    virtual(file, (np.s_[:2], ".", "x", (1, 2, 2, 4)), (np.s_[1:3], ".", "x", (1, 2, 2, 4)))


def typed(file, kind):
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    h5py.h5d.create(file.id, b"q", kind, h5py.h5s.create_simple(WHOLE), how)


def wide():
    kind = h5py.h5t.IEEE_F64LE.copy()
    kind.set_size(32)
    kind.set_precision(256)
    kind.set_fields(255, 200, 30, 0, 200)
    return kind


QS = {
    "chunks": (some_chunks, "only 2 of 3 chunks of its dataset 'q' were ever written"),
    "raw file": (raw(NUMBERS.nbytes + 7), "its dataset 'q' are in the file 'numbers', which ends too early"),
    "raw pipe": (
        of_pipe(lambda file: file.create_dataset("q", WHOLE, "f4", external=[("pipe", 0, NUMBERS.nbytes)])),
        "'pipe', which is a folder, a pipe or a device",
    ),
    "gap": (two_parts, "'q' is virtual, and 24 elements are in no part"),
    "part of this file": (lambda file: virtual(file, (np.s_[:], ".", "x", WHOLE)), "'x' of this file, which has none"),
    "unwritten part": (unwritten_part, "is not all there: nothing was ever written to its dataset 'x'"),
    "short part": (short_part, r"'x' of this file, which is \(1, 4, 2, 4\) there, which does not hold that part"),
    "part of a pipe": (
        of_pipe(lambda file: virtual(file, (np.s_[:], "pipe", "x", WHOLE))),
        "'x' of the file 'pipe', which is a folder, a pipe or a device",
    ),
    "link to a pipe": (
        of_pipe(lambda file: file.update({"q": h5py.ExternalLink("pipe", "x")})),
        "'q' is a link to 'x' of the file 'pipe', which is a folder, a pipe or a device",
    ),
    "part of itself": (
        lambda file: virtual(file, (np.s_[:], ".", "q", WHOLE)),
        "cannot be read: 'q' leads on over more than 16 links$",
    ),
    "cycle": (cycle, "cannot be read: '/?[aq]' leads on over more than 16 links$"),
    "cycle of files": (through_itself, "cannot be read: '/?[aq]' leads on over more than 16 links$"),
    "no dataspace": (lambda file: file.update({"q": h5py.Empty("f4")}), "'q' has no elements, it has a null dataspace"),
    "group": (lambda file: file.create_group("q"), "its 'q' is a group, not a dataset"),
    "times": (lambda file: typed(file, h5py.h5t.UNIX_D32LE), "a type of 4 bytes that NumPy does not have"),
    "wide": (lambda file: typed(file, wide()), "a type of 32 bytes that NumPy does not have"),
}


@pytest.mark.parametrize("case", QS)
def test_a_dataset_that_is_not_there(source, case):
    """Zeros, another exception or no end, before."""
    make, text = QS[case]
    with h5py.File(source, "r+") as file:
        del file["q"]
        make(file)
    with time_limit(), pytest.raises(FileError, match=text) as error:
        read_shapes(source)
    assert f"IN is {source!r}; " in str(error.value)
    with time_limit(), h5py.File(source) as file:  # for messages
        assert "k" in contents(file)


@pytest.mark.parametrize("said", [np.bytes_("bhsd"), np.bytes_("bhsd  "), ["bhsd"], np.array([b"bhsd"])], ids=repr)
def test_an_order_that_other_programs_have_written(source, said):
    """Bytes were ignored, and heads taken for tokens."""
    with h5py.File(source, "r+") as file:
        file.attrs["axes"] = said
    assert read_shapes(source)[1] == "bhsd"


DIMS = [0, -1, 5, 3.5, np.nan, np.inf, "4", [2, 3], [], True, 1j, h5py.Empty("i4"), np.array([(1, 2)], "i4, i4"), 2**63]


@pytest.mark.parametrize("said", DIMS, ids=repr)
def test_a_value_dim_that_is_none(source, said):
    with h5py.File(source, "r+") as file:
        del file["v"]
        file.attrs["value_dim"] = said
    for argument, read in ("IN", read_shapes), ("path", read_cache_shapes):
        with pytest.raises(
            FileError, match=r"its attribute value_dim is .*, it must be a whole number from 1 to "
        ) as error:
            read(source)
        assert str(error.value).startswith(f"{argument} is {source!r}; ")


def test_a_value_dim_in_an_array(source):
    with h5py.File(source, "r+") as file:
        del file["v"]
        file.attrs["value_dim"] = np.array([3], "u1")
    assert read_shapes(source)[0]["value_dim"] == read_cache_shapes(source)[0]["value_dim"] == 3


def test_values_that_are_not_there_are_not_in_the_keys(source):
    with h5py.File(source, "r+") as file:
        del file["v"]
        file["v"] = h5py.SoftLink("/nowhere")
        file.attrs["value_dim"] = 3
    for read in read_shapes, read_cache_shapes:
        with pytest.raises(FileError, match="'v' is a link to '/nowhere', which is not there"):
            read(source)


def test_no_dimensions(source):
    with h5py.File(source, "r+") as file:
        del file["v"], file["k"]
        file["k"] = np.float32(3)
        file.attrs["value_dim"] = 3
    with pytest.raises(FileError, match="its shapes do not fit"):
        read_shapes(source)


def test_an_empty_name(source):
    with pytest.raises(FileError, match="it has no dataset ''"):
        read_shapes(source, names={"v": ""})


def test_boundaries_that_are_a_group(source):
    """A cache of one sequence, before."""
    with h5py.File(source, "r+") as file:
        file.create_group("cu_seqlens")
    with pytest.raises(FileError, match="its 'cu_seqlens' is a group, not a dataset"):
        read_cache_shapes(source)


@pytest.mark.parametrize("kind, text", [("pipe", "it is a pipe or a device"), ("folder", "it is a folder")])
def test_a_path_of_no_file(kind, text):
    os.mkfifo("x") if kind == "pipe" else os.mkdir("x")
    with time_limit():
        for argument, read in ("IN", read_shapes), ("path", read_cache_shapes):
            with pytest.raises(FileError, match=f"{argument} is 'x'; {text}, it must be a file"):
                read("x")


@pytest.mark.parametrize("header", ["(", "{'descr': '>04', 'fortran_order': False, 'shape': (3,), }", ""])
def test_documents_in_a_broken_npy_file(header):
    """Errors of Python's parser."""
    with open("x.npy", "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
    with pytest.raises(FileError, match=r"--documents is 'x.npy'; it cannot be read: it is no whole .npy file"):
        read_file("--documents", "x.npy")
