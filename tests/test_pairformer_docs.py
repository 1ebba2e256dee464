"""The page on attention with pair bias: its program and its code."""

import importlib.util
import re
import sys

import launch
import pytest

EXAMPLE = launch.DOCS / "pairformer.py"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or not EXAMPLE.is_file(),
    reason="takes torch (extra torch) and the docs of a checkout",
)
FEW = ["--tokens", "20", "--steps", "4"]

# The program with a wrong gradient of the bias.
SABOTAGE = """
import runpy, sys
from mpiattn import MeshAttention
backward = MeshAttention.backward

def spoilt(self, *arrays, **options):
    *grads, dbias = backward(self, *arrays, **options)
    return *grads, 0 * dbias

MeshAttention.backward = spoilt
sys.exit(runpy.run_path(EXAMPLE)["main"]())
"""

# The code of the page on all ranks, and on a rank alone.
BOTH = """
import sys
code, spread, alone = sys.argv[1], {}, {}
exec(code, spread)
exec(code.replace("MPI.COMM_WORLD", "MPI.COMM_SELF"), alone)
assert spread["comm"].size == 3 and alone["comm"].size == 1
rows, columns = spread["plan"].bias_positions
pairs = [(spread["z"].grad, alone["z"].grad[rows[:, None], columns])]
pairs += [(a.grad, b.grad) for a, b in zip(spread["parameters"], alone["parameters"], strict=True)]
sizes = [b.abs().max().item() for _, b in pairs]
assert sum(size > 1 for size in sizes) == len(sizes) - 1, sizes  # a shift of all scores of a query has no gradient
assert all((a - b).abs().max() < 1e-5 * max(size, 1) for (a, b), size in zip(pairs, sizes))
"""


@pytest.mark.parametrize("ranks, options, says", [(1, [], "1x1"), (4, ["--tile", "2x2"], "2x2"), (6, [], "3x2")])
def test_pairformer_is_that_of_dense_attention(ranks, options, says):
    text = launch.mpirun(ranks, [sys.executable, EXAMPLE, *FEW, *options], timeout=120).stdout
    assert f"tile {says}, 20 tokens" in text and text.count("the same to rounding") == 2
    losses = [float(loss) for loss in re.findall(r"^ *\d+ +(\d+\.\d+)", text, re.MULTILINE)]
    assert len(losses) == 4 and losses[-1] < 0.9 * losses[0]


def test_pairformer_shows_what_is_wrong(tmp_path):
    script = tmp_path / "sabotage.py"
    script.write_text(SABOTAGE.replace("EXAMPLE", repr(str(EXAMPLE))))
    outcome = launch.mpirun(2, [sys.executable, script, *FEW], check=False, timeout=120)
    assert outcome.returncode and "Traceback" not in outcome.stderr
    assert re.findall(r"^(.*): NOT the same", outcome.stdout, re.MULTILINE) == ["losses", "triangle attention"]


def test_bytes_with_and_without_a_bias():
    """The same, and a bias of tokens ** 2 * heads / ranks elements."""
    text = launch.mpirun(2, [sys.executable, EXAMPLE, "--count", "--tokens", "40"], timeout=60).stdout
    without, given = re.findall(r": (\d+ bytes sent forward, \d+ backward)", text)
    assert without == given and not without.startswith("0 ")
    assert f"the bias has {40**2 * 16 // 2} elements" in text


def test_pairformer_says_what_is_wrong():
    outcome = launch.mpirun(2, [sys.executable, EXAMPLE, "--tile", "2x1x1"], check=False, timeout=60)
    assert outcome.returncode
    assert outcome.stderr.count("--tile is 2x1x1; it must be AxB") == 1 and "Traceback" not in outcome.stderr


def test_code_of_the_page():
    text = (launch.DOCS / "pairformer.md").read_text()
    code = re.search(r"<!-- test: pairs -->\n```python\n(.*?)```", text, re.DOTALL)[1]
    launch.mpirun(3, [sys.executable, "-m", "mpi4py", "-c", BOTH, code], timeout=120)
