"""`plan.verify` and `verify=True`: right results of every kind pass, a wrong one is named with its rank and token."""

from itertools import product

import numpy as np
import pytest
from dense import draw_all
from runs import attend, my_chunks, problem_of, tiles
from test_agreement import same_error

from mpiattn import ArgumentError, CallError, Layout, MeshAttention, VerificationError, attention
from mpiattn.verify import spread

SHAPE = {"batch": 2, "seqlen": 45, "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6}
CASES = [
    ({"causal": True, "dtype": "float64"}, {}),
    ({"causal": True, "dtype": "float16", "softcap": 2.0, "layout": "zigzag"}, {}),
    ({"seqlen_k": 31, "dtype": "bfloat16", "window": (5, 2), "layout": "striped"}, {}),
    ({"seqlen_k": 60, "causal": True, "prefix": 7, "wire_dtype": "bfloat16", "route": "direct"}, {}),
    ({"causal": True, "layout": "striped"}, {"cu_seqlens": [0, 7, 7, 30, 45], "prefixes": [3, 0, 50, 1]}),
    (
        {"dtype": "float64"},
        {"cu_seqlens": [[0, 9, 45], [3, 30]], "causal_documents": [[True, False], [True]], "padding": True},
    ),
    ({"causal": True, "layout": "zigzag"}, {"lengths": [45, 0], "prefixes": [2, 4]}),
    ({"seqlen_k": 31, "causal": True}, {"lengths": [20, 45], "lengths_k": [31, 5]}),
    ({"shared_kv": True, "scale": 0.3, "kv_heads": 1, "causal": True, "causal_block": 4}, {}),
    ({"seqlen": 3, "seqlen_k": 2}, {}),
    ({"seqlen": 0, "seqlen_k": 9}, {}),
    ({"seqlen": 9, "seqlen_k": 0}, {}),
]


def uneven(comm, tokens):
    """Chunks of which those of odd ranks are empty."""
    holders = (comm.size + 1) // 2
    sizes = [0 if rank % 2 else (tokens * (rank // 2 + 1)) // holders - (tokens * (rank // 2)) // holders
             for rank in range(comm.size)]  # fmt: skip
    return Layout("contiguous", tokens, comm.size, tuple(sizes))


def results(plan, arguments, call=None, sinks=True):
    """This rank's inputs and results, as arguments of `verify`."""
    inputs = my_chunks(plan, *draw_all(problem_of(arguments), sinks=sinks))
    done = attend(plan, inputs, call)
    grads = [done.dq, done.dk, done.dv, *[done.dsinks] * sinks]
    given = {"out": done.out, "lse": done.lse, "dout": inputs.dout, "dlse": inputs.dlse, "grads": grads}
    return {"q": inputs.q, "k": inputs.k, "v": inputs.v, "sinks": inputs.sinks, **given, **(call or {})}


@pytest.mark.draw(8)
@pytest.mark.many
@pytest.mark.parametrize("pieces", [False, True], ids=["tile", "bands"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_right(comm, monkeypatch, case, pieces):
    (more, call), sinks = CASES[case], case % 2 == 1
    tile = tiles(comm.size)[-1 if sinks else 0]
    if pieces:
        tile = "bands"
    arguments = {"layout": "contiguous", **SHAPE, **more}
    if arguments["layout"] == "contiguous":
        lengths = arguments["seqlen"], arguments.get("seqlen_k", arguments["seqlen"])
        arguments["layout"] = tuple(uneven(comm, tokens) for tokens in lengths)
    with MeshAttention(comm, **arguments, tile=tile) as plan:
        given = results(plan, arguments, call, sinks)
        names = ["out", "lse", "dq", "dk", *["dv"] * (not plan.problem.shared_kv), *["dsinks"] * sinks]
        sampled = plan.verify(**given, samples=2)
        monkeypatch.setattr(spread, "STATE_BYTES", 30000)  # several turns, and pieces of few tokens
        monkeypatch.setattr(spread.steps, "__defaults__", (9000,))
        every = plan.verify(**given, samples=None)
        for verification in (sampled, every):
            assert verification.passed and [array.name for array in verification.arrays] == names
        for array, part in zip(every.arrays, sampled.arrays):
            assert part.checked <= array.checked == array.of and "all" in str(every)
        forward = plan.verify(*(given[name] for name in ("q", "k", "v", "out", "lse")), sinks=given["sinks"], **call)
        assert [array.name for array in forward.arrays] == ["out", "lse"]


@pytest.fixture
def plan(comm):
    with MeshAttention(comm, **SHAPE, causal=True, layout="zigzag") as made:
        yield made


@pytest.fixture
def given(plan):
    return results(plan, {**SHAPE, "causal": True})


def damaged(given, name, at, value):
    """The arguments with one element of a result changed."""
    given = dict(given)
    grads = dict(zip(("dq", "dk", "dv", "dsinks"), given["grads"]))
    array = (grads[name] if name in grads else given[name]).copy()
    array[at] += value
    if name in grads:
        given["grads"] = list({**grads, name: array}.values())
    else:
        given[name] = array
    return given


def test_one_wrong_element(comm, plan, given):
    """Of one rank, in the last token of its chunk, which every sample has."""
    guilty = comm.size - 1
    for name, value in product(("out", "lse", "dq", "dk", "dv", "dsinks"), (0.01, np.nan)):
        at = {"lse": (1, 3, -1), "dsinks": (2,)}.get(name, (1, -1, 1, 5))
        wrong = damaged(given, name, at, value) if comm.rank == guilty else given
        text = same_error(comm, lambda wrong=wrong: plan.verify(**wrong, samples=1), VerificationError)
        token = f"{'key' if name in ('dk', 'dv') else 'query'} {plan.q_layout.positions(guilty)[-1]}"
        first = text.split("; ")[0]  # out and lse of the run are what dk and dv are compared with
        assert f"worst at {'head 2' if name == 'dsinks' else token} of rank {guilty}" in first
        assert f"failed: {name} off by" in first and (value == value) != ("finite on one side only" in first)
        assert name in ("out", "lse") or text.count("worst") == 1
    assert plan.verify(**given).passed, "the plan goes on"


def test_the_sample(comm, plan, given):
    """Another seed draws other tokens; a token outside of the sample is not seen, nor said to be compared."""
    wrong = damaged(given, "dk", (0, len(plan.positions) // 4, 0, 0), 0.1)  # of every rank, at no end of a range
    seen = set()
    for seed in range(12):
        try:
            verification = plan.verify(**wrong, samples=2 if comm.size > 1 else 5, sample_seed=seed)
        except VerificationError as error:
            verification = error.verification
        dk = verification.arrays[3]
        assert dk.name == "dk" and dk.checked < dk.of and dk.passed == verification.passed
        seen.add(dk.passed)
    assert comm.size > 4 or seen == {True, False}
    assert "dk off by" in same_error(comm, lambda: plan.verify(**wrong, samples=None), VerificationError)


def test_another_mask(comm, plan, given):
    """Results of a call without documents are not those of one with documents."""
    text = same_error(comm, lambda: plan.verify(**given, cu_seqlens=[0, 20, 45]), VerificationError)
    assert "out off by" in text and "dk off by" in text


WRONG = {
    "grads are 2 of them": {"grads": [None, None]},
    "grads are a ndarray": {"grads": np.zeros(3)},
    "dq is a NoneType": {"grads": [None] * 3},
    "dout is None": {"dout": None},
    "dout is given without grads": {"grads": None},
    "samples is 0; it must be a whole number, at least 1, or None": {"samples": 0},
    "sample_seed is None; it must be a whole number, at least 0": {"sample_seed": None},
    "out has shape": {"out": np.zeros(3, np.float32)},
    "cu_seqlens is": {"cu_seqlens": [5]},
}


def test_wrong_arguments(comm, plan, given):
    for says, wrong in WRONG.items():
        asked = {**given, **(wrong if comm.rank == comm.size - 1 else {})}
        assert says in same_error(comm, lambda asked=asked: plan.verify(**asked))


def test_arguments_that_differ(comm, plan, given, at_least):
    at_least(2)
    arrays = [given[name] for name in ("q", "k", "v", "out", "lse")]
    rest = {"sinks": given["sinks"]}
    of_grads = {name: given[name] for name in ("dout", "dlse", "grads")}
    assert "samples is 1" in same_error(comm, lambda: plan.verify(*arrays, **rest, samples=1 + comm.rank))
    some = of_grads if comm.rank == 0 else {}
    assert "number of grads is 4 on rank 0" in same_error(comm, lambda: plan.verify(*arrays, **rest, **some))
    same_error(comm, lambda: plan.verify(**given) if comm.rank else plan.forward(*arrays[:3]), CallError)


def test_attention(comm, monkeypatch):
    inputs = draw_all(problem_of(SHAPE))[:3]
    own = slice(*(45 * (comm.rank + side) // comm.size for side in (0, 1)))
    chunks = [array[:, own] for array in inputs]
    call = {"comm": comm, "causal": True, "cu_seqlens": [0, 20, 45]}
    for out in (attention(*chunks, **call)[0], attention(*chunks, **call, verify=True)[0]):
        assert out.shape == (2, own.stop - own.start, 4, 6)
    forward = MeshAttention.forward

    def wrong(self, *arrays, **options):
        out, lse = forward(self, *arrays, **options)
        out[:, -1:] *= 1 + (comm.rank == 0)
        return out, lse

    monkeypatch.setattr(MeshAttention, "forward", wrong)
    text = same_error(comm, lambda: attention(*chunks, **call, verify=True), VerificationError)
    assert "out off by" in text and f"worst at query {45 // comm.size - 1} of rank 0" in text
    assert "verify is 1; it must be True or False" in same_error(comm, lambda: attention(*chunks, **call, verify=1))
    if comm.size > 1:
        text = same_error(comm, lambda: attention(*chunks, **call, verify=comm.rank == 0), ArgumentError)
        assert "verify is True on rank 0 but False on rank 1" in text
