"""`--axes bhsd`: files whose tensors are (batch, heads, seqlen, head_dim), in and out."""

import sys

import h5py
import numpy as np
import pytest
from files import assert_right, write_input
from launch import mpirun

RUN = [sys.executable, "-m", "mpiattn", "run"]


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
    decode = [sys.executable, "-m", "mpiattn", "decode"]
    outcome = mpirun(2, [*decode, *files.values(), tmp_path / "out.h5", "--verify", "--padding"])
    assert "7 more tokens of CACHE" in outcome.stdout
    other = [turned(path, tmp_path / f"{name}_bhsd.h5") for name, path in files.items()]
    mpirun(2, [*decode, *other, tmp_path / "out_bhsd.h5", "--verify", "--padding", "--axes", "bhsd"])
    with h5py.File(tmp_path / "out.h5") as natural, h5py.File(tmp_path / "out_bhsd.h5") as made:
        assert np.array_equal(natural["out"][:].swapaxes(1, 2), made["out"][:])
        assert np.array_equal(natural["lse"][:], made["lse"][:])


@pytest.mark.parametrize(
    "shape, options, says",
    [
        ({"seqlen": 4, "heads": 300, "kv_heads": 2}, [], "IN has heads 300 and seqlen 4; "),
        ({"seqlen": 4, "seqlen_k": 3, "kv_heads": 4}, [], "IN has kv_heads 4 and seqlen_k 3; "),
        ({"seqlen": 4, "heads": 300, "kv_heads": 2}, ["--axes", "bshd"], None),
        ({"seqlen": 4}, [], None),
    ],
)
def test_more_heads_than_tokens(tmp_path, shape, options, says):
    """What PyTorch's order looks like is said, once; who says what it is is not warned."""
    outcome = mpirun(2, [*RUN, write_input(tmp_path / "in.h5", **shape), tmp_path / "out.h5", *options])
    warned = [line for line in outcome.stderr.splitlines() if "--axes" in line]
    assert len(warned) == (says is not None)
    if says:
        assert f"mpiattn run: WARNING: {says}" in warned[0] and "add --axes bhsd" in warned[0]


def test_shapes_that_do_not_fit(tmp_path):
    """They are told in the order in which they are meant to be."""
    source = write_input(tmp_path / "in.h5", batch=2, seqlen=30, v=np.zeros((2, 2, 31, 16), "f4"))
    outcome = mpirun(2, [*RUN, source, tmp_path / "out.h5", "--axes", "bhsd"], check=False)
    assert outcome.returncode == 1
    assert "(2, 2, 31, 16); they must be q (batch, heads, seqlen, head_dim), k (batch, kv_heads" in outcome.stderr
