"""Files that other programs write: locked, of another format, compressed in other ways, fields without a batch."""

import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
import warm
from files import write_input
from launch import mpirun

from mpiattn.errors import FileError
from mpiattn.files.numbers import Numbers
from mpiattn.files.shapes import read_shapes
from mpiattn.files.tensor_files import open_tensors

RUN = [sys.executable, "-m", "mpiattn", "run"]


# Locks


@pytest.mark.parametrize("n", [1, 3])
def test_open_for_writing_elsewhere(tmp_path, n):
    source = write_input(tmp_path / "in.h5")
    with h5py.File(source, "a", locking=True):
        outcome = mpirun(n, [*RUN, source, tmp_path / "out.h5"], check=False)
    assert outcome.returncode == 1 and outcome.stderr.count("mpiattn") == 1, outcome.stderr
    assert "IN is" in outcome.stderr and "another program has it open for writing, and has locked it" in outcome.stderr
    assert "HDF5_USE_FILE_LOCKING=FALSE" in outcome.stderr


@pytest.fixture(scope="module")
def no_locks(tmp_path_factory):
    """A library of which flock fails, as on file systems without locks; errno is in a variable."""
    folder = tmp_path_factory.mktemp("locks")
    (folder / "no_locks.c").write_text(
        "#include <errno.h>\n#include <stdlib.h>\n"
        'int flock(int file, int how) { errno = atoi(getenv("FLOCK_ERRNO")); return -1; }\n'
    )
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", folder / "no_locks.so", folder / "no_locks.c"], check=True, timeout=60
    )
    return folder / "no_locks.so"


@pytest.mark.parametrize("name", ["EOPNOTSUPP", "ENOLCK"])
def test_no_locks(tmp_path, no_locks, name):
    import errno

    source = write_input(tmp_path / "in.h5")
    env = {"LD_PRELOAD": str(no_locks), "FLOCK_ERRNO": str(getattr(errno, name))}
    look = f"from mpiattn.files.shapes import read_shapes; print(read_shapes({str(source)!r})[1])"
    failed = subprocess.run(
        [sys.executable, "-c", look], env=os.environ | env, capture_output=True, text=True, timeout=60
    )
    assert "IN is" in failed.stderr and "its file system has no locks" in failed.stderr
    assert "HDF5_USE_FILE_LOCKING=FALSE" in failed.stderr
    env["HDF5_USE_FILE_LOCKING"] = "FALSE"  # as the message says
    done = subprocess.run(
        [sys.executable, "-c", look], env=os.environ | env, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "bshd\n"


def test_a_writer_that_was_killed(tmp_path):
    source = tmp_path / "in.h5"
    write = (
        "import h5py, os, sys\n"
        "file = h5py.File(sys.argv[1], 'w', libver='latest')\n"
        "file['q'] = 1\n"
        "file.flush()\n"
        "os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", write, source], check=True, timeout=60)
    with pytest.raises(FileError, match=r"a program that writes it has not closed it, or was killed.*h5clear -s"):
        read_shapes(source)


# Other formats


@pytest.mark.parametrize("magic", [b"CDF\x01", b"CDF\x02", b"CDF\x05"])
def test_netcdf_3(tmp_path, magic):
    source = tmp_path / "in.nc"
    source.write_bytes(magic + bytes(100))
    for read in (lambda: read_shapes(source), lambda: open_tensors(source).__enter__()):
        with pytest.raises(FileError, match=r"IN is .*it is a netCDF-3 file; `nccopy -k nc4` makes"):
            read()


# Filters


def filtered(path, number, name=b""):
    """A file whose q, k, v have gone through a filter that HDF5 does not have."""
    with h5py.File(path, "w") as file:
        for role in "qkv":
            how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            how.set_chunk((1, 8, 2, 4))
            how.set_filter(number, h5py.h5z.FLAG_OPTIONAL)
            space = h5py.h5s.create_simple((1, 16, 2, 4))
            data = h5py.h5d.create(file.id, role.encode(), h5py.h5t.NATIVE_FLOAT, space, how)
            for first in (0, 8):
                data.write_direct_chunk((0, first, 0, 0), b"compressed", filter_mask=0)
    return path


