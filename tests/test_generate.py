"""`mpiattn generate`: the file it makes, whole or not at all."""

import subprocess
import sys
import time

import h5py
import launch
import numpy as np
import pytest
from files import bfloat16_type

from mpiattn.cli import generate, main


def make(path, *options):
    return main(["generate", str(path), "--seqlen", "33", "--heads", "4", "--head-dim", "8", *options])


def test_datasets(tmp_path):
    assert make(tmp_path / "x.h5", *"--batch 2 --kv-heads 2 --value-dim 5 --seqlen-k 21 --dtype float16".split()) == 0
    with h5py.File(tmp_path / "x.h5") as file:
        assert {name: data.shape for name, data in file.items()} == {
            "q": (2, 33, 4, 8),
            "k": (2, 21, 2, 8),
            "v": (2, 21, 2, 5),
        }
        assert {data.dtype.name for data in file.values()} == {"float16"}
        for data in file.values():
            values = data[:].astype(float)
            assert abs(values.mean()) < 0.2 and 0.8 < values.std() < 1.2
        assert not np.array_equal(file["q"][0], file["q"][1])


def test_many_problems(tmp_path):
    """A group each, with the same shapes and other numbers."""
    assert make(tmp_path / "x.h5", "--problems", "3", "--dout", "--documents", "2") == 0
    with h5py.File(tmp_path / "x.h5") as file:
        assert list(file) == ["0", "1", "2"]
        assert all(set(group) == {"q", "k", "v", "dout", "cu_seqlens"} for group in file.values())
        drawn = [file[group][name][...].tobytes() for group in file for name in ("q", "k", "v", "dout")]
        assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_gradient_and_documents(tmp_path, dtype):
    assert (
        make(tmp_path / "x.h5", "--dout", "--documents", "3", "--seqlen-k", "21", "--value-dim", "5", "--dtype", dtype)
        == 0
    )
    make(tmp_path / "plain.h5", "--seqlen-k", "21", "--value-dim", "5", "--dtype", dtype)
    with h5py.File(tmp_path / "x.h5") as file, h5py.File(tmp_path / "plain.h5") as plain:
        assert set(file) == {"q", "k", "v", "dout", "cu_seqlens", "cu_seqlens_k"}
        assert file["dout"].shape == (*file["q"].shape[:3], 5)
        for name in ("q", "k", "v", "dout"):
            kind = bfloat16_type() if dtype == "bfloat16" else h5py.h5t.py_create(np.dtype(dtype))
            assert file[name].id.get_type() == kind
            assert 0.7 < file[name][:].std() < 1.3
        assert all(np.array_equal(file[name][:], plain[name][:]) for name in "qkv")
        for name, tokens in (("cu_seqlens", file["q"].shape[1]), ("cu_seqlens_k", 21)):
            cuts = file[name][:]
            assert cuts.dtype == np.int64 and (cuts[0], cuts[-1], len(cuts)) == (0, tokens, 4)
            assert (np.diff(cuts) > 0).all()


@pytest.mark.parametrize("more, shape", [([], (2, 4, 33, 21)), (["--shared-bias"], (1, 4, 33, 21))])
def test_bias(tmp_path, monkeypatch, capsys, more, shape):
    options = ["--batch", "2", "--seqlen-k", "21", "--dtype", "bfloat16"]
    make(tmp_path / "plain.h5", *options)
    make(tmp_path / "a.h5", *options, "--bias", *more)
    monkeypatch.setattr(generate, "PIECE_ELEMENTS", 100)
    make(tmp_path / "b.h5", *options, "--bias", *more)
    assert f"bias {shape} in float32" in capsys.readouterr().out
    with (
        h5py.File(tmp_path / "plain.h5") as plain,
        h5py.File(tmp_path / "a.h5") as file,
        h5py.File(tmp_path / "b.h5") as other,
    ):
        assert file["bias"].shape == shape and file["bias"].dtype == np.float32
        assert 0.9 < file["bias"][:].std() < 1.1 and np.array_equal(file["bias"][:], other["bias"][:])
        assert all(np.array_equal(file[name][:], plain[name][:]) for name in "qkv")
    assert main(["generate", str(tmp_path / "c.h5"), *"--seqlen 9 --heads 1 --shared-bias".split()]) == 1


@pytest.mark.parametrize("piece", [1, 7 * 32, 10**6])
def test_seed_alone_decides(tmp_path, monkeypatch, piece):
    make(tmp_path / "a.h5", "--seed", "3")
    make(tmp_path / "other.h5", "--seed", "4")
    monkeypatch.setattr(generate, "PIECE_ELEMENTS", piece)
    make(tmp_path / "b.h5", "--seed", "3")
    with (
        h5py.File(tmp_path / "a.h5") as a,
        h5py.File(tmp_path / "b.h5") as b,
        h5py.File(tmp_path / "other.h5") as other,
    ):
        assert all(np.array_equal(a[name], b[name]) for name in "qkv")
        assert not np.array_equal(a["q"], other["q"])


@pytest.mark.parametrize(
    "options, says",
    [
        (["--kv-heads", "3"], "--kv-heads is 3"),
        (["--dtype", "int8"], "dtype is 'int8'"),
        (["--batch", "0"], "batch is 0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--documents", "0"], "--documents is 0; it must be from 1"),
        (["--documents", "9", "--seqlen-k", "8"], "--documents is 9; it must be from 1 to 8"),
    ],
)
def test_errors(tmp_path, capsys, options, says):
    assert make(tmp_path / "x.h5", *options) == 1
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_same_bytes(tmp_path):
    for name in ("a.h5", "b.h5"):
        make(tmp_path / name)
        time.sleep(1.1)  # HDF5 would note the second in which a dataset was made
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_no_folder(tmp_path, capsys):
    assert make(tmp_path / "none" / "x.h5") == 1
    assert "there is no folder" in capsys.readouterr().err


def test_disk_full(tmp_path):
    command = [
        "sh",
        "-c",
        'ulimit -f 2; exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "mpiattn",
        "generate",
        str(tmp_path / "x.h5"),
        "--seqlen",
        "1000",
        "--heads",
        "4",
    ]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=launch.patience(60))
    assert outcome.returncode == 1
    assert outcome.stderr.count("\n") == 1 and "FILE is" in outcome.stderr
    assert list(tmp_path.iterdir()) == []


def test_larger_than_memory(tmp_path):
    """200 MB of file by a process that holds much less of it."""
    code = (
        "import sys; from mpiattn.cli import main; from mpiattn.system.memory_limits import peak\n"
        "import h5py, numpy\n"
        "before = peak()\n"
        "assert main(sys.argv[1:]) == 0\n"
        "print(peak() - before)"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", code, "generate", str(tmp_path / "x.h5"), "--seqlen", "32768", "--heads", "8"],
        capture_output=True,
        text=True,
        timeout=launch.patience(60),
        check=True,
    )
    assert 0 < int(outcome.stdout.split()[-1]) < 80e6
