"""`--axes bhsd`: files whose tensors are (batch, heads, seqlen, head_dim), in and out."""

import sys

import h5py
import numpy as np
import pytest
import warm
from files import assert_right, write_input
from launch import mpirun
from mpi4py import MPI

import mpiattn
from mpiattn import ArgumentError, FileError
from mpiattn.cli import main
from mpiattn.decode.cache_file import read_cache_shapes
from mpiattn.files import hdf5, shapes


def turned(source, path, but=("lse",)):
    """A copy of a file whose tensors have their middle axes exchanged."""
    with h5py.File(source) as given, h5py.File(path, "w") as made:
        for name, data in given.items():
            if data.ndim == 4 and name not in but:
                kind, data = data.id.get_type(), data[:].swapaxes(1, 2)
                h5py.h5d.create(made.id, name.encode(), kind, h5py.h5s.create_simple(data.shape))
                made[name][...] = data
            else:
                made[name] = data[...]
        made.attrs.update(given.attrs)
    return path


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    "n, options, shape",
    [
        (1, [], {"dtype": "bfloat16"}),
        (3, ["--causal", "--backward"], {"batch": 2, "value_dim": 24, "backward": True, "dtype": "float64"}),
        (4, ["--causal", "--tile", "2x2", "--layout", "striped"], {"seqlen_k": 101, "kv_heads": 1}),
    ],
)
def test_right(tmp_path, n, options, shape):
    """In several pieces, and verified; OUT has the axes of IN."""
    natural = write_input(tmp_path / "natural.h5", **shape)
    source = turned(natural, tmp_path / "in.h5")
    code = (
        "import mpiattn.comm.rounds as r; r.PIECE_BYTES = 5_000; "
        "import sys; from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    outcome = mpirun(
        n, [sys.executable, "-c", code, "run", source, tmp_path / "out.h5", "--axes", "bhsd", "--verify", *options]
    )
    assert "passed" in outcome.stdout and "--axes" not in outcome.stderr
    attributes = assert_right(
        natural,
        turned(tmp_path / "out.h5", tmp_path / "turned.h5"),
        "--causal" in options,
        backward="--backward" in options,
        tolerance={"bfloat16": 1e-2}.get(shape.get("dtype"), 1e-5),
    )
    assert attributes["axes"] == "bhsd"


def test_decode(tmp_path):
    """CACHE, QUERIES and OUT alike."""
    files = {
        "cache": write_input(tmp_path / "cache.h5", cu_seqlens=[0, 40, 60]),
        "q": write_input(tmp_path / "q.h5", batch=2, seqlen=3, k=None, v=None),
    }
    outcome = warm.command(2, ["decode", *files.values(), tmp_path / "out.h5", "--verify", "--padding"])
    assert "7 more tokens of CACHE" in outcome.stdout
    other = [turned(path, tmp_path / f"{name}_bhsd.h5") for name, path in files.items()]
    warm.command(2, ["decode", *other, tmp_path / "out_bhsd.h5", "--verify", "--padding", "--axes", "bhsd"])
    with h5py.File(tmp_path / "out.h5") as natural, h5py.File(tmp_path / "out_bhsd.h5") as made:
        assert np.array_equal(natural["out"][:].swapaxes(1, 2), made["out"][:])
        assert np.array_equal(natural["lse"][:], made["lse"][:])


def of(shape, path):
    """A file of q, k and v, of these shapes."""
    sizes = {"seqlen": 67, "heads": 4, "kv_heads": 2, **shape}
    return write_input(path, **sizes)


