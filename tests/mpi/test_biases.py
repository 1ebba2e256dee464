"""Biases and dropout on ranks: every kind, alone and together, in plans of any shape, against dense float64."""

import os
import random

import biased
import draws
import numpy as np
import pytest
from dense import draw_all, error, largest, masks
from random_cases import draw_case
from runs import my_chunks, problem_of, subcomm

from mpiattn import MeshAttention
from mpiattn.comm import rounds
from mpiattn.engine import biases

SEED = draws.seed()
CASES = int(os.environ.get("MPIATTN_CASES", "12"))
ONLY = os.environ.get("MPIATTN_CASE")
TOLERANCE = {"float64": 1e-9, "float32": 3e-5, "float16": 2e-2, "bfloat16": 8e-2}


def of_rank(plan, drawn):
    """What this rank gives of whole biases: its tile, its keys."""
    some = drawn._asdict()
    if drawn.bias is not None:
        rows, columns = plan.bias_positions
        tile = drawn.bias
        tile = tile[plan.bias_sequences if len(tile) > 1 else slice(None)]
        tile = tile[:, plan.bias_heads if tile.shape[1] > 1 else slice(None)]
        some["bias"] = np.ascontiguousarray(tile[:, :, rows[:, None], columns])
    if drawn.key_bias is not None:
        some["key_bias"] = np.ascontiguousarray(drawn.key_bias[..., plan.positions_k])
    return {name: value for name, value in some.items() if value is not None}


def complaint(comm, case, drawn, backend):
    """What is wrong with the results on this rank, as text, or None."""
    problem = problem_of(case.plan)
    p, inputs = problem, draw_all(problem, case.seed, 1.0, case.sinks, case.dlse)
    *right, gradients, sizes = biased.expected(p, inputs, drawn, **masks(p, case.call))
    with MeshAttention(comm, **case.plan, backend=backend, key_bias=drawn.key_bias is not None) as plan:
        chunks, own = my_chunks(plan, *inputs), of_rank(plan, drawn)
        options = {**case.call, **own, "sinks": chunks.sinks}
        at, at_k = plan.positions, plan.positions_k
        right = dict(zip(("out", "lse", "dq", "dk", "dv", "dsinks"), right))
        for name, tokens in (("out", at), ("dq", at), ("dk", at_k), ("dv", at_k)):
            right[name] = None if right[name] is None else right[name][:, tokens]
        right["lse"] = right["lse"][..., at]
        for _ in range(1 + case.seed % 2):
            before = plan.sent[0]
            got = dict(zip(("out", "lse"), plan.forward(*chunks[:3], **options)))
            if plan.sent[0] - before != plan.formula(activity=plan.activity_of(**case.call)):
                return f"{plan.sent[0] - before} bytes were sent forward"
            names = ["dq", "dk", "dv", *["dsinks"] * case.sinks, *(f"d{name}" for name in drawn.given)]
            shared = drawn.bias is not None and [
                name for name, length in zip(("batch", "heads"), drawn.bias.shape) if length == 1
            ]
            gradients_of = {"dlse": chunks.dlse, "bias_shared": None if drawn.bias is None else shared}
            results = plan.backward(chunks.dout, *chunks[:3], got["out"], got["lse"], **gradients_of, **options)
            got |= dict(zip(names, results, strict=True))
            if drawn.bias is not None:
                tile = plan.scatter_bias(drawn.bias if comm.rank == 0 else None)
                if not np.array_equal(tile, own["bias"]) or tile.dtype != drawn.bias.dtype:
                    return "scatter_bias gives another tile"
                whole = plan.gather_bias(tile, bias_shared=shared)
                if comm.rank == 0 and not np.array_equal(whole, drawn.bias):
                    return "gather_bias gives another bias"
        for name, ref in gradients.items():
            if name == "bias":
                rows, columns = plan.bias_positions
                ref = ref[plan.bias_sequences if len(ref) > 1 else slice(None)]
                ref = ref[:, plan.bias_heads if ref.shape[1] > 1 else slice(None)][:, :, rows[:, None], columns]
            right[f"d{name}"] = ref[..., plan.positions_k] if name == "key_bias" else ref
    limit = max(TOLERANCE[p.dtype], TOLERANCE[p.wire_dtype]) / (1 - drawn.dropout)
    for name, ref in right.items():
        if ref is None:
            continue
        scale = max(largest(ref), 1, sizes.get(name, 0))
        off = error(np.asarray(got[name]).astype(np.float64), ref)
        if off > limit * scale:
            return f"{backend}: {name} is off by {off:.2e}, of {scale:.2e}"
    return None


@pytest.fixture(autouse=True)
def pieces_of_few_rows(monkeypatch):
    """Whole biases go to their tiles in many messages, and work arrays hold a few rows."""
    monkeypatch.setattr(rounds, "PIECE_BYTES", 2000)
    monkeypatch.setattr(biases, "PIECE", 500)


@pytest.mark.many
def test_random_cases(comm):
    failures = []
    for index in [int(ONLY)] if ONLY else range(CASES):
        case = draw_case(SEED, 10**6 + index, comm.size)
        rng = random.Random(f"{SEED} {index}")
        narrow, tile = rng.random() < 0.3, case.plan["tile"]
        drawn = biased.draw(problem_of(case.plan), case.seed, narrow=narrow, tile=tile)
        if drawn.alibi_slopes is not None or drawn.relative_bias is not None:
            case = case._replace(call={} if set(case.call) - {"cu_seqlens", "padding"} else case.call)
        again = (
            f"MPIATTN_SEED={SEED} MPIATTN_CASE={index} mpiexec -n {comm.size} python -m pytest tests/mpi/test_biases.py"
        )
        with subcomm(comm, case.members) as group:
            failure = complaint(group, case, drawn, case.backends[0]) if group else None
        texts = [text for text in comm.allgather(failure) if text]
        if texts:
            failures.append(f"{again}: {drawn.given} dropout {drawn.dropout} {case}: {texts[0]}")
    assert not failures, "\n".join(failures)
