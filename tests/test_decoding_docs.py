"""The examples of docs on decoding: a text that is generated, the energy whose gradient is attention, the code.

And the code of the page on masks.
"""

import re
import sys

import launch
import pytest

needs_docs = pytest.mark.skipif(not launch.DOCS.is_dir(), reason="takes the docs of a checkout")


def code_of(page, name):
    text = (launch.DOCS / page).read_text()
    return re.search(rf"<!-- test: {name} -->\n```python\n(.*?)```", text, re.DOTALL)[1]


@needs_docs
def test_generation_is_that_of_one_rank():
    """It goes on with the text of the prompt, which no rank has seen whole."""
    text = " ".join((launch.DOCS.parent / "LICENSE").read_text().split())
    command = [sys.executable, launch.DOCS / "generate.py", "--check", "--tokens", "40"]
    printed = launch.mpirun(4, command, timeout=120).stdout
    assert "the same tokens as on one rank" in printed and "NOT" not in printed
    assert printed.split(":\n", 1)[1].startswith(f"{text[:8]}|{text[8:48]}")
    held = [int(n) for n in re.search(r"hold (.*) keys", printed)[1].split(", ")]
    assert len(held) == 4 and sum(held) == 600 + 8 - 1 + 40 and max(held) - min(held) <= 1


@needs_docs
def test_generation_shows_what_is_wrong(tmp_path):
    """A rank that decodes its own keys only takes other tokens."""
    script = tmp_path / "sabotage.py"
    script.write_text(
        "import runpy, sys, mpiattn.decode.combine as c\n"
        "c.Combiner.run = lambda self, algorithm, own, spare, root=None: own\n"
        f"sys.exit(runpy.run_path({str(launch.DOCS / 'generate.py')!r})['main']())\n"
    )
    outcome = launch.mpirun(2, [sys.executable, script, "--check", "--tokens", "20"], timeout=120, check=False)
    assert outcome.returncode and "NOT the same tokens" in outcome.stdout


@needs_docs
def test_energy():
    printed = launch.mpirun(3, [sys.executable, "-c", code_of("energy.md", "energy")], timeout=60).stdout
    same, off = (float(number) for number in re.findall(r"by (\S+?)[, ]", printed))
    assert same < 1e-12 and 0 < off < 1e-6


@needs_docs
def test_code_of_the_page():
    printed = launch.mpirun(3, [sys.executable, "-c", code_of("decoding.md", "decode")], timeout=60).stdout
    assert printed.split() == ["(1000,", "1000)", "(2,", "1,", "8,", "64)", "(990,", "1000)"]


@needs_docs
def test_code_of_masks():
    code = code_of("masks.md", "masks") + "\nassert np.isfinite(lse).all() and out.shape == q.shape"
    launch.mpirun(3, [sys.executable, "-c", code], timeout=60)


@needs_docs
def test_neighbourhoods_on_a_grid():
    """Forward and backward, against dense attention of the whole grid on one rank."""
    check = """
whole = [np.concatenate(comm.allgather(array), axis=1) for array in (q, k, v, out, dq, dk, dv)]
y, x = np.divmod(np.arange(rows * columns), columns)
seen = (abs(y[:, None] - y) <= R) & (abs(x[:, None] - x) <= R)
q, k, v, out, *grads = (array[0].swapaxes(0, 1).astype(np.float64) for array in whole)
score = np.where(seen, q @ k.swapaxes(1, 2) / 4, -np.inf)
weight = np.exp(score - score.max(axis=2, keepdims=True))
weight /= weight.sum(axis=2, keepdims=True)
ref = weight @ v
dscore = weight * (ref @ v.swapaxes(1, 2) - (ref * ref).sum(axis=2, keepdims=True)) / 4
expected = ref, dscore @ k, dscore.swapaxes(1, 2) @ q, weight.swapaxes(1, 2) @ ref
for got, right in zip((out, *grads), expected):
    assert np.abs(got - right).max() < 1e-5 * np.abs(right).max()
"""
    launch.mpirun(3, [sys.executable, "-c", code_of("masks.md", "grid") + check], timeout=60)


@needs_docs
def test_blocks_of_a_cartesian_communicator():
    """Results are those of the keys of all blocks, whose order does not matter without a mask."""
    check = """
keys, values = (np.concatenate(comm.allgather(array.reshape(-1, 4, 16))) for array in (k, v))
score = np.einsum("thd,khd->htk", q.reshape(-1, 4, 16).astype(float), keys.astype(float)) / 4
weight = np.exp(score - score.max(axis=2, keepdims=True))
ref = np.einsum("htk,khd->thd", weight / weight.sum(axis=2, keepdims=True), values)
assert out.shape == (1, rows, columns, 4, 16) and np.abs(out.reshape(ref.shape) - ref).max() < 1e-5 * np.abs(ref).max()
"""
    launch.mpirun(4, [sys.executable, "-c", code_of("concepts.md", "blocks") + check], timeout=60)