@pytest.mark.parametrize(
    "shape, says",
    [
        (
            {"seqlen": 4, "heads": 300, "kv_heads": 2, "seqlen_k": 2},
            "its q would have 300 heads and 4 tokens; say --axes",
        ),
        ({"seqlen": 4, "seqlen_k": 2, "heads": 4, "kv_heads": 4}, "its k would have 4 heads and 2 tokens; say --axes"),
        ({"seqlen": 4, "heads": 300, "kv_heads": 150}, "its q would have 300 heads and 4 tokens; say --axes"),
        ({"seqlen": 4, "kv_heads": 4, "heads": 8}, None),
        ({"seqlen": 3}, None),
        ({"seqlen": 1, "heads": 8, "seqlen_k": 50}, None),  # of 50 heads of keys, which do not divide 1
        ({"seqlen": 2, "heads": 8, "seqlen_k": 3, "kv_heads": 8}, None),
    ],
)
def test_an_order_that_nobody_says(tmp_path, shape, says):
    """Who says what it is may have any shape, and so may a file that says it."""
    path = of(shape, tmp_path / "in.h5")
    if says is None:
        assert shapes.read_shapes(path)[1] == "bshd"
    else:
        with pytest.raises(FileError) as caught:
            shapes.read_shapes(path)
        assert str(caught.value).startswith(f"IN is {str(path)!r}; {says} bhsd if it is (batch, heads, seqlen, ")
    assert shapes.read_shapes(path, "bshd")[0]["seqlen"] == shape["seqlen"]
    with h5py.File(path, "r+") as file:
        file.attrs["axes"] = "bshd"
    assert shapes.read_shapes(path)[0]["seqlen"] == shape["seqlen"]
    with pytest.raises(FileError, match="its attribute axes is 'bshd', but the call says 'bhsd'"):
        shapes.read_shapes(path, "bhsd")


def test_the_order_of_a_cache(tmp_path):
    """Of keys alone; what mpiattn writes says its order."""
    path = write_input(tmp_path / "cache.h5", seqlen=3, kv_heads=5, q=None)
    with pytest.raises(FileError, match='its k would have 5 heads and 3 tokens; say axes="bhsd" if it is'):
        read_cache_shapes(path)
    assert [read_cache_shapes(path, axes)[0]["kv_heads"] for axes in hdf5.AXES] == [5, 3]
    with pytest.raises(ArgumentError, match="axes is 'bsdh'; it may be bshd, bhsd"):
        read_cache_shapes(path, "bsdh")
    with mpiattn.KVCache(MPI.COMM_SELF, capacity=3, kv_heads=5, head_dim=2) as cache:
        cache.append(*np.ones((2, 1, 3, 5, 2), np.float32))
        cache.save(path)
    with mpiattn.KVCache.load(MPI.COMM_SELF, path) as cache:
        assert cache.lengths == (3,)
    assert main(["generate", str(path), "--seqlen", "2", "--heads", "5"]) == 0
    assert read_cache_shapes(path)[0]["kv_heads"] == 5


def test_every_command_refuses(tmp_path, capsys):
    """By the same rule; decode reads CACHE by it, and QUERIES as CACHE."""
    wrong = turned(write_input(tmp_path / "in.h5"), tmp_path / "wrong.h5")
    out, says = tmp_path / "out.h5", "heads and {} tokens; say --axes bhsd if it is (batch, heads, seqlen, head_dim)"
    assert main(["convert", str(wrong), str(out)]) == 1
    assert "its q would have 67 " + says.format(4) in capsys.readouterr().err
    assert main(["convert", str(wrong), str(out), "--only", "k,v"]) == 1
    assert "its k would have 67 " + says.format(2) in capsys.readouterr().err
    assert main(["convert", str(wrong), str(out), "--only", "q"]) == 0  # queries may be a few, of many heads
    for command, of_command in ((["run"], []), (["decode"], [wrong])):
        outcome = warm.command(2, [*command, wrong, *of_command, tmp_path / "no.h5"], check=False)
        assert outcome.returncode == 1 and outcome.stderr.count(says.format(4 if command == ["run"] else 2)) == 1


def test_shapes_that_do_not_fit(tmp_path):
    """They are told in the order in which they are meant to be."""
    source = write_input(tmp_path / "in.h5", batch=2, seqlen=30, v=np.zeros((2, 2, 31, 16), "f4"))
    outcome = warm.command(2, ["run", source, tmp_path / "out.h5", "--axes", "bhsd"], check=False)
    assert outcome.returncode == 1
    assert "(2, 2, 31, 16); they must be q (batch, heads, seqlen, head_dim), k (batch, kv_heads" in outcome.stderr
