"""Biases and dropout: what a call cannot take, what its gradients are, and how much memory it needs."""

import tracemalloc

import biased
import numpy as np
import pytest
from dense import draw_all, error, largest
from runs import my_chunks, on, problem_of
from test_agreement import same_error

from mpiattn import ArgumentError, MeshAttention

PLAN = {"seqlen": 24, "heads": 4, "head_dim": 8, "batch": 2, "backend": "numpy", "layout": "contiguous"}


@pytest.fixture
def plan(comm):
    with MeshAttention(comm, **PLAN, tile=(1, comm.size)) as made:
        yield made


def arrays(plan):
    return np.ones((3, 2, len(plan.positions), 4, 8), np.float32)


def tile(plan, heads=4, dtype=np.float32):
    rows, columns = map(len, plan.bias_positions)
    return np.zeros((2, heads, rows, columns), dtype)


def refused(plan, match, **call):
    with pytest.raises(ArgumentError, match=match):
        plan.forward(*arrays(plan), **call)


@pytest.mark.many
def test_wrong_arguments(comm, plan):
    slopes = np.ones(4, np.float32)
    refused(plan, r"bias has shape .*\(batch, heads, rows, columns\) = \(1 or 2, 1 or 4, ", bias=tile(plan, 3))
    refused(plan, "bias has dtype float64; it must be float32", bias=tile(plan, dtype=np.float64))
    refused(plan, "key_bias is given; only a plan made with key_bias=True takes it", key_bias=np.ones(9, np.float32))
    refused(plan, r"alibi_slopes has shape \(3,\)", alibi_slopes=slopes[:3])
    refused(plan, "alibi_slopes has dtype float64; it must be float32", alibi_slopes=np.ones(4))
    refused(plan, "must be odd", relative_bias=np.ones((4, 6), np.float32))
    refused(
        plan, "relative_grid is .*product is seqlen", relative_bias=np.ones((1, 3, 3), np.float32), relative_grid=(5, 5)
    )
    refused(plan, "relative_cyclic is given without relative_bias", relative_cyclic=[True])
    on_grid = {"relative_bias": np.ones((1, 3, 3), np.float32), "relative_grid": (4, 6)}
    for cyclic in (True, [True]):
        refused(plan, "relative_cyclic is .*True.* for each of the 2 axes", **on_grid, relative_cyclic=cyclic)
    refused(plan, r"relative_grid\[1\] is 6.0; it must be a whole number", **on_grid | {"relative_grid": (4, 6.0)})
    refused(plan, "dropout is 1.0; it must be a number from 0", dropout=1.0, seed=1)
    refused(plan, "seed is None; with dropout", dropout=0.5)
    refused(plan, "documents whose queries and keys end at different", alibi_slopes=slopes, cu_seqlens=[0, 9, 24],
            cu_seqlens_k=[0, 10, 24])  # fmt: skip
    out, lse = plan.forward(*arrays(plan), bias=tile(plan), alibi_slopes=slopes)
    with pytest.raises(ArgumentError, match="dbias is given, but there is no such result"):
        plan.backward(out, *arrays(plan), out, lse, alibi_slopes=slopes, dbias=tile(plan))
    with pytest.raises(ArgumentError, match="bias_gradients is 'all'"):
        plan.backward(out, *arrays(plan), out, lse, alibi_slopes=slopes, bias_gradients="all")
    with pytest.raises(ArgumentError, match="bias_shared has 'heads', but bias has 4 along that axis"):
        plan.backward(out, *arrays(plan), out, lse, bias=tile(plan), bias_shared=["heads"])
    with pytest.raises(ArgumentError, match="dbias shares memory with bias"):
        bias = tile(plan)
        plan.backward(out, *arrays(plan), out, lse, bias=bias, dbias=bias)
    with pytest.raises(ArgumentError, match=r"bias has shape .* \(batch, heads, seqlen, seqlen_k\) = \(2, 4, 24, 24\)"):
        plan.scatter_bias(np.ones((2, 4, 24, 23)))
    with pytest.raises(ArgumentError, match="tile is a list"):
        plan.gather_bias([1])


