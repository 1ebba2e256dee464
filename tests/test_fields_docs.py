"""The page on fields: its program, its code, and what it says of bytes."""

import re
import runpy
import sys

import launch
import numpy as np
import pytest

from mpiattn import Layout

pytestmark = pytest.mark.skipif(not launch.DOCS.is_dir(), reason="takes the docs of a checkout")
GRID, WINDOW, STEPS = (13, 17), 5, 20


def printed(ranks, cyclic, *options):
    """The norms that the program prints: (attentions, 3)."""
    words = ["--grid", *GRID, "--window", WINDOW, "--steps", STEPS, "--cyclic", *cyclic, *options]
    command = [sys.executable, launch.DOCS / "heat_attention.py", *map(str, words)]
    text = launch.mpirun(ranks, command, timeout=60).stdout
    norms = re.findall(r"^step \d+: \|T\| (\S+) +loss (\S+) +\|gradient\| (\S+)$", text, re.M)
    assert len(norms) == STEPS // 10
    return np.array(norms, float)


def dense(cyclic):
    """The same of the whole grid in float64, by NumPy alone."""
    rng, modes = np.random.default_rng(0), ["wrap" if axis in cyclic else "edge" for axis in (0, 1)]
    make = rng.standard_normal((3, 4, 16), np.float32).astype(float) / 2
    read = rng.standard_normal(16, np.float32).astype(float) / 16
    y, x = (2 * np.pi * np.arange(n) / n for n in GRID)
    t = np.cos(y[:, None] - 1) + np.exp(np.sin(2 * x)) * np.sin(3 * y[:, None])

    def padded():
        return np.pad(np.pad(t, ((1, 1), (0, 0)), modes[0]), ((0, 0), (1, 1)), modes[1])

    def seen(axis):
        n, i = GRID[axis], np.arange(GRID[axis])
        if axis in cyclic:
            return (i - i[:, None] + WINDOW // 2) % n < WINDOW
        first = np.clip(i - WINDOW // 2, 0, n - WINDOW)[:, None]
        return (first <= i) & (i < first + WINDOW)

    sees, norms = np.kron(seen(0), seen(1)), []
    for step in range(1, STEPS + 1):
        p = padded()
        t = t + 0.2 * (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * t)
        if step % 10:
            continue
        p = padded()
        dy, dx = (p[2:, 1:-1] - p[:-2, 1:-1]) / 2, (p[1:-1, 2:] - p[1:-1, :-2]) / 2
        features = np.stack([t, dy, dx, np.ones(GRID)], -1).reshape(-1, 4)
        q, k, v = (features @ make).reshape(3, -1, 2, 8).swapaxes(1, 2)  # each (heads, points, dim)
        weight = np.where(sees, np.exp(q @ k.swapaxes(1, 2) / np.sqrt(8)), 0)
        weight /= weight.sum(-1, keepdims=True)
        change = (weight @ v).swapaxes(0, 1).reshape(-1, 16) @ read
        t = t + 0.5 * change.reshape(GRID)
        dout = (change[:, None] * read / change.size).reshape(-1, 2, 8).swapaxes(0, 1)
        dweight = dout @ v.swapaxes(1, 2)
        dscore = weight * (dweight - (weight * dweight).sum(-1, keepdims=True)) / np.sqrt(8)
        d = np.stack([dscore @ k, dscore.swapaxes(1, 2) @ q, weight.swapaxes(1, 2) @ dout])
        gradient = features.T @ d.swapaxes(1, 2).reshape(3, -1, 16)
        norms.append((np.linalg.norm(t), change @ change / 2 / change.size, np.linalg.norm(gradient)))
    return np.array(norms)


@pytest.mark.draw(2)
@pytest.mark.parametrize(
    "ranks, cyclic, options", [(1, (0, 1), []), (4, (0, 1), ["--tile", "ring"]), (6, (0, 1), []), (2, (1,), [])]
)
def test_heat_is_that_of_the_whole_grid(ranks, cyclic, options):
    """The same on any number of ranks: to rounding of float32, which is 6e-8."""
    assert np.abs(printed(ranks, cyclic, *options) / dense(cyclic) - 1).max() < 2e-6


def test_heat_says_what_is_wrong():
    words = [sys.executable, launch.DOCS / "heat_attention.py", "--grid", "1", "9"]
    outcome = launch.mpirun(2, words, check=False, timeout=60)
    assert outcome.returncode
    assert outcome.stderr.count("--grid is [1, 9]; it must have") == 1 and "Traceback" not in outcome.stderr


# Compares what ranks have with dense attention, by NumPy on rank 0.  `seen`: bool (points, points).
COMPARE = """
def whole(array):
    places, parts = comm.gather(plan.positions), comm.gather(array)
    return parts and np.concatenate(parts, 1)[0][np.argsort(np.concatenate(places))]

def compare(seen, *arrays):
    q, k, v, out, *grads = (whole(array) for array in arrays)
    if comm.rank == 0:
        q, k, v, out, *grads = (array.swapaxes(0, 1).astype(float) for array in (q, k, v, out, *grads))
        score = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[2])
        weight = np.where(seen, np.exp(score - score.max()), 0)
        weight /= weight.sum(2, keepdims=True)
        dweight = out @ v.swapaxes(1, 2)
        dscore = weight * (dweight - (weight * dweight).sum(2, keepdims=True)) / np.sqrt(q.shape[2])
        right = weight @ v, dscore @ k, dscore.swapaxes(1, 2) @ q, weight.swapaxes(1, 2) @ out
        for got, ref in zip((out, *grads), right):
            assert np.abs(got - ref).max() < 1e-5 * np.abs(ref).max()
"""
BLOCK = """
y, x = np.divmod(np.arange(24 * 32), 32)
first = np.clip(y - 3, 0, 24 - 7)[:, None]
compare((first <= y) & (y < first + 7) & ((x - x[:, None] + 3) % 32 < 7), q, k, v, out, dq, dk, dv)
"""
SPHERE = """
at = np.concatenate([2 * np.pi * np.arange(n) / n for n in rows])
up = np.repeat(np.pi / 2 - (np.arange(len(rows)) + 0.5) * np.pi / len(rows), rows)
points = np.stack([np.cos(up) * np.cos(at), np.cos(up) * np.sin(at), np.sin(up)], 1)
compare(points @ points.T > np.cos(np.radians(25)) - 1e-8, q, k, v, out)
"""


def code_of(name):
    text = (launch.DOCS / "fields.md").read_text()
    return re.search(rf"<!-- test: {name} -->\n```python\n(.*?)```", text, re.DOTALL)[1]


def test_code_of_the_page():
    code = f"{code_of('block')}comm = cart{COMPARE}{BLOCK}{code_of('sphere')}{SPHERE}"
    launch.mpirun(3, [sys.executable, "-m", "mpi4py", "-c", code], timeout=60)


@pytest.mark.workshop
def test_bytes_of_the_page():
    """If not: python docs/fields.py."""
    page = (launch.DOCS / "fields.md").read_text()
    made = runpy.run_path(str(launch.DOCS / "fields.py"))
    assert made["written"](page) == page
    assert made["flat"](Layout.grid((256, 512), (4, 4))) == made["by_hand"]((4, 4)) == [2387 * 1024, 2 * 2387 * 1024]
