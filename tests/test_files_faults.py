"""Files that change, fail or hold odd numbers while `mpiattn run` works: an error on every rank, or it is said."""

import json
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import warm
from files import assert_right, bfloat16_type, write_input
from launch import mpirun

from mpiattn.verify import reference

RUN = [sys.executable, "-m", "mpiattn", "run"]
MAIN = "import sys; from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"


def driver(*lines):
    """A command line that changes something in mpiattn first."""
    return [sys.executable, "-c", "\n".join([*lines, MAIN])]


def fails(n, command, *arguments):
    """Run what must fail with code 1; returns the one line that says why."""
    outcome = mpirun(n, [*command, *arguments], check=False)
    assert outcome.returncode == 1, outcome
    said = [line for line in outcome.stderr.splitlines() if line.startswith("mpiattn")]
    assert len(said) == 1 and "Traceback" not in outcome.stderr, outcome.stderr
    return said[0]


def left_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# IN is cut short


def cut_at_read(argument, length):
    """Lines that cut a file short, as another process would, before it is read: by HDF5, or where it lies."""
    return (
        "import os, sys, mpiattn.files.hdf5 as h, mpiattn.files.own_tokens as t",
        "def cut(read):",
        "    def short(*args):",
        f"        os.truncate(sys.argv[{argument}], {length})",
        "        return read(*args)",
        "    return short",
        "h.read, t.OwnTokens.read = cut(h.read), cut(t.OwnTokens.read)",
    )


BY_HDF5 = ("import mpiattn.files.access as access; access.on_one_host = lambda *_: False",)
CUT_AT_READ = cut_at_read(2, 40_000)
CUT_AT_VERIFY = (
    "import os, sys, mpiattn.verify.compare as v; verify = v.verify",
    "def cut(peers, *args, **how):",
    "    os.truncate(sys.argv[2], 40_000)",
    "    peers.barrier()",
    "    return verify(peers, *args, **how)",
    "v.verify = cut",
)


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    "lines", [CUT_AT_READ, BY_HDF5 + CUT_AT_READ, CUT_AT_VERIFY], ids=["read", "by HDF5", "verify"]
)
def test_in_is_cut_short_while_it_is_read(tmp_path, lines):
    """HDF5 gives zeros for what is not there, and again to --verify."""
    source = write_input(tmp_path / "in.h5", seqlen=200)
    message = fails(2, driver(*lines), "run", source, tmp_path / "out.h5", "--verify")
    assert f"IN is {str(source)!r}; it was cut short: its datasets end at byte " in message
    assert "it holds 40000" in message
    assert left_in(tmp_path) == ["in.h5"]


@pytest.mark.parametrize("argument, victim", [("CACHE", 0), ("QUERIES", 1)])
def test_cache_and_queries_are_cut_short(tmp_path, argument, victim):
    files = [write_input(tmp_path / "cache.h5"), write_input(tmp_path / "q.h5", k=None, v=None, seqlen=30)]
    message = fails(2, driver(*cut_at_read(2 + victim, 4000)), "decode", *files, tmp_path / "out.h5")
    assert f"{argument} is {str(files[victim])!r}; it was cut short" in message
    assert left_in(tmp_path) == ["cache.h5", "q.h5"]


def test_in_was_cut_short_before(tmp_path):
    source = write_input(tmp_path / "in.h5", seqlen=200)
    with open(source, "r+b") as file:
        file.truncate(40_000)
    assert "IN is" in fails(2, RUN, source, tmp_path / "out.h5")
    assert left_in(tmp_path) == ["in.h5"]


def test_compressed_and_chunked_input(tmp_path):
    source = write_input(tmp_path / "in.h5")
    with h5py.File(source, "r+") as file:
        for name in "qkv":
            data = file[name][:]
            del file[name]
            file.create_dataset(name, data=data, chunks=(1, 16, 1, 16), compression="gzip")
    warm.command(2, ["run", source, tmp_path / "out.h5", "--verify"])
    assert_right(source, tmp_path / "out.h5")


# Numbers that are not finite


def test_not_finite_is_said(tmp_path):
    """NaN is computed, not refused; but nobody takes it for a verified result unawares."""
    rng = np.random.default_rng(0)
    q, v = (rng.standard_normal((1, 67, heads, 16)).astype("f4") for heads in (4, 2))
    q[0, 5, 1, 3], q[0, 40, 0, 0], v[0, 7, 0, 2] = np.nan, np.inf, -np.inf
    source = write_input(tmp_path / "in.h5", backward=True, q=q, v=v)
    outcome = mpirun(
        3, [*RUN, source, tmp_path / "out.h5", "--verify", "--causal", "--backward", "--json", tmp_path / "run.json"]
    )
    warned = [line for line in outcome.stderr.splitlines() if "NaN" in line]
    assert len(warned) == 1 and "WARNING" in warned[0], outcome.stderr
    assert "NaN or infinite: 2 in q, 1 in v, " in warned[0]
    assert "NaN or infinite elements: 2 in q, 1 in v, " in outcome.stdout
    assert "rows are NaN or infinite on both sides" in outcome.stdout
    report = json.loads((tmp_path / "run.json").read_text())
    with h5py.File(tmp_path / "out.h5") as made:
        odd = {name: ~np.isfinite(made[name][:]) for name in ("out", "dq", "dk", "dv")}
        lse = int((np.isnan(made["lse"][:]) | np.isposinf(made["lse"][:])).sum())
    assert lse > 0
    assert report["nonfinite"] == {
        "q": 2,
        "k": 0,
        "v": 1,
        "dout": 0,
        "out": int(odd["out"].sum()),
        "lse": lse,
        **{name: int(odd[name].sum()) for name in ("dq", "dk", "dv")},
    }
    assert report["verify"]["passed"] and report["verify"]["nonfinite"] == odd["out"].any(axis=(0, 2, 3)).sum() > 0
    assert report["verify_gradients"]["nonfinite_rows"] == odd["dq"].any(axis=(0, 2, 3)).sum() > 0


