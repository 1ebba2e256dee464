"""Case 37: prefix-LM, block-causal and a kind by document, everywhere that masks go."""

from collections import Counter

import numpy as np
import pytest
from dense import Inputs, Result, bits, draw_all, expected, masks, wrong
from runs import agreed, attend, check, my_chunks, on, problem_of
from test_agreement import same_error

from mpiattn import Layout, MeshAttention, attention
from mpiattn.engine import call_cache
from mpiattn.engine.call_cache import RECENT
from mpiattn.problem.mask import Mask

WAYS = (("greedy", "direct"), ("greedy", "ring"), ("collective", "direct"))  # schedule and route
MASKS = [
    {"prefix": 17},
    {"causal_block": 8},
    {"prefix": 9, "causal_block": 16, "window": (30, None)},
    {"prefix": 20, "window": (None, 4)},
    {"causal_block": 10, "window": (12, 3)},
]
CALLS = [
    {"cu_seqlens": [0, 13, 13, 40, 58], "prefixes": [4, 0, 100, 7], "padding": True},
    {
        "cu_seqlens": [[2, 30, 61], [0, 5, 60]],
        "prefixes": [[3, 0], [9, 20]],
        "causal_documents": [[True, False], [False, True]],
        "padding": True,
    },
    {"lengths": [61, 20], "prefixes": [25, 25]},
    {"causal_documents": [False, True], "prefixes": [5, 5]},
]


@pytest.mark.draw(6)
@on(1, 2, 3, 4, 5, 6)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_case_37_of_a_plan(group, mask):
    for layout in ("contiguous", "striped", "zigzag"):
        for schedule, route in WAYS:
            check(
                group,
                batch=2,
                seqlen=61,
                heads=4,
                kv_heads=2,
                head_dim=8,
                dtype="float64",
                layout=layout,
                schedule=schedule,
                route=route,
                backends=("numpy",),
                **mask,
            )


@pytest.mark.draw(6)
@on(1, 2, 3, 4, 5, 6)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_case_37_of_a_call(group, call):
    for layout, mask in (
        ("contiguous", {"causal": True}),
        ("striped", {"causal_block": 6, "window": (20, None)}),
        ("zigzag", {"causal": True}),
    ):
        check(
            group,
            batch=2,
            seqlen=61,
            heads=4,
            kv_heads=2,
            head_dim=8,
            dtype="float64",
            layout=layout,
            call=call,
            sinks=True,
            **mask,
        )