@on(2)
def test_who_shares_a_bias_with_other_planes(group):
    """A bias of the one sequence of a plane may be that of all sequences: its shape does not say."""
    with MeshAttention(group, **PLAN, tile=(2, 1, 1)) as plan:
        bias, rng = tile(plan)[:1], np.random.default_rng(group.rank)
        chunks = rng.standard_normal((3, 2, len(plan.positions), 4, 8), np.float32)
        out, lse = plan.forward(*chunks, bias=bias)
        with pytest.raises(ArgumentError, match="bias_shared is None, and a plane has 1 of 2 along batch; it must say"):
            plan.backward(out, *chunks, out, lse, bias=bias)
        each = plan.backward(out, *chunks, out, lse, bias=bias, bias_shared=())[-1]
        both = plan.backward(out, *chunks, out, lse, bias=bias, bias_shared=["batch"])[-1]
        assert np.abs(both).max() > 0 and np.array_equal(both, sum(group.allgather(each)))


@pytest.mark.many
def test_arguments_that_differ(comm, plan):
    if comm.size == 1:
        pytest.skip("takes several ranks")
    other = comm.rank == comm.size - 1
    refused(plan, "seed", dropout=0.5, seed=int(other))
    slopes = np.ones(4, np.float32)
    slopes[2] += other
    refused(plan, r"^alibi_slopes\[2\] is 1.0 on rank 0 but 2.0 on rank", alibi_slopes=slopes)
    refused(plan, "bias is given on rank 0 but left out on rank", bias=None if other else tile(plan))
    refused(
        plan, "^alibi_slopes is .* on rank 0 but left out on", alibi_slopes=None if other else np.ones(4, np.float32)
    )
    refused(plan, "^dropout is left out on rank 0 but 0.5 on", **({"dropout": 0.5, "seed": 1} if other else {}))
    plan.forward(*arrays(plan), dropout=0.5, seed=1)


@pytest.mark.many
def test_key_bias_is_for_every_call(comm):
    with MeshAttention(comm, **PLAN, key_bias=True) as plan:
        refused(plan, "key_bias is None; this plan was made with key_bias=True")
        refused(plan, r"key_bias has shape .*tokens_k", key_bias=np.ones(99, np.float32))


@pytest.mark.many
def test_pieces_have_no_tile_of_a_bias(comm):
    """What needs one is refused, on every rank alike; the other biases work, and the plan goes on."""
    whole = np.zeros((2, 4, 24, 24), np.float32)
    with MeshAttention(comm, **PLAN, tile="bands") as plan:
        calls = {
            "bias is given": lambda: plan.forward(*arrays(plan), bias=whole),
            "scatter_bias is called": lambda: plan.scatter_bias(whole if comm.rank == 0 else None),
            "gather_bias is called": lambda: plan.gather_bias(whole),
        }
        for what, call in calls.items():
            text = same_error(comm, call)
            assert text.startswith(f"{what}, but the tile of this plan is 'bands'") and "tile='mesh'" in text
        for name in ("bias_positions", "bias_sequences", "bias_heads"):
            with pytest.raises(ArgumentError, match=f"^{name} is asked for, but the tile of this plan is 'bands'"):
                getattr(plan, name)
        call = {"alibi_slopes": np.ones(4, np.float32)}
        results = plan.forward(*arrays(plan), **call)
        assert "bias is given" in same_error(
            comm, lambda: plan.backward(results[0], *arrays(plan), *results, **call, bias=whole)
        )
        assert "bias is given" in same_error(comm, lambda: plan.verify(*arrays(plan), *results, **call, bias=whole))
        assert plan.verify(*arrays(plan), *results, **call).passed


@pytest.mark.many
def test_gradients_that_are_not_wanted(comm, plan):
    """They are not computed and not returned; memory of the caller holds those that are."""
    call = {"bias": tile(plan), "alibi_slopes": np.ones(4, np.float32)}
    out, lse = plan.forward(*arrays(plan), **call)
    assert len(plan.backward(out, *arrays(plan), out, lse, **call)) == 5
    assert len(plan.backward(out, *arrays(plan), out, lse, **call, bias_gradients=False)) == 3
    memory = tile(plan)
    *_, dbias = plan.backward(out, *arrays(plan), out, lse, **call, bias_gradients=["bias"], dbias=memory)
    assert dbias is memory


