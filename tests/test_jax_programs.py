"""Programs in JAX: those of the page on it, one on one core, one without JAX.  See also tests/mpi/test_jax.py."""

import importlib.util
import os
import re
import sys

import launch
import pytest

EXAMPLE = launch.DOCS / "train_jax.py"
needs_example = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None or not EXAMPLE.is_file(),
    reason="takes JAX (extra jax) and the docs of a checkout",
)
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # compiles in half the time
FEW = ["--check", "--steps", "6", "--seqlen", "50"]

# The program with a wrong gradient.
SABOTAGE = """
import runpy, sys
from mpiattn import MeshAttention
backward = MeshAttention.backward

def without_dk(self, *arrays, **options):
    dq, dk, dv = backward(self, *arrays, **options)
    return dq, 0 * dk, dv

MeshAttention.backward = without_dk
sys.exit(runpy.run_path(EXAMPLE)["main"]())
"""

# The code of the page on all ranks, and on a rank alone.
BOTH = """
import sys
code, spread, alone = sys.argv[1], {}, {}
exec(code, spread)
exec(code.replace("MPI.COMM_WORLD", "MPI.COMM_SELF"), alone)
assert spread["comm"].size == 3 and alone["comm"].size == 1
assert abs(spread["comm"].allreduce(float(spread["value"])) - float(alone["value"])) < 1e-5
for a, b in zip(spread["gradients"], alone["gradients"], strict=True):
    assert abs(b).max() > 1e-4 and abs(a - b).max() < 1e-4 * abs(b).max()
"""

# Compiled calls that JAX begins in its only thread, with arrays that io_callback would copy in that thread too.
ONE_CORE = """
import os
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import jax, jax.numpy as jnp
from mpi4py import MPI
from mpiattn import MeshAttention
from mpiattn.jax import attention

slow = jax.jit(lambda x: x + 0 * jax.lax.fori_loop(0, 50, lambda _, w: jnp.tanh(w @ w), jnp.ones((200, 200))).sum())
with MeshAttention(MPI.COMM_WORLD, seqlen=2000, heads=4, head_dim=64, window=(8, 8)) as plan:
    q = jnp.ones((1, 2000, 4, 64))
    compiled = jax.jit(lambda q: attention(plan, q * 2, q, q)[0])
    jax.block_until_ready([slow(q), compiled(q)])
    for _ in range(3):
        q = compiled(slow(q))
    print(q.shape)
"""


@needs_example
def test_training_is_that_of_dense_attention():
    text = launch.mpirun(3, [sys.executable, EXAMPLE, *FEW, "--tile", "3x1"], timeout=120, env=QUICK).stdout
    assert text.startswith("3 ranks, tile 3x1") and "the same to rounding" in text
    losses = [float(loss) for loss in re.findall(r"^ *\d+ +(\d+\.\d+)", text, re.MULTILINE)]
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]


@needs_example
def test_training_shows_what_is_wrong(tmp_path):
    script = tmp_path / "sabotage.py"
    script.write_text(SABOTAGE.replace("EXAMPLE", repr(str(EXAMPLE))))
    outcome = launch.mpirun(1, [sys.executable, script, *FEW], check=False, timeout=120, env=QUICK)
    assert outcome.returncode and "NOT the same" in outcome.stdout and "Traceback" not in outcome.stderr


@needs_example
def test_code_of_the_page():
    """Gradients summed over three ranks are those of one."""
    text = (launch.DOCS / "jax.md").read_text()
    code = re.search(r"<!-- test: step -->\n```python\n(.*?)```", text, re.DOTALL)[1]
    launch.mpirun(3, [sys.executable, "-m", "mpi4py", "-c", BOTH, code], timeout=120, env=QUICK)


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="takes JAX (extra jax)")
def test_one_core():
    assert "(1, 2000, 4, 64)" in launch.mpirun(1, [sys.executable, "-c", ONE_CORE], timeout=30, env=QUICK).stdout


def test_without_jax_names_the_extra(tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('not here')\n")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(launch.ROOT)])}
    outcome = launch.mpirun(1, [sys.executable, "-c", "import mpiattn.jax"], check=False, env=path)
    assert outcome.returncode
    assert "mpiattn.jax needs jax (not here)" in outcome.stderr
    assert "pip install 'mpiattn[jax]'" in outcome.stderr
