"""`plan.verify` of calls with biases and dropout: right results pass, a fault in each kind of bias is noticed."""

import os

import biased
import draws
import numpy as np
import pytest
from dense import draw_all
from random_cases import draw_case
from runs import my_chunks, problem_of, subcomm
from test_agreement import same_error
from test_biases import of_rank

from mpiattn import MeshAttention, VerificationError
from mpiattn.arguments.biases import BiasArguments
from mpiattn.verify import bias_gradients, compare, gradients, reference_biases, spread, spread_biases

SEED, RANDOM = draws.seed(), int(os.environ.get("MPIATTN_CASES", "4"))
SHAPE = {"batch": 2, "seqlen": 45, "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6}
TILES = {1: "1x1", 2: "2x1x1", 3: "1x3", 4: "2x1x2"}
DRAWN = ["dbias", "dkey_bias", "dalibi_slopes"]
PARAMETERS = ["dalibi_slopes", "drelative_bias"]
CASES = [
    ("bias", {"causal": True, "layout": "zigzag", "softcap": 2.0}, {}, 0),
    ("key_bias alibi", {"layout": "striped", "dtype": "float16"}, {}, 1),
    ("relative dropout", {"seqlen_k": 31, "dtype": "float64"}, {}, 2),
    ("grid", {"layout": "contiguous"}, {}, 3),
    ("bias key_bias alibi relative dropout", {"causal": True}, {"cu_seqlens": [0, 20, 45]}, 4),
    ("key_bias alibi relative dropout", {"tile": "bands", "causal": True}, {"cu_seqlens": [0, 20, 45]}, 5),
    ("grid key_bias", {"tile": "bands", "layout": "zigzag"}, {}, 6),
]


def results(plan, arguments, drawn, call):
    """This rank's inputs and results, as arguments of `verify`."""
    inputs, own = my_chunks(plan, *draw_all(problem_of(arguments), sinks=True)), of_rank(plan, drawn)
    shared = None
    if drawn.bias is not None:
        shared = own["bias_shared"] = [name for name, n in zip(("batch", "heads"), drawn.bias.shape) if n == 1]
    with_shared = {} if shared is None else {"bias_shared": own.pop("bias_shared")}
    out, lse = plan.forward(*inputs[:3], sinks=inputs.sinks, **own, **call)
    how = {"dlse": inputs.dlse, "sinks": inputs.sinks, **own, **with_shared, **call}
    grads = plan.backward(inputs.dout, *inputs[:3], out, lse, **how)
    given = {"out": out, "lse": lse, "dout": inputs.dout, "grads": list(grads)}
    return {"q": inputs.q, "k": inputs.k, "v": inputs.v, **given, **how}


def made(comm, drawn, more):
    tile = {"tile": TILES[comm.size]} if comm.size in TILES else {}
    return MeshAttention(comm, **tile | SHAPE | more, backend="numpy", key_bias=drawn.key_bias is not None)


@pytest.mark.draw(3)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_right(comm, monkeypatch, case):
    kinds, more, call, seed = CASES[case]
    drawn = biased.draw(problem_of(SHAPE | more), seed, kinds)
    with made(comm, drawn, more) as plan:
        given = results(plan, SHAPE | more, drawn, call)
        names = ["out", "lse", "dq", "dk", "dv", "dsinks", *(f"d{name}" for name in drawn.given)]
        sampled = plan.verify(**given, samples=2)
        monkeypatch.setattr(spread, "STATE_BYTES", 30000)  # several turns of few tokens
        monkeypatch.setattr(spread_biases, "STATE_BYTES", 30000)
        every = plan.verify(**given, samples=None)
        assert sampled.passed and every.passed
        assert [array.name for array in every.arrays] == names
        left_out = PARAMETERS if sampled.arrays[0].checked < 45 else []
        assert [array.name for array in sampled.arrays] == [name for name in names if name not in left_out]
        for array in every.arrays:
            assert array.checked == array.of, array


FAULTS = {
    "forgotten": lambda given: {name: given[name] for name in given if name not in ("bias", "bias_shared")},
    "another tile": lambda given: given | {"bias": given["bias"][:, :, ::-1].copy()},
    "wrong column": lambda given: given | {"bias": np.roll(given["bias"], 1, axis=3)},
    "keys": lambda given: given | {"key_bias": given["key_bias"][..., ::-1].copy()},
    "slopes": lambda given: given | {"alibi_slopes": given["alibi_slopes"][::-1].copy()},
    "table": lambda given: given | {"relative_bias": given["relative_bias"][:, ::-1].copy()},
    "seed": lambda given: given | {"seed": given["seed"] ^ 1},
    "probability": lambda given: given | {"dropout": given["dropout"] / 2},
}


def test_faults(comm):
    """Results of a call are not those of one that differs in any bias, or in the seed, and not on one rank alone."""
    drawn = biased.draw(problem_of(SHAPE), 5, "bias key_bias alibi relative dropout")
    drawn = drawn._replace(relative_bias=np.arange(9, dtype=np.float32)[None] / 8)
    with made(comm, drawn, {"layout": "striped"}) as plan:
        given = results(plan, SHAPE, drawn, {})
        del given["dout"], given["dlse"], given["grads"]
        given.pop("bias_shared")
        for name, fault in FAULTS.items():
            text = same_error(comm, lambda fault=fault: plan.verify(**fault(given), samples=2), VerificationError)
            assert "out off by" in text and "lse" in text, name
        wrong = FAULTS["another tile"](given) if comm.rank == comm.size - 1 else given
        assert "out off by" in same_error(comm, lambda: plan.verify(**wrong, samples=2), VerificationError)
        assert plan.verify(**given).passed


def test_wrong_gradients(comm):
    """One number of one rank, of a key or a query that every sample has."""
    drawn = biased.draw(problem_of(SHAPE), 5, "bias key_bias alibi relative")
    with made(comm, drawn, {"layout": "contiguous"}) as plan:
        given, guilty = results(plan, SHAPE, drawn, {}), comm.size - 1
        names = ("bias", "key_bias", "alibi_slopes", "relative_bias")
        for number, name in enumerate(names, 6):
            grads = [gradient.copy() for gradient in given["grads"]]
            if comm.rank == guilty:
                grads[number - 2].reshape(-1)[-1] += 10
            wrong = given | {"grads": grads}
            text = same_error(comm, lambda wrong=wrong: plan.verify(**wrong, samples=None), VerificationError)
            place = {"bias": "query 44", "key_bias": "key 44", "alibi_slopes": "head 3"}.get(name, "head")
            assert f"failed: d{name} off by" in text and f"worst at {place}" in text
            assert f"of rank {guilty}" in text and text.count("worst") == 1


def test_arguments(comm, at_least):
    drawn = biased.draw(problem_of(SHAPE), 5, "bias alibi")
    with made(comm, drawn, {"layout": "contiguous"}) as plan:
        given = results(plan, SHAPE, drawn, {})
        for says, wrong in {
            "bias has shape": {"bias": given["bias"][..., 1:]},
            "dbias has dtype": {"grads": [*given["grads"][:4], given["grads"][4].astype(np.float64)]},
            "dalibi_slopes has shape": {"grads": [*given["grads"][:5], given["grads"][5][:1]]},
            "grads are 7 of them": {"grads": [*given["grads"], None]},
            "key_bias is given": {"key_bias": np.zeros(45, np.float32)},
            "bias_shared is 'heads'": {"bias_shared": "heads"},
            "sample_seed is -1": {"sample_seed": -1},
        }.items():
            asked = given | (wrong if comm.rank == comm.size - 1 else {})
            assert says in same_error(comm, lambda asked=asked: plan.verify(**asked))
        some = plan.verify(**given | {"grads": given["grads"][:5]}, samples=None)
        assert [array.name for array in some.arrays][-1] == "dbias"


def test_of_files(comm):
    """What the command line compares, with inputs that every rank can read: all rows, and a sample."""
    problem = problem_of(SHAPE)
    drawn = biased.draw(problem, 3, "bias key_bias alibi dropout")
    whole = draw_all(problem)
    with made(comm, drawn, {"layout": "striped"}) as plan:
        given = results(plan, SHAPE, drawn, {})
        sinkless = {name: value for name, value in given.items() if name in (*drawn.given, "dropout", "seed")}
        out, lse = plan.forward(given["q"], given["k"], given["v"], **sinkless)
        grads = plan.backward(
            given["dout"], given["q"], given["k"], given["v"], out, lse, bias_shared=given["bias_shared"], **sinkless
        )
        at, at_k = np.arange(45), np.arange(45)
        keys = drawn.key_bias.reshape((1,) * (3 - drawn.key_bias.ndim) + drawn.key_bias.shape)
        dense, of_keys = reference_biases.Block(at, at_k, drawn.bias), reference_biases.Numbers(at_k, keys)
        arguments = BiasArguments(alibi_slopes=drawn.alibi_slopes, dropout=drawn.dropout, seed=drawn.seed)
        rules = spread_biases.rules_of(problem, arguments, dense, of_keys)
        arrays = dict(zip(("q", "k", "v", "dout"), whole))
        source = compare.Source(problem, lambda name, start, stop: arrays[name][:, start:stop], None, rules)
        place = drawn.bias.shape[:2], plan.bias_sequences, plan.bias_heads, *plan.bias_positions

        def reports(limit, fault=None):
            got = [gradient.copy() for gradient in grads]
            if fault is not None and comm.rank == comm.size - 1:
                got[fault].reshape(-1)[:] += 1
            of_own_keys = got[4].reshape((1,) * (3 - got[4].ndim) + got[4].shape)
            tile = bias_gradients.TileGradient(got[3], *place)
            check = bias_gradients.BiasGradients(plan._peers, source, tile, of_own_keys, got[5])
            layouts = plan.q_layout, plan.k_layout
            return gradients.verify_results(plan._peers, source, layouts, (out, lse, *got[:3]), limit, biases=check)

        every = reports(1e11)
        assert all(report.passed for report in every) and list(every[2].errors) == DRAWN
        assert every[2].rows == every[2].of_rows
        for fault, name in enumerate(DRAWN, 3):
            wrong = reports(1e11, fault)
            assert wrong[0].passed and wrong[1].passed and not wrong[2].passed
            assert [of for of, error in wrong[2].errors.items() if error > wrong[2].tolerance] == [name]
        some = reports(min(4e5, 1.2e6 / comm.size))
        assert all(report.passed for report in some) and list(some[2].errors) == DRAWN[:2]
        assert some[2].rows < some[2].of_rows
        assert [reports(4e5, fault)[2].passed for fault in (3, 4)] == [False, False]


def test_tensors(comm):
    """Tensors that require gradients, as a model has them."""
    torch = pytest.importorskip("torch")
    drawn = biased.draw(problem_of(SHAPE), 5, "bias key_bias alibi relative")
    with made(comm, drawn, {"layout": "contiguous"}) as plan:
        given = results(plan, SHAPE, drawn, {})
        tensors = {name: torch.tensor(given[name], requires_grad=True) for name in (*drawn.given, "q", "k", "v")}
        grads = [torch.tensor(gradient) for gradient in given["grads"]]
        verification = plan.verify(**given | tensors | {"grads": grads}, samples=None)
        assert verification.passed and len(verification.arrays) == 10


@pytest.mark.many
def test_random_cases(comm):
    """Masks, tiles and dtypes of any kind, a sample and all."""
    for index in range(RANDOM):
        case = draw_case(SEED, 2 * 10**6 + index, comm.size)
        drawn = biased.draw(problem_of(case.plan), case.seed, tile=case.plan["tile"])
        call = case.call
        if drawn.alibi_slopes is not None or drawn.relative_bias is not None:
            call = {} if set(call) - {"cu_seqlens", "padding"} else call
        with subcomm(comm, case.members) as group:
            if group is None:
                continue
            how = {"backend": "numpy", "key_bias": drawn.key_bias is not None}
            with MeshAttention(group, **case.plan, **how) as plan:
                given = results(plan, case.plan, drawn, call)
                assert all(plan.verify(**given, samples=samples).passed for samples in (2, None))
