"""Plans whose ranks compute pieces of the scores: calls in turn, messages, memory and failures."""

import gc
import re
import weakref

import numpy as np
import pytest
from dense import draw_all, expected, wrong
from dense import masks as of_call
from happens_before import HappensBefore
from runs import agreed, attend, check, my_chunks, on, once, problem_of

from mpiattn import ArgumentError, MeshAttention, MpiattnError, PeerFailure, masks
from mpiattn.backends.testing import deferred, emulated
from mpiattn.engine import piece_executor
from mpiattn.schedule import piece_steps

SHAPE = {"batch": 2, "seqlen": 43, "heads": 4, "kv_heads": 2, "head_dim": 8, "causal": True, "tile": "bands"}
CALLS = [
    {},
    {"cu_seqlens": [0, 20, 43]},
    {"lengths": [5, 0]},
    {"cu_seqlens": [[0, 7, 43], [0, 30, 43]]},
    {"lengths": [0, 0]},
]
IN_TURN = [0, 1, 0, 2, 3, 4, 1]
LARGEST_TAG = 32767  # that every MPI has


@pytest.fixture(autouse=True)
def several_portions(monkeypatch):
    """Pieces of few tokens too come in several portions."""
    monkeypatch.setattr(piece_steps, "LEAST", 4)


def ones(plan):
    p = plan.problem
    return [np.ones((p.batch, len(plan.positions), heads, 8), np.float32) for heads in (p.heads, *[p.kv_heads] * 2)]


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_calls_in_turn(comm, layout):
    """Of one plan, with other documents each, forward and backward, and of a plan like it in between."""
    arguments = {**SHAPE, "dtype": "float32", "layout": layout}
    problem = problem_of(arguments)
    inputs = draw_all(problem)
    with MeshAttention(comm, **arguments, backend="deferred") as plan, plan.like(window=(5, 0)) as other:
        refs = once(comm, lambda: [expected(inputs, **of_call(problem, call)) for call in CALLS])
        ref = once(comm, lambda: expected(inputs, **of_call(other.problem)))
        at = plan.positions, plan.positions_k
        chunks = my_chunks(plan, *inputs)
        for number in IN_TURN:
            call = CALLS[number]
            agreed(comm, wrong(problem, attend(plan, chunks, call), refs[number], inputs, *at, call), (layout, call))
            if number == 2:
                agreed(comm, wrong(other.problem, attend(other, chunks), ref, inputs, *at), (layout, "like"))


def test_more_messages_than_tags(comm, monkeypatch):
    """Several messages under way have the same tag, and no tag is above the largest that every MPI has."""
    tags, tag_of = [], piece_executor._tag

    def noted(*message):
        tags.append(tag_of(*message))
        return tags[-1]

    monkeypatch.setattr(piece_executor, "_tag", noted)
    most = piece_executor.NUMBERS
    monkeypatch.setattr(piece_executor, "NUMBERS", 3)
    check(comm, **{**SHAPE, "batch": 6, "seqlen": 24}, layout="zigzag")
    assert comm.size == 1 or 0 < len(set(tags)) < len(tags)
    assert piece_executor.FIRST_TAG + piece_executor.APART * most <= LARGEST_TAG
    assert all(tag < piece_executor.FIRST_TAG + piece_executor.APART * 3 for tag in tags)


@pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler")
@on(2)
def test_kernels_that_take_rows_side_by_side(group):
    """The rank's own tokens among those of a piece do not lie so where they are striped."""
    check(group, seqlen=12, heads=2, kv_heads=1, head_dim=16, tile="bands", layout="striped", backends=("emulated",))


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_no_races(comm, monkeypatch, layout):
    monkeypatch.setattr(deferred, "LONGEST_DELAY", 0.0)
    monkeypatch.setattr(deferred, "DeferredBackend", HappensBefore)
    for wire_dtype in (None, "bfloat16"):
        with MeshAttention(
            comm, **SHAPE, layout=layout, dtype="float32", wire_dtype=wire_dtype, backend="deferred"
        ) as plan:
            plan._passes.executor("backward")
            backend, executors = plan._backend, plan._passes.executors
            backend.where = lambda executors=executors: " and ".join(each.where for each in executors.values())
            chunks = my_chunks(plan, *draw_all(plan.problem))
            for call in CALLS[:2]:
                attend(plan, chunks, call)
            agreed(comm, "; ".join(list(dict.fromkeys(backend.races))[:2]), (layout, wire_dtype))


