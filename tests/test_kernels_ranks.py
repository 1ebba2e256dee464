"""The whole library on the emulated kernels: several ranks, forward and backward, every row against float64."""

import sys

import pytest
import warm
from files import assert_right, write_input
from launch import mpirun

from mpiattn.backends.testing import emulated

pytestmark = [
    pytest.mark.workshop,
    pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler"),
]
RUN = [sys.executable, "-m", "mpiattn", "run"]


@pytest.mark.draw(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "n, options",
    [
        (4, ["--causal", "--tile", "2x2", "--schedule", "greedy", "--layout", "striped"]),
        (3, ["--tile", "3x1", "--schedule", "collective", "--window", "20,5"]),
        (4, ["--causal", "--tile", "2x1x2", "--layout", "contiguous", "--mesh-layout", "zigzag"]),
    ],
)
def test_right(tmp_path, dtype, n, options):
    source = write_input(tmp_path / "in.h5", seqlen=131, batch=2, dtype=dtype, backward=True)
    outcome = mpirun(
        n, [*RUN, source, tmp_path / "out.h5", "--backend", "emulated", "--backward", "--verify", *options], timeout=120
    )
    assert "passed" in outcome.stdout
    window = {"window": (20, 5)} if "--window" in options else {}
    assert_right(
        source, tmp_path / "out.h5", "--causal" in options, None, 3e-2 if dtype == "bfloat16" else 1e-5, True, **window
    )


def test_what_the_kernels_do_not_take(tmp_path):
    source = write_input(tmp_path / "in.h5", dtype="float64")
    outcome = warm.command(2, ["run", source, tmp_path / "out.h5", "--backend", "emulated"], check=False)
    assert outcome.returncode and "dtype is float64" in outcome.stderr
