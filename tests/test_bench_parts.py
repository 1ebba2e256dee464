"""The parts of `mpiattn bench` that need no ranks: cases, inputs, figures and their report."""

from argparse import Namespace
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from mpiattn import backends
from mpiattn.bench import kernel, report
from mpiattn.bench.cases import cases, tile_names
from mpiattn.bench.clock import clock_of
from mpiattn.bench.summary import Pass, passes_of
from mpiattn.bench.tensors import Tensors
from mpiattn.cli import kernel as of_kernels
from mpiattn.errors import ArgumentError
from mpiattn.problem.problem import Problem


def test_cases():
    small, large = cases(6, [100, 200, 100], ["auto", "all", "ring"], ["greedy", "collective"], ["direct"], True)
    assert [case.seqlen for case in (small[0], large[-1])] == [100, 200] and len(small) == len(large)
    tiles = ["auto", "1x6", "2x3", "3x2", "6x1"]
    assert [tuple(case[1:]) for case in small] == [
        (tile, kind, "direct", overlap)
        for tile in tiles
        for kind, overlap in (("greedy", True), ("greedy", False), ("collective", True))
    ]
    assert tile_names(["2x2", "qring", "all"], 4) == ["2x2", "4x1", "1x4", "bands"]
    for wrong in ({"tile": ["2x2"]}, {"seqlens": [8, 0]}):
        with pytest.raises(ArgumentError):
            cases(**{"ranks": 6, "seqlens": [8], "tile": ["all"], "schedule": ["auto"], "route": ["auto"], **wrong})


def test_cases_of_pieces():
    """With no schedule and no route but the one of pieces; where none is left, --tile all has no pieces."""
    (some,) = cases(5, [8], ["all", "bands"], ["auto", "greedy"], ["ring", "direct", "auto"], True)
    assert [case[2:] for case in some if case.tile == "bands"] == [
        ("auto", route, overlap) for route in ("direct", "auto") for overlap in (True, False)
    ]
    for more in ({"schedule": ["greedy"]}, {"route": ["ring"]}, {"pieces": False}):
        asked = {"tile": ["all"], "schedule": ["auto"], "route": ["auto"]} | more
        assert {case.tile for case in cases(5, [8], **asked)[0]} == {"1x5", "5x1"}
        if "pieces" not in more:
            with pytest.raises(ArgumentError, match=r"--tile is bands, whose ranks have pieces .* must be among"):
                cases(5, [8], **asked | {"tile": ["ring", "bands"]})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_inputs_are_of_their_place(dtype):
    tensors = Tensors(Problem(seqlen=3000, heads=6, kv_heads=2, head_dim=40, value_dim=24, batch=2, dtype=dtype))
    whole = {name: tensors.read(name, 0, 3000) for name in ("q", "k", "v", "dout")}
    assert [array.shape for array in whole.values()] == [
        (2, 3000, 6, 40),
        (2, 3000, 2, 40),
        (2, 3000, 2, 24),
        (2, 3000, 6, 24),
    ]
    some = np.random.default_rng(0).permutation(3000)[:70]
    for name, array in whole.items():
        assert array.dtype.name == dtype
        assert np.array_equal(array[:, some], tensors.tokens(name, some))
        numbers = array.astype(np.float64)
        assert abs(numbers.mean()) < 0.01 and abs(numbers.var() - 1) < 0.01
        rows = numbers.reshape(-1, numbers.shape[-1])
        assert np.abs(np.corrcoef(rows.T) - np.eye(len(rows.T))).max() < 0.1
    flat = [array.astype(np.float64).ravel()[:100_000] for array in whole.values()]
    assert np.abs(np.corrcoef(flat) - np.eye(4)).max() < 0.02


def test_inputs_that_are_not_wanted():
    tensors, some = Tensors(Problem(seqlen=20, heads=2, head_dim=4)), np.arange(5)
    q, k, v, dout = tensors.inputs(some, some + 10)
    assert np.array_equal(q, tensors.tokens("q", some)) and np.array_equal(k, tensors.tokens("k", some + 10))
    assert np.array_equal(v, tensors.tokens("v", some + 10)) and np.array_equal(dout, tensors.tokens("dout", some))
    assert tensors.inputs(some, some, dout=False)[3] is None
    shared = Tensors(Problem(seqlen=20, heads=2, head_dim=4, shared_kv=True)).inputs(some, some)
    assert [array is None for array in shared] == [False, False, True, False]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_launches_that_are_measured(monkeypatch, direction):
    """A block of that pass, and before each forward one a clear of its results."""
    launches = []
    for name in ("attend", "attend_backward", "clear"):
        monkeypatch.setattr(kernel.Block, name, lambda block, name=name: launches.append(name))
    monkeypatch.setattr(kernel, "check_small", lambda *of: 0.0)

    def without_torch(*of):
        launches.clear()  # what is launched before that only makes the arrays
        return {}, {}, []

    monkeypatch.setattr(kernel, "with_torch", without_torch)
    backend = backends.get("numpy")
    problem = Problem(seqlen=8, heads=2, head_dim=4)
    section = kernel.measure_block(backend, clock_of(backend), problem, direction, 1)
    assert section["what"] == direction
    of_pass = {"forward": {"attend", "clear"}, "backward": {"attend_backward"}}
    assert set(launches) == of_pass[direction]