def test_rows_that_see_no_key_are_finite(tmp_path):
    """Their lse is -inf, as it must be."""
    source = write_input(tmp_path / "in.h5", seqlen=40, seqlen_k=20)
    outcome = warm.command(2, ["run", source, tmp_path / "out.h5", "--causal", "--verify", "--json", "-"])
    assert set(json.loads(outcome.stdout)["nonfinite"].values()) == {0}
    assert "NaN" not in outcome.stderr


# Types


def test_bfloat16_as_h5py_writes_it(tmp_path):
    """Arrays of ml_dtypes.bfloat16 become opaque elements of 2 bytes."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    rng = np.random.default_rng(0)
    drawn = {name: rng.standard_normal((1, 300, 2, 16)).astype(bfloat16) for name in "qkv"}
    source = write_input(tmp_path / "in.h5", **drawn)
    outcome = warm.command(2, ["run", source, tmp_path / "out.h5", "--verify"])
    assert "bfloat16" in outcome.stdout and "passed" in outcome.stdout
    right = reference.attention(*(array.astype("f8") for array in drawn.values()))[0]
    with h5py.File(tmp_path / "out.h5") as made:
        assert made["out"].id.get_type() == bfloat16_type()
        assert np.abs(made["out"][:] - right).max() < 1e-2 * np.abs(right).max()


def test_other_opaque_elements(tmp_path):
    source = write_input(tmp_path / "in.h5", k=np.zeros((1, 67, 2, 16), "V3"))
    assert "float32, opaque elements of 3 bytes, float32; they must" in fails(2, RUN, source, tmp_path / "out.h5")


# Writing fails

# From the first tensor on, what HDF5 writes to OUT is refused, as by a file system that has become read-only.
REFUSED = (
    "import os, sys, mpiattn.files.hdf5 as h; write = h.write",
    "def refused(dataset, *args, **how):",
    "    descriptor = os.open(dataset.file.filename, os.O_RDONLY)",
    "    os.dup2(descriptor, dataset.file.id.get_vfd_handle())",
    "    return write(dataset, *args, **how)",
    "h.write = refused",
)


@pytest.mark.parametrize("n", [1, 2])
def test_writing_is_refused(tmp_path, n):
    """One message and code 1, and no SIGSEGV when HDF5 exits with a file that it cannot close."""
    source = write_input(tmp_path / "in.h5")
    message = fails(n, driver(*BY_HDF5, *REFUSED), "run", source, tmp_path / "out.h5")
    assert "OUT is" in message and "cannot be written: Bad file descriptor" in message
    assert left_in(tmp_path) == ["in.h5"]


@pytest.mark.parametrize("victim", [0, 1])
def test_writing_where_it_lies_is_refused(tmp_path, victim):
    """On one rank, after the first tensor."""
    refused = (
        "import errno, mpiattn.files.staged as s; write, calls = s.StagedFile.write, []",
        "from mpi4py import MPI",
        "def refused(self, *args):",
        "    calls.append(1)",
        f"    if MPI.COMM_WORLD.rank == {victim} and len(calls) > 1:",
        "        raise OSError(errno.EIO, 'Input/output error')",
        "    return write(self, *args)",
        "s.StagedFile.write = refused",
    )
    source = write_input(tmp_path / "in.h5")
    message = fails(2, driver(*refused), "run", source, tmp_path / "out.h5")
    assert "OUT is" in message and "cannot be written: Input/output error" in message
    assert left_in(tmp_path) == ["in.h5"]


def test_generate_is_refused(tmp_path):
    message = fails(1, driver(*REFUSED), "generate", tmp_path / "x.h5", "--seqlen", "50", "--heads", "2")
    assert "FILE is" in message and "cannot be written: Bad file descriptor" in message
    assert left_in(tmp_path) == []


# A limit for the length of a file


@pytest.mark.parametrize("command", ["run", "generate"])
def test_a_file_longer_than_allowed(tmp_path, command):
    """The reason is the first error, and not that of closing the file, which also is in memory then."""
    limit = 2**18
    limited = driver(  # once MPI has its files
        "import resource",
        "from mpiattn.files import hdf5",
        "create = hdf5.create_datasets",
        "def limited(*arguments):",
        f"    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))",
        "    create(*arguments)",
        "hdf5.create_datasets = limited",
        "from mpiattn.files import output",
        "output.create_datasets = limited",
    )
    out = tmp_path / "out.h5"
    if command == "run":
        write_input(tmp_path / "in.h5", seqlen=500, heads=8, backward=True)
        said = fails(2, [*limited, "run"], tmp_path / "in.h5", out, "--backward")
    else:
        said = fails(1, limited, "generate", out, "--seqlen", "1000", "--heads", "8")
    assert f"is {str(out)!r}; it cannot be written: File too large: this process may write files of" in said
    assert f"at most {limit} bytes (ulimit -f)" in said
    assert left_in(tmp_path) == ["in.h5"][: command == "run"]