@pytest.mark.many
def test_finite_differences(comm):
    """The gradients of a sum of all results by each kind of bias, and with dropout, are their differences."""
    problem = problem_of({**PLAN, "dtype": "float64", "key_bias": True})
    inputs = draw_all(problem, dlse=False)
    drawn = biased.draw(problem, 5, "bias key_bias alibi relative dropout")
    rng = np.random.default_rng(1)
    with MeshAttention(comm, **PLAN, dtype="float64", key_bias=True, tile=(1, comm.size)) as plan:
        chunks, (rows, columns) = my_chunks(plan, *inputs), plan.bias_positions
        whole = {name: np.where(np.isinf(of), 0, of) for name in drawn.given for of in [getattr(drawn, name)]}
        step = {name: rng.standard_normal(of.shape) for name, of in whole.items()}

        def own(of):
            tiled = {
                "bias": of["bias"][:, :, rows[:, None], columns],
                "key_bias": of["key_bias"][..., plan.positions_k],
            }
            return of | {name: np.ascontiguousarray(each) for name, each in tiled.items()}

        def loss(of):
            out, _ = plan.forward(*chunks[:3], **own(of), dropout=drawn.dropout, seed=drawn.seed)
            return comm.allreduce(float((out * chunks.dout).sum()))

        out, lse = plan.forward(*chunks[:3], **own(whole), dropout=drawn.dropout, seed=drawn.seed)
        grads = plan.backward(chunks.dout, *chunks[:3], out, lse, **own(whole), dropout=drawn.dropout, seed=drawn.seed)[
            3:
        ]
        steps, names = own(step), drawn.given
        for name, gradient in zip(names, grads, strict=True):
            expected = float((gradient * steps[name]).sum())
            expected = comm.allreduce(expected) if name in ("bias", "key_bias") else expected
            near = {sign: loss(whole | {name: whole[name] + sign * 1e-5 * step[name]}) for sign in (-1, 1)}
            assert abs((near[1] - near[-1]) / 2e-5 - expected) < 1e-6 * max(1, abs(expected)), name


@pytest.mark.many
def test_dropout_keeps_the_expected_value(comm, plan):
    """Over many seeds out is, on average, that without dropout, and lse always is."""
    rng = np.random.default_rng(comm.rank)
    q, k, v = rng.standard_normal((3, 2, len(plan.positions), 4, 8)).astype(np.float32)
    out, lse = plan.forward(q, k, v)
    outs = []
    for seed in range(40):
        dropped, of_all = plan.forward(q, k, v, dropout=0.3, seed=seed)
        outs.append(dropped)
        assert error(of_all, lse) < 1e-6
    spread = np.std(outs, axis=0) / np.sqrt(len(outs))
    assert (np.abs(np.mean(outs, axis=0) - out) < 6 * spread + 1e-6 * largest(out)).all()


def most_memory(call):
    """Bytes that a call needs at most, of memory that it did not have before."""
    call()  # what is kept for calls to come
    tracemalloc.start()
    call()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


@pytest.mark.many
def test_memory_of_a_tile(comm):
    """A pass with a bias needs no copy of the tile, forward, and its gradient alone, backward."""
    with MeshAttention(comm, seqlen=600, heads=8, head_dim=8, backend="numpy", tile=(1, comm.size)) as plan:
        rows, columns = map(len, plan.bias_positions)
        bias, chunks = (
            np.zeros((1, 8, rows, columns), np.float32),
            np.ones((3, 1, len(plan.positions), 8, 8), np.float32),
        )
        # backward, a plan refuses the results of a forward pass with other biases
        results = {given: plan.forward(*chunks, **{"bias": bias} if given else {}) for given in (False, True)}
        for more, call in [
            (0, lambda **of: plan.forward(*chunks, **of)),
            (bias.nbytes, lambda **of: plan.backward(results[True][0], *chunks, *results["bias" in of], **of)),
        ]:
            without, with_bias = most_memory(call), most_memory(lambda call=call: call(bias=bias))
            assert with_bias - without < more + bias.nbytes / 16 + 2**16
        without = plan.sent
        plan.forward(*chunks)
        plain = np.subtract(plan.sent, without)
        plan.forward(*chunks, bias=bias)
        assert (np.subtract(plan.sent, without) == 2 * plain).all()  # bytes and messages