@pytest.mark.parametrize(
    "number, name", [(32001, "Blosc"), (32015, "Zstandard"), (32004, "LZ4"), (307, "bzip2"), (299, "unknown")]
)
def test_a_filter_that_is_missing(tmp_path, monkeypatch, number, name):
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    source = filtered(tmp_path / "in.h5", number)
    said = f"IN is .*its dataset 'q' needs the filter {name} \\(number {number}\\).*hdf5plugin.*HDF5_PLUGIN_PATH"
    with pytest.raises(FileError, match=said):
        read_shapes(source)
    with pytest.raises(FileError, match=said), open_tensors(source) as tensors:
        tensors["q"].read((0, slice(0, 1)))


def test_a_filter_that_was_left_out(tmp_path):
    """An optional filter need not have worked on any chunk."""
    source = filtered(tmp_path / "in.h5", 299)
    numbers = np.arange(64, dtype=np.float32).reshape(1, 8, 2, 4)
    with h5py.File(source, "r+") as file:
        for role in "qkv":
            for first in (0, 8):
                file[role].id.write_direct_chunk((0, first, 0, 0), numbers.tobytes(), filter_mask=1)
    assert read_shapes(source)[0]["seqlen"] == 16
    with h5py.File(source) as file:
        assert np.array_equal(Numbers.of(file, "q").read((0, 8, 0, 0), (1, 8, 2, 4)), numbers)


def test_run_says_it_before_the_plan(tmp_path):
    source = filtered(tmp_path / "in.h5", 32008)
    outcome = warm.command(2, ["run", source, tmp_path / "out.h5"], check=False)
    assert outcome.returncode == 1 and "Bitshuffle" in outcome.stderr
    assert "predicted" not in outcome.stdout


# Fields without a batch


@pytest.mark.draw(8)
@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("axes", ["bshd", "bhsd"])
@pytest.mark.parametrize("grid", [(5, 6), (3, 2, 5), (30,)], ids=str)
@pytest.mark.parametrize("how", [{}, {"chunks": True, "compression": "gzip"}], ids=["plain", "compressed"])
def test_field_without_a_batch(tmp_path, n, axes, grid, how):
    """OUT has no batch axis either, and the bits of a batch of one."""
    rng, sources, outs = np.random.default_rng(0), [], []
    arrays = {name: rng.standard_normal((*grid, 2, 8), np.float32) for name in ("q", "k", "v", "dout")}
    if axes == "bhsd":
        arrays = {name: np.moveaxis(array, -2, 0) for name, array in arrays.items()}
    options = ["--grid", "x".join(map(str, grid)), "--axes", axes, "--backward"]
    for batch in (False, True):
        sources.append(tmp_path / f"in{batch}.h5")
        outs.append(tmp_path / f"out{batch}.h5")
        with h5py.File(sources[-1], "w") as file:
            for name, array in arrays.items():
                file.create_dataset(name, data=array[None] if batch else array, **how)
        outcome = warm.command(n, ["run", sources[-1], outs[-1], *options, "--verify"])
        assert outcome.stdout.count("passed") == 2
    with h5py.File(outs[0]) as alone, h5py.File(outs[1]) as batched:
        assert set(alone) == set(batched) == {"out", "lse", "dq", "dk", "dv"}
        for name in alone:
            assert np.array_equal(alone[name][...], batched[name][0])


def test_field_in_c_order_without_a_batch(tmp_path):
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "in.h5", "w") as file:
        for name in "qkv":
            file[name] = rng.standard_normal((30, 2, 8), np.float32)
    warm.command(2, ["run", tmp_path / "in.h5", tmp_path / "out.h5", "--grid", "5x6", "--verify"])
    with h5py.File(tmp_path / "out.h5") as file:
        assert (file["out"].shape, file["lse"].shape) == ((30, 2, 8), (2, 30))
    outcome = warm.command(2, ["run", tmp_path / "in.h5", tmp_path / "none.h5"], check=False)
    assert "its shapes do not fit" in outcome.stderr  # without a grid nothing says that there is no batch
