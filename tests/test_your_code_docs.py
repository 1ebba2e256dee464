"""The page for existing MPI codes: its program, on any number of ranks, and without attention."""

import re
import sys

import launch
import numpy as np
import pytest

PROGRAM = launch.DOCS / "your_code.py"
pytestmark = pytest.mark.skipif(not PROGRAM.is_file(), reason="takes the docs of a checkout")


def dense(steps):
    """What the program prints, by NumPy in float64 alone."""
    rng = np.random.default_rng(1)
    make = rng.standard_normal((3, 3, 16), np.float32).astype(float)
    read = rng.standard_normal((16, 3), np.float32).astype(float) / 50
    x, means = np.random.default_rng(0).random((300, 3), np.float32).astype(float), []
    for _ in range(steps):
        q, k, v = (x @ make).reshape(3, len(x), 2, 8).swapaxes(1, 2)
        weight = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(8))
        out = (weight / weight.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(len(x), 16)
        leaves = x[:, 0] > 0.9
        x = np.where(leaves[:, None], x + 0.05, x + out @ read) % 1
        means.append(x.mean(0))
    return np.array(means)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_particles_are_those_of_dense_attention(ranks):
    text = launch.mpirun(ranks, [sys.executable, PROGRAM, "--steps", "3"]).stdout
    means = re.findall(r"^step \d: 300 particles, mean (\S+) (\S+) (\S+)$", text, re.MULTILINE)
    assert len(means) == 3
    assert np.abs(np.array(means, float) - dense(3)).max() < 2e-4