@pytest.mark.draw(3)
@on(3, 5)
@pytest.mark.parametrize("shape", [(41, 90), (90, 41), (7, 60), (3, 3)])
def test_case_37_other_number_of_keys(group, shape):
    """Uneven chunks too, some of them empty."""
    n = group.size
    uneven = tuple(
        Layout("contiguous", total, n, (0, *(total // 4,) * (n - 2), total - total // 4 * (n - 2))) for total in shape
    )
    for layout in ("zigzag", "striped", uneven):
        for mask in ({"prefix": 13}, {"causal_block": 7, "window": (50, None)}):
            check(
                group, seqlen=shape[0], seqlen_k=shape[1], heads=2, head_dim=4, dtype="float64", layout=layout, **mask
            )


@on(4)
def test_prefix_of_everything_is_full(group):
    shape = {"seqlen": 40, "heads": 2, "head_dim": 4, "tile": "2x2", "layout": "striped"}
    results = []
    for mask in ({}, {"prefix": 40}, {"causal_block": 1000}):
        with MeshAttention(group, **shape, **mask) as plan:
            results.append(attend(plan, my_chunks(plan, *draw_all(plan.problem))))
    assert all(np.array_equal(a, b) for result in results[1:] for a, b in zip(results[0][:5], result[:5]))


def test_choice_minds_them(comm):
    """Work and bytes are those of the mask: what auto goes by, and what blocks without work there are."""
    with MeshAttention(comm, seqlen=64, heads=2, head_dim=4, causal_block=16, layout="zigzag") as plan:
        assert plan.problem.pairs == 16 * (16 + 32 + 48 + 64)
        work = comm.allgather(plan.pairs())
        assert sum(work) == plan.problem.pairs
        assert plan.balance == pytest.approx(max(work) * comm.size / sum(work))


def test_one_launch_a_block(comm):
    """A query still sees one interval of keys."""
    with MeshAttention(
        comm,
        batch=2,
        seqlen=48,
        heads=2,
        head_dim=4,
        prefix=5,
        causal_block=7,
        layout="striped",
        schedule="greedy",
        tile="ring",
    ) as plan:
        launches, backend = Counter(), plan._backend

        def counted(name):
            launch = getattr(backend, name)

            def call(*arguments, **options):
                launches[name] += 1
                return launch(*arguments, **options)

            setattr(backend, name, call)

        counted("attend")
        counted("attend_backward")
        attend(plan, my_chunks(plan, *draw_all(plan.problem)), {"cu_seqlens": [0, 48], "prefixes": [9]})
        assert launches == {"attend": comm.size, "attend_backward": comm.size}


def test_in_one_call(comm):
    lengths = [5 + rank for rank in range(comm.size)]
    total, start = sum(lengths), sum(lengths[: comm.rank])
    own = slice(start, start + lengths[comm.rank])
    for mask, call in (
        ({"prefix": 9}, {}),
        ({"causal_block": 4}, {"prefixes": [3]}),
        ({"causal": True}, {"cu_seqlens": [0, 4, total], "causal_documents": [False, True]}),
    ):
        problem = problem_of({"seqlen": total, "heads": 2, "head_dim": 4, **mask})
        inputs = draw_all(problem)
        ref = expected(inputs, backward=False, **masks(problem, call))
        result = Result(*attention(*(array[:, own] for array in inputs[:3]), comm=comm, **mask, **call))
        agreed(comm, wrong(problem, result, ref, Inputs(*inputs[:3]), own, own, call), mask)


def test_ranks_that_disagree(comm, at_least):
    at_least(2)
    last = comm.rank == comm.size - 1
    with MeshAttention(comm, seqlen=24, heads=2, head_dim=4, causal=True) as plan:
        q = np.ones((1, len(plan.positions), 2, 4), np.float32)
        for of_last, of_others in (
            ({"prefixes": [3]}, {"prefixes": [4]}),
            ({"prefixes": [3]}, {}),
            ({"causal_documents": [False]}, {"causal_documents": [True]}),
        ):
            text = same_error(comm, lambda: plan.forward(q, q, q, **(of_last if last else of_others)))  # noqa: B023
            assert "prefixes or causal_documents" in text and "must be the same on every rank" in text
        text = same_error(comm, lambda: plan.forward(q, q, q, prefixes=[-1] if last else [1]))
        assert "prefixes is" in text and "at least 0" in text
    for name, values in (("prefix", (3, 4)), ("causal_block", (3, None))):
        text = same_error(comm, lambda: MeshAttention(comm, seqlen=24, heads=2, head_dim=4, **{name: values[last]}))  # noqa: B023
        assert text.startswith(f"{name} is") or text.startswith("causal is")


def test_documents_are_looked_at_once(comm, monkeypatch):
    """A call with documents of one of the last calls decides nothing again; its bits are those of a new plan."""
    looks = []
    key_interval = Mask.key_interval
    monkeypatch.setattr(Mask, "key_interval", lambda *args: looks.append(args) or key_interval(*args))
    shape = {"seqlen": 24, "heads": 2, "head_dim": 4, "causal": True, "layout": "zigzag"}
    cuts = [[0, 3 + i, 12 + i // 2, 24] for i in range(RECENT)]
    with MeshAttention(comm, **shape) as plan:
        q = np.random.default_rng(comm.rank).standard_normal((1, len(plan.positions), 2, 4)).astype(np.float32)
        first = [bits(*plan.forward(q, q, q, cu_seqlens=cut)) for cut in cuts]
        del looks[:]
        assert [bits(*plan.forward(q, q, q, cu_seqlens=cut)) for cut in cuts] == first and not looks
        assert bits(*plan.forward(q, q, q, cu_seqlens=np.array(cuts[3]))) == first[3] and not looks
        plan.forward(q, q, q, cu_seqlens=[0, 24])  # one more than are kept: that of the oldest goes
        del looks[:]
        assert bits(*plan.forward(q, q, q, cu_seqlens=cuts[3])) == first[3] and not looks
        assert bits(*plan.forward(q, q, q, cu_seqlens=cuts[0])) == first[0]
        assert comm.allreduce(len(looks)) > 0
        monkeypatch.setattr(call_cache, "KEPT_BYTES", 0)
        plan.forward(q, q, q, cu_seqlens=cuts[1])
        assert len(plan._passes.call_cache._recent) <= 2
    with MeshAttention(comm, **shape) as other:
        assert [bits(*other.forward(q, q, q, cu_seqlens=cut)) for cut in cuts] == first
