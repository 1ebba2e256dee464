"""The paced back end: NumPy's results, no sooner than its speed allows."""

import time

import numpy as np
import pytest

from mpiattn import ArgumentError, backends
from mpiattn.backends.block import BackwardInputs, BlockInputs, Gradients

RNG = np.random.default_rng(0)
TOKENS, HEADS, DIM = 32, 4, 8
PAIRS = TOKENS * (TOKENS + 1) // 2  # of one head, causal


def chunks():
    return [RNG.standard_normal((TOKENS, heads, DIM)).astype(np.float32) for heads in (HEADS, 2, 2)]


def intervals(groups=1):
    return np.zeros((groups, TOKENS), np.int32), np.tile(np.arange(1, TOKENS + 1, dtype=np.int32), (groups, 1))


def blocks(backend, arrays, count, backward=False, groups=1, meanwhile=None):
    """(results, seconds) of some blocks of two heads a group."""
    q, k, v = arrays
    out, lse = np.empty((TOKENS, HEADS, DIM), np.float32), np.empty((TOKENS, HEADS), np.float32)
    backend.clear(out, lse)
    grads = Gradients(*(np.zeros(array.shape, np.float32) for array in arrays))
    block = BlockInputs(q, k, v, *intervals(groups), 0.3)
    start = time.perf_counter()
    for _ in range(count):
        if backward:
            given = BackwardInputs(q, np.full_like(lse, 3), np.zeros_like(lse))
            backend.attend_backward(block, given, grads, meanwhile=meanwhile)
        else:
            backend.attend(block, out, lse, meanwhile=meanwhile)
    return [out, lse, *grads], time.perf_counter() - start


@pytest.mark.parametrize("backward", [False, True])
def test_same_results_no_sooner(backward):
    """Time is what the attended pairs of every head take: less than that by the slack of the first launch at most."""
    arrays, looks = chunks(), []
    seconds = (2.5 if backward else 1) * 4 * DIM * PAIRS * HEADS / 1e7  # 6.8 ms, 17 ms
    paced = backends.get("paced:0.01")
    for groups in (1, 2):
        results, took = blocks(paced, arrays, 3, backward, groups, looks.append)
        expected, _ = blocks(backends.get("numpy"), arrays, 3, backward, groups)
        assert all(np.array_equal(*pair) for pair in zip(results, expected))
        assert took >= 2.9 * seconds
    assert len(looks) >= 6 and min(looks) == 0 and max(looks) == 1
    assert paced.name == "paced:0.01" and paced.emulated_flops == 1e7


@pytest.mark.parametrize(
    "name",
    ["paced:", "paced:0", "paced:-1", "paced:fast", "paced:inf", "paced:nan", "paced:1:", "paced:1:0", "paced:1:2:3"],
)
def test_wrong_speeds(name):
    with pytest.raises(ArgumentError, match="paced"):
        backends.get(name)
    assert backends.get("numpy").emulated_flops is None