@pytest.mark.parametrize("call", [{}, {"lengths": [3, 0]}, {"lengths": [0, 0]}], ids=str)
def test_progress(comm, call):
    """It sums up to the number of ranks, on ranks without a piece too."""
    with MeshAttention(comm, **SHAPE, mask=masks.window(3, 3), dtype="float32") as plan:
        shares, arrays = ([], []), ones(plan)
        out, lse = plan.forward(*arrays, progress=shares[0].append, **call)
        plan.backward(out, *arrays, out, lse, progress=shares[1].append, **call)
        assert [sum(each) for each in shares] == pytest.approx([comm.size, comm.size])


def test_arrays_of_the_caller_are_not_kept(comm):
    with MeshAttention(comm, **SHAPE, dtype="float32") as plan:
        arrays = ones(plan)
        out, lse = plan.forward(*arrays)
        results = plan.backward(out, *arrays, out, lse)
        kept = [weakref.ref(array) for array in (*arrays, out, lse, *results)]
        del arrays, out, lse, results
        gc.collect()
        assert not any(reference() is not None for reference in kept)


@pytest.mark.parametrize("launch", ["attend", "attend_backward", "add"])
def test_a_rank_raises_in_a_pass(comm, at_least, launch):
    at_least(2)
    guilty = comm.size - 1
    plan = MeshAttention(comm, **SHAPE, layout="striped", dtype="float32", timeout=500)
    arrays = ones(plan)
    out, lse = plan.forward(*arrays)

    def fail(*args, **how):
        raise ZeroDivisionError("on purpose")

    if comm.rank == guilty:
        setattr(plan._backend, launch, fail)
    ending = None  # of a rank that had all it needed before the other failed
    try:
        if launch == "attend":
            plan.forward(*arrays)
        else:
            plan.backward(out, *arrays, out, lse)
    except (ZeroDivisionError, PeerFailure) as error:
        ending = error
    endings = comm.allgather(type(ending).__name__)
    assert endings[guilty] == "ZeroDivisionError" and set(endings) <= {"ZeroDivisionError", "PeerFailure", "NoneType"}
    if isinstance(ending, PeerFailure):
        assert ending.ranks == (guilty,) and re.search(r"(in step \d+ of \d+|at the end) of the \w+ pass", str(ending))
    if ending is not None:
        with pytest.raises(MpiattnError, match="make a new one"):
            plan.forward(*arrays, check=False)
    comm.Barrier()
    plan.close()
    check(comm, **SHAPE)


def test_what_it_refuses(comm):
    for option, value in ("schedule", "collective"), ("route", "ring"), ("mesh_layout", "zigzag"):
        with pytest.raises(ArgumentError, match=rf"^{option} is '{value}'; with tile bands, "):
            MeshAttention(comm, **SHAPE, **{option: value})


def test_without_overlap(comm):
    """No block runs before all portions are here, and the results are the same but for rounding."""
    results = []
    for overlap in (True, False):
        with MeshAttention(comm, **SHAPE, dtype="float32", overlap=overlap) as plan:
            out, lse = plan.forward(*ones(plan))
            results.append((out, lse))
            blocks = [step.blocks for step in plan._passes.executors["forward"].steps.steps[:-1]]
    assert not any(blocks)
    assert all(np.allclose(*pair, rtol=1e-6, atol=1e-6) for pair in zip(*results))
