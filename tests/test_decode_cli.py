"""`mpiattn decode` as a user calls it; caches saved on some ranks and loaded on others."""

import json
import sys
from itertools import pairwise

import h5py
import numpy as np
import pytest
import warm
from files import write_input
from launch import mpirun

from mpiattn.cli import main
from mpiattn.verify import reference

SAVE = """
import sys
import numpy as np
from mpi4py import MPI
from mpiattn import KVCache, Layout
comm, (path, dtype) = MPI.COMM_WORLD, sys.argv[1:]
rng = np.random.default_rng(0)
with KVCache(comm, capacity=200, sequences=3, kv_heads=2, head_dim=16, value_dim=8, page_size=4, dtype=dtype) as cache:
    for tokens, layout in ((40, Layout("zigzag", 40, comm.size)), (9, None), (30, Layout("striped", 30, comm.size))):
        k, v = (rng.standard_normal((3, tokens, 2, dim)).astype(dtype) for dim in (16, 8))
        own = slice(None) if layout is None else layout.positions(comm.rank)
        cache.append(k[:, own], v[:, own], layout=layout, counts=[tokens, 0, tokens // 2])
    cache.save(path)
"""


def assert_decoded(cache, queries, out, tolerance=1e-5, **masks):
    """The output holds float64 attention of every sequence."""
    with h5py.File(cache) as given, h5py.File(queries) as asked, h5py.File(out) as made:
        cuts = given["cu_seqlens"][:]
        assert made["out"].id.get_type() == given["k"].id.get_type()
        for i, (start, stop) in enumerate(pairwise(cuts)):
            ref, lse = reference.attention(
                asked["q"][i : i + 1], *(given[name][:, start:stop] for name in "kv"), **{"causal": True, **masks}
            )
            assert np.abs(made["out"][i] - ref[0]).max() <= tolerance * max(1, np.abs(ref).max())
            assert np.array_equal(np.isneginf(made["lse"][i]), np.isneginf(lse[0]))
            seen = ~np.isneginf(lse[0])
            assert np.abs(made["lse"][i][seen] - lse[0][seen]).max(initial=0) < 1e-4
        return dict(made.attrs)


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    "save_ranks, ranks, dtype, options, masks",
    [
        (3, 4, "float32", ["--algorithm", "allreduce", "--page-size", "1"], {}),
        (4, 2, "bfloat16", ["--window", "9,0", "--algorithm", "levels"], {"window": (9, 0)}),
        (
            1,
            3,
            "float64",
            ["--softcap", "2", "--scale", "0.5", "--full", "--backend", "deferred"],
            {"softcap": 2, "scale": 0.5, "causal": False},
        ),
    ],
)
def test_decode_of_a_saved_cache(tmp_path, save_ranks, ranks, dtype, options, masks):
    cache, out = tmp_path / "cache.h5", tmp_path / "out.h5"
    mpirun(save_ranks, [sys.executable, "-c", SAVE, cache, dtype])
    with h5py.File(cache) as file:
        assert file["cu_seqlens"][:].tolist() == [0, 79, 79, 79 + 39]
    queries = write_input(tmp_path / "q.h5", batch=3, seqlen=3, heads=4, dtype=dtype, k=None, v=None)
    report_file = tmp_path / "report.json"
    outcome = warm.command(ranks, ["decode", cache, queries, out, "--verify", "--json", report_file, *options])
    assert all(words in outcome.stdout for words in ("all 9 rows", "passed", "equal on every rank"))
    chosen = assert_decoded(cache, queries, out, {"bfloat16": 1e-2}.get(dtype, 1e-5), **masks)
    assert chosen["command"].startswith(f"mpiattn decode {cache} {queries} {out}") and chosen["date"]
    report = json.loads(report_file.read_text())
    assert chosen["ranks"] == report["ranks"] == ranks
    seen = "3 of 9 queries without a visible key; out 0, lse -inf", "all 9 rows, 3 tokens without a visible key"
    assert all(words in outcome.stdout for words in seen) and report["empty"] == 3
    assert report["sequences"] == [79, 0, 39] and report["verify"]["passed"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.h5", "out.h5", "q.h5", "report.json"]


def test_decode_of_a_cache_of_keys_alone(tmp_path):
    cache, out = tmp_path / "cache.h5", tmp_path / "out.h5"
    save = SAVE.replace("value_dim=8,", "value_dim=8, shared_kv=True,").replace("v[:, own], ", "")
    mpirun(2, [sys.executable, "-c", save, cache, "float32"])
    queries = write_input(tmp_path / "q.h5", batch=3, seqlen=3, heads=4, dtype="float32", k=None, v=None)
    outcome = warm.command(3, ["decode", cache, queries, out, "--verify", "--scale", "0.25"])
    assert all(words in outcome.stdout for words in ("all 9 rows", "passed", "equal on every rank"))
    with h5py.File(cache, "r+") as file:
        file["v"] = file["k"][..., :8]
    assert_decoded(cache, queries, out)


def test_decode_of_generated_files(tmp_path):
    """Batch entries are sequences; a wrong result is not written."""
    for name, options in (("cache", ["--seqlen", "900", "--batch", "2"]), ("q", ["--seqlen", "1", "--batch", "2"])):
        assert main(["generate", str(tmp_path / f"{name}.h5"), "--heads", "2", *options]) == 0
    files = [tmp_path / name for name in ("cache.h5", "q.h5", "out.h5")]
    wrong = (
        "import sys, mpiattn.cli.decode as d; from mpiattn.cli import main; right = d.tree_decode\n"
        "def tree_decode(*args, **how):\n    out, lse = right(*args, **how)\n    return out * 1.0001, lse\n"
        "d.tree_decode = tree_decode; sys.exit(main(sys.argv[1:]))"
    )
    outcome = mpirun(2, [sys.executable, "-c", wrong, "decode", *files, "--verify"], check=False)
    assert outcome.returncode and not files[2].exists()
    assert outcome.stderr.count("verification failed, OUT is not written: all 2 rows") == 1
    warm.command(2, ["decode", *files])
    with h5py.File(files[0]) as given, h5py.File(files[1]) as asked, h5py.File(files[2]) as made:
        ref, _ = reference.attention(asked["q"][:], given["k"][:], given["v"][:])
        assert np.abs(made["out"][:] - ref).max() < 1e-5 * np.abs(ref).max()


@pytest.mark.draw(4)
@pytest.mark.parametrize(
    "break_it, message",
    [
        (lambda files: files[0].unlink(), "CACHE is '{0}'; there is no such file"),
        (lambda files: files[1].unlink(), "QUERIES is '{1}'; there is no such file"),
        (
            lambda files: write_input(files[1], batch=2, k=None, v=None),
            "QUERIES is '{1}'; its q is (2, 67, 4, 16) in f",
        ),
        (lambda files: write_input(files[1], k=None, v=None, dtype="float16"), "in float16; for CACHE it must be"),
        (lambda files: write_input(files[0], v=None), "CACHE is '{0}'; it has no dataset 'v'"),
        (
            lambda files: write_input(files[0], cu_seqlens=[0, 9, 5]),
            "its cu_seqlens is [[0 9 5]]; it must be two or more positions from 0 to 67 that never decrease",
        ),
        (
            lambda files: write_input(files[0], cu_seqlens=np.uint64([0, 9, 5])),
            "its cu_seqlens is [[0 9 5]]; it must be two or more positions from 0 to 67 that never decrease",
        ),
        (
            lambda files: write_input(files[0], cu_seqlens=[0, 60]),
            "its cu_seqlens is [ 0 60]; it must begin with 0 and end with 67, the number of tokens; if the tokens ",
        ),
        (
            lambda files: write_input(files[0], **dict.fromkeys("kv", np.zeros((1, 0, 2, 16), "f4"))),
            "CACHE is '{0}'; it holds no token, and must hold those of the queries",
        ),
        (
            lambda files: write_input(files[0], kv_heads=3),
            "with 1 sequences and head_dim 16, in float32; kv_heads, which is 3, must divide heads",
        ),
    ],
)
def test_errors_are_said_once(tmp_path, break_it, message):
    files = [tmp_path / name for name in ("cache.h5", "q.h5", "out.h5")]
    write_input(files[0])
    write_input(files[1], k=None, v=None)
    break_it(files)
    outcome = warm.command(2, ["decode", *files], check=False)
    assert outcome.returncode and not files[2].exists()
    assert outcome.stderr.count(message.format(*files)) == 1 and "Traceback" not in outcome.stderr
