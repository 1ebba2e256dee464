"""The example of training with PyTorch; mpiattn.torch where there is no torch.  See also tests/mpi/test_torch.py."""

import importlib.util
import os
import re
import sys

import launch
import pytest

EXAMPLE = launch.DOCS / "train_transformer.py"
needs_example = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or not EXAMPLE.is_file(),
    reason="takes torch (extra torch) and the docs of a checkout",
)

# The example with something wrong in it: losses must show it.
SABOTAGE = """
import runpy, sys
from mpiattn import MeshAttention
forward, backward = MeshAttention.forward, MeshAttention.backward

def without_documents(self, *arrays, cu_seqlens, **options):
    return forward(self, *arrays, **options)

def backward_without_documents(self, *arrays, cu_seqlens, **options):
    return backward(self, *arrays, **options)

def without_dk(self, *arrays, **options):
    dq, dk, dv = backward(self, *arrays, **options)
    return dq, 0 * dk, dv

if sys.argv.pop(1) == "documents":
    MeshAttention.forward, MeshAttention.backward = without_documents, backward_without_documents
else:
    MeshAttention.backward = without_dk
sys.exit(runpy.run_path(sys.argv[0])["main"]())
"""

# An example of docs/training.md on all ranks, and on a rank alone.
STEP = """
import sys
code, spread, alone = sys.argv[1], {}, {}
exec(code, spread)
exec(code.replace("MPI.COMM_WORLD", "MPI.COMM_SELF"), alone)
assert spread["comm"].size == 3 and alone["comm"].size == 1
pairs = zip(spread["parameters"], alone["parameters"], strict=True)
off = spread["comm"].gather(max(((a.grad - b.grad).abs().max() / b.grad.abs().max()).item() for a, b in pairs))
if spread["comm"].rank == 0:
    print(max(off))
"""


def losses_of(text):
    """The first and the last loss of the example's table."""
    rows = re.findall(r"^ *\d+ +(\d+\.\d+)", text, re.MULTILINE)
    return float(rows[0]), float(rows[-1])


@needs_example
@pytest.mark.parametrize(
    "ranks, options, says",
    [
        (4, ["--tile", "2x2", "--layout", "zigzag"], "tile 2x2, zigzag"),
        (3, ["--tile", "qring", "--layout", "striped", "--seqlen", "101"], "tile 3x1, striped"),
        (4, ["--dtype", "float64", "--steps", "20"], "float64"),
    ],
)
def test_training_is_that_of_dense_attention(ranks, options, says):
    text = launch.mpirun(ranks, [sys.executable, EXAMPLE, "--check", *options], timeout=180).stdout
    assert says in text and "the same to rounding" in text
    first, last = losses_of(text)
    assert first > 4.5 and last < (3.5 if "20" in options else 2.7)


@needs_example
@pytest.mark.parametrize("wrong", ["documents", "gradient"])
def test_training_shows_what_is_wrong(tmp_path, wrong):
    script = tmp_path / "sabotage.py"
    script.write_text(SABOTAGE.replace("sys.argv[0]", repr(str(EXAMPLE))))
    outcome = launch.mpirun(2, [sys.executable, script, wrong, "--check", "--steps", "10"], check=False, timeout=120)
    assert outcome.returncode
    assert "NOT the same" in outcome.stdout and "Traceback" not in outcome.stderr


@needs_example
def test_training_is_deterministic():
    command = [sys.executable, EXAMPLE, "--steps", "5", "--seed", "3"]
    first, again = (launch.mpirun(2, command, timeout=120).stdout for _ in range(2))
    assert first == again and len(first.splitlines()) == 7


@needs_example
@pytest.mark.parametrize("name", ["step", "ddp", "layers"])
def test_step_of_the_documentation(name):
    """Gradients summed over three ranks are those of one."""
    text = (launch.DOCS / "training.md").read_text()
    code = re.search(rf"<!-- test: {name} -->\n```python\n(.*?)```", text, re.DOTALL)[1]
    assert float(launch.mpirun(3, [sys.executable, "-c", STEP, code], timeout=120).stdout) < 1e-4


@pytest.mark.skipif(not launch.DOCS.is_dir(), reason="takes the docs of a checkout")
def test_results_in_memory_of_the_callers():
    """What the documentation shows."""
    text = (launch.DOCS / "training.md").read_text()
    code = re.search(r"<!-- test: memory -->\n```python\n(.*?)```", text, re.DOTALL)[1]
    more = "assert all(np.isfinite(array).all() and array.any() for array in (out, lse, gradients)); print('right')"
    assert launch.mpirun(2, [sys.executable, "-c", code + more], timeout=120).stdout.count("right") == 2


MERGED = """
def whole(tensor):
    return torch.cat([torch.from_numpy(part) for part in comm.allgather(tensor.numpy())], 1)

given = [q, k, v, more_k, more_v]
of_all = [whole(each.detach()).requires_grad_() for each in given]
both = [torch.cat(pair, 1) for pair in zip(of_all[1:3], of_all[3:])]
q_of, k_of, v_of = (each.transpose(1, 2) for each in (of_all[0], *both))
seen = torch.cat([torch.ones(100, 100, dtype=torch.bool).tril(), torch.ones(100, 40, dtype=torch.bool)], 1)
dense = torch.nn.functional.scaled_dot_product_attention(q_of, k_of, v_of, seen).transpose(1, 2)
dense.square().sum().backward()
assert torch.allclose(whole(out.detach()), dense.detach(), atol=1e-5)
for each, one in zip(given, of_all):
    assert torch.allclose(whole(each.grad), one.grad, atol=1e-4)
print("right")
"""


@needs_example
def test_keys_in_two_parts():
    """What the documentation shows has the gradients of one attention to all keys."""
    text = (launch.DOCS / "training.md").read_text()
    code = re.search(r"<!-- test: merge -->\n```python\n(.*?)```", text, re.DOTALL)[1]
    assert launch.mpirun(3, [sys.executable, "-c", code + MERGED], timeout=120).stdout.count("right") == 3


@pytest.mark.skipif(not launch.DOCS.is_dir(), reason="takes the docs of a checkout")
def test_one_array_for_keys_and_values():
    """What the documentation shows."""
    text = (launch.DOCS / "concepts.md").read_text()
    code = re.search(r"<!-- test: shared -->\n```python\n(.*?)```", text, re.DOTALL)[1]
    more = "assert out.shape == (1, tokens, 16, 512) and dk.shape == (1, tokens, 1, 576) and dk.any(); print('right')"
    assert launch.mpirun(2, [sys.executable, "-c", code + more], timeout=120).stdout.count("right") == 2


@needs_example
@pytest.mark.parametrize("options, message", [(["--steps", "0"], "--steps is 0"), (["--tile", "3x1"], "tile is 3x1")])
def test_training_errors(options, message):
    outcome = launch.mpirun(2, [sys.executable, EXAMPLE, *options], check=False, timeout=120)
    assert outcome.returncode
    assert outcome.stderr.count(message) == 1 and "Traceback" not in outcome.stderr


def test_without_torch_names_the_extra(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('not here')\n")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(launch.ROOT)])}
    outcome = launch.mpirun(1, [sys.executable, "-c", "import mpiattn.torch"], check=False, env=path)
    assert outcome.returncode
    assert "mpiattn.torch needs torch (not here)" in outcome.stderr
    assert "pip install 'mpiattn[torch]'" in outcome.stderr
