"""The whole library on the compiled CPU kernels: several ranks, forward and backward, every row against float64."""

import sys

import pytest
from files import assert_right, write_input
from launch import ROOT, TESTS, mpirun

from mpiattn.backends.cpu import library

pytestmark = [pytest.mark.workshop, pytest.mark.skipif(library.missing() != "", reason=library.missing())]


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    "selection",
    [["test_kernels.py"], ["test_decode.py"], ["test_planes.py"], ["test_tiles.py", "test_masks.py"]],
    ids=lambda selection: selection[0],
)
def test_ranks(selection):
    """Tiles, routes, documents, sinks, half types, decoding; overlap changes no bit."""
    outcome = mpirun(
        4,
        [
            sys.executable,
            *"-m pytest -q --color=no -p no:cacheprovider --most 2".split(),
            *(TESTS / "mpi" / name for name in selection),
        ],
        timeout=200,
        cwd=ROOT,
        env={"MPIATTN_BACKENDS": "cpu"},
    )
    assert " passed" in outcome.stdout and " failed" not in outcome.stdout, outcome.stdout


@pytest.mark.draw(1)
@pytest.mark.parametrize("kernels", ["plain", None])
def test_commands(tmp_path, kernels):
    """From file to file, verified."""
    source = write_input(tmp_path / "in.h5", seqlen=131, batch=2, dtype="bfloat16", backward=True)
    outcome = mpirun(
        3,
        [
            sys.executable,
            "-m",
            "mpiattn",
            "run",
            source,
            tmp_path / "out.h5",
            "--backward",
            "--verify",
            "--causal",
            "--backend",
            "cpu",
        ],
        timeout=120,
        env={library.VARIABLE: kernels} if kernels else {},
    )
    assert "passed" in outcome.stdout and "cpu back end" in outcome.stdout
    assert_right(source, tmp_path / "out.h5", True, None, 3e-2, True)