@pytest.mark.parametrize("asked, expected", [((None, None), (65536, 4096)), ((0, None), (0, 4096)), ((7, 9), (7, 9))])
def test_keys_of_kernels(monkeypatch, asked, expected):
    measured = []
    monkeypatch.setattr(of_kernels, "_measured", lambda *of, **keys: measured.append(keys) or {})
    monkeypatch.setattr(of_kernels, "as_text", lambda data: "")
    keys = dict(zip(("decode_keys", "carry_keys"), asked))
    args = Namespace(
        seqlen=[8], heads=2, kv_heads=2, head_dim=4, dtype="float32", causal=False, backend="numpy", **keys
    )
    job = SimpleNamespace(peers=SimpleNamespace(size=1), comm=SimpleNamespace(size=1))
    monkeypatch.setattr(of_kernels, "agreement", lambda peers: nullcontext())
    assert list(of_kernels.measure(job, args)) == [({}, "")]
    assert measured == [dict(zip(keys, expected))]


def measurements(seconds, waiting, sent, formula):
    """The ranks' measurements of a pass, from numbers (runs, ranks)."""
    columns = zip(np.transpose(seconds), np.transpose(waiting), np.transpose(sent))
    return [
        {"seconds": list(s), "waiting": list(w), "sent": list(n), "formula": formula, "ideal": 0.5 + rank}
        for rank, (s, w, n) in enumerate(columns)
    ]


FORWARD = measurements([[2, 4], [3, 1], [8, 9]], [[1, 1], [0, 0], [4, 9]], [[10, 20]] * 3, 15)
BACKWARD = measurements([[5, 1], [5, 5], [1, 1]], [[0, 0]] * 3, [[7, 7]] * 3, 7)


def test_figures():
    problem = Problem(seqlen=10, heads=2, head_dim=3, causal=True)
    passes = passes_of({"passes": {"forward": FORWARD, "backward": BACKWARD}}, problem)
    forward, backward, both = (passes[name].summary() for name in ("forward", "backward", "both"))
    assert forward["runs"] == [4, 3, 9] and forward["seconds"] == {"median": 4, "min": 3, "mean": 16 / 3, "max": 9}
    assert forward["ranks"] == {"min": 3, "mean": 3.5, "max": 4}
    assert forward["waiting"] == {"min": 0.25, "mean": 0.375, "max": 0.5}  # by rank: 1/2, 0, 1/2; 1/4, 0, 1
    assert (forward["ideal_seconds"], forward["of_ideal"]) == (1.5, 1.5 / 4)
    assert forward["gflops_per_second"] == pytest.approx(55 * 2 * 2 * 6 / 4 / 1e9)
    assert forward["algorithm_bandwidth"] == 4 * 10 * 2 * 3 * 4 / 4 and forward["bus_bandwidth"] == 15 / 4
    assert both["runs"] == [7, 8, 10] and both["sent_bytes"]["mean"] == 22 and both["ideal_seconds"] == 3
    assert both["algorithm_bandwidth"] == 12 * 10 * 2 * 3 * 4 / 8
    assert both["gflops_per_second"] == pytest.approx(3.5 * 55 * 2 * 2 * 6 / 8 / 1e9)
    assert backward["counted"] and not forward["counted"] and not both["counted"]
    assert list(passes_of({"passes": {"backward": BACKWARD}}, problem)) == ["backward"]
    assert isinstance(passes["both"], Pass)


def test_bytes_that_differ_are_marked():
    problem = Problem(seqlen=10, heads=2, head_dim=3)
    facts = {
        "tile": "1x2",
        "schedule": "greedy",
        "route": "direct",
        "layout": "contiguous",
        "predicted_seconds": 1.0,
        "checked": {"forward": {"summary": "right"}},
    }
    asked = cases(2, [10], ["ring", "auto"], ["greedy"], ["auto"])[0]
    summaries = [{"forward": passes_of({"passes": {"forward": FORWARD}}, problem)["forward"].summary()}]
    made = report.cases_as_data(asked, [0, 0], [{"facts": facts}], summaries)
    data = {
        "mpiattn": "1",
        "ranks": 2,
        "hosts": 1,
        "compute": "emulated compute",
        "backend": "paced:1",
        "transport": "",
        "runs": 3,
        "warmup": 1,
        "direction": "forward",
        "cases": made,
        "versions": {"numpy": "1", "mpi": "MPI"},
        "environment": {"processor": "P", "cores": 1, "ranks_on_host": 2, "blas": None, "blas_threads": None},
        "machine": {"name": "m", "assumes": ""},
        "problem": {
            "batch": 1,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 3,
            "value_dim": 3,
            "shared_kv": False,
            "dtype": "float32",
            "causal": False,
            "window": [5, None],
        },
    }
    text = report.head_text(data) + report.size_text(data["cases"], data)
    assert text.count("BYTES DIFFER FROM THE FORMULA") == 1 and text.count("emulated compute") == 2
    same = "the plan of 1x2, greedy, auto: direct: auto: 1x2, greedy, auto: direct"
    assert f"not measured again, as they are {same}" in text and "WARNING" not in text
    assert "WARNING" in report.head_text({**data, "compute": "real"})
