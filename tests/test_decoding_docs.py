"""The examples of docs on decoding: a text that is generated, the energy whose gradient is attention, the code.

And the code of the page on masks.
"""

import re
import sys

import launch
import numpy as np
import pytest

from mpiattn import masks

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


# What the page says of biases; all keys of this cache are those of the last call
BIASED = """
with KVCache(comm, capacity=4000, kv_heads=2, head_dim=64) as cache:
    cache.append(np.zeros((1, 500, 2, 64), np.float32), np.zeros((1, 500, 2, 64), np.float32))
    _, lse = tree_decode(q[:1], cache, alibi_slopes=slopes, relative_bias=table)
back = np.arange(500.0)
scores = table[0][128 - np.minimum(back, 128).astype(int)] - slopes[:, None] * back
assert np.allclose(lse[0, :, 0], np.log(np.exp(scores).sum(axis=1)), atol=1e-4), lse
"""


# What the page says of copies: the same results as its source, of other tokens than the prompt's alone
COPIED = """
assert np.allclose(out[1], out[2], atol=1e-6) and np.allclose(lse[1], lse[2], atol=1e-6)
assert not np.allclose(out[0], out[1], atol=1e-2)
"""


@needs_docs
def test_code_of_the_page():
    code = code_of("decoding.md", "decode") + code_of("decoding.md", "biases") + BIASED
    code += code_of("decoding.md", "copy") + COPIED
    printed = launch.mpirun(3, [sys.executable, "-c", code], timeout=60).stdout
    assert printed.split() == ["(1000,", "1000)", "(2,", "1,", "8,", "64)", "(990,", "1000)"]


@needs_docs
def test_code_of_masks():
    code = code_of("masks.md", "masks") + "\nassert np.isfinite(lse).all() and out.shape == q.shape"
    launch.mpirun(3, [sys.executable, "-c", code], timeout=60)


def shown(text, shape):
    """Whether every query sees every key of a mask on a grid: bool (queries, keys)."""
    tokens = np.prod(shape)
    begin, end = (side[:, :, None] for side in masks.parse(text, shape).intervals(np.arange(tokens), tokens, tokens))
    return ((begin <= np.arange(tokens)) & (np.arange(tokens) < end)).any(axis=0)


def pictures_of(name):
    """(text of a mask, rows of its picture) of those side by side, and one below the other, in a block of the page."""
    page = (launch.DOCS / "masks.md").read_text()
    for row in re.search(rf"<!-- test: {name} -->\n```\n(.*?)```", page, re.DOTALL)[1].split("\n\n"):
        heads, *lines = row.splitlines()
        for head in re.finditer(r"\S+(?: \S+)*", heads):
            yield head[0], [re.match(r"\S(?: \S)*", line[head.start() :])[0].split(" ") for line in lines]


@needs_docs
def test_pictures_of_masks():
    drawn = list(pictures_of("pictures"))
    for text, picture in drawn:
        assert (shown(text, (5,)) == (np.array(picture) == "1")).all(), text
    assert len(drawn) == 11
    for text, rows in pictures_of("fields"):
        picture = np.array(rows)
        (query,) = np.flatnonzero(picture == "x")
        assert (shown(text, picture.shape)[query].reshape(picture.shape) == (picture != ".")).all(), text


@needs_docs
def test_a_mask_as_a_function():
    """The keys that the page says in words: itself, the three before it, and every 100th before it."""
    names = {}
    exec(code_of("masks.md", "function"), names)
    query, key = np.arange(1000)[:, None], np.arange(1000)
    begin, end = (side[:, :, None] for side in names["mask"].intervals(query[:, 0], 1000, 1000))
    shown = ((begin <= key) & (key < end)).any(axis=0)
    assert (shown == ((key <= query) & ((key >= query - 3) | (key % 100 == 0)))).all()


@needs_docs
def test_a_mask_of_ones_own():
    """Against dense attention: what `plan.verify` compares with has the intervals of the same class."""
    check = """
comm = MPI.COMM_WORLD
places = np.argsort(np.concatenate(comm.allgather(plan.positions)))
q, k, v, out = (np.concatenate(comm.allgather(a), 1)[0, places].swapaxes(0, 1).astype(float) for a in (q, k, v, out))
y, x = np.divmod(np.arange(12 * 16), 16)
top, left = (y - 2).clip(0, 12 - 5)[:, None], (x - 2).clip(0, 16 - 5)[:, None]
seen = np.ones((194, 194), bool)
seen[2:, 2:] = (top <= y) & (y < top + 5) & (left <= x) & (x < left + 5)
weight = np.where(seen, np.exp(q @ k.swapaxes(1, 2) / np.sqrt(8)), 0)
ref = weight / weight.sum(2, keepdims=True) @ v
assert np.abs(out - ref).max() < 1e-5
"""
    launch.mpirun(3, [sys.executable, "-m", "mpi4py", "-c", code_of("masks.md", "own") + check], timeout=60)


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
