"""`attention`: one call, the ranks tell each other how long their pieces are."""

import threading

import biased
import numpy as np
import pytest
from dense import Inputs, Result, bits, draw, draw_all, error, expected, largest, masks, wrong
from mpi4py import MPI
from runs import agreed
from test_agreement import same_error

from mpiattn import ArgumentError, CallError, Layout, MeshAttention, PeerFailure, attention
from mpiattn.comm import mesh
from mpiattn.problem.problem import Problem

BACKENDS = ("numpy", "deferred")


def pieces(comm, lengths):
    """Where this rank's consecutive piece starts and stops."""
    start = sum(lengths[: comm.rank])
    return start, start + lengths[comm.rank]


@pytest.mark.draw(3)
@pytest.mark.many
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_uneven_pieces(comm, causal, dtype, backend):
    q_lengths = [(7 * rank + 3) % 11 for rank in range(comm.size)]
    k_lengths = [(5 * rank + 4) % 9 for rank in range(comm.size)]
    problem = Problem(
        batch=2,
        seqlen=sum(q_lengths),
        seqlen_k=sum(k_lengths),
        heads=4,
        kv_heads=2,
        head_dim=8,
        value_dim=6,
        dtype=dtype,
        causal=causal,
        scale=0.3,
    )
    q, k, v = draw(problem)
    inputs = Inputs(q, k, v)
    ref = expected(inputs, backward=False, **masks(problem))
    own, own_k = slice(*pieces(comm, q_lengths)), slice(*pieces(comm, k_lengths))
    for options in ({}, {"schedule": "greedy", "route": "ring"}, {"schedule": "collective"}):
        out, lse = attention(
            q[:, own], k[:, own_k], v[:, own_k], comm=comm, causal=causal, scale=0.3, backend=backend, **options
        )
        agreed(comm, wrong(problem, Result(out, lse), ref, inputs, own, own_k), options)


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
def test_other_layouts(comm, layout):
    problem = Problem(seqlen=31, heads=2, head_dim=4, dtype="float64", causal=True)
    q, k, v = draw(problem)
    inputs, chunks = Inputs(q, k, v), Layout(layout, 31, comm.size)
    ref, at = expected(inputs, backward=False, **masks(problem)), chunks.positions(comm.rank)
    tiles = ["auto", (2, 1, comm.size // 2)] if comm.size % 2 == 0 else ["auto"]
    for tile in tiles:  # planes deal out stripes otherwise, where a plan may
        how = {"tile": tile, "causal": True}
        with MeshAttention(comm, seqlen=31, heads=2, head_dim=4, dtype="float64", layout=chunks, **how) as plan:
            planned = plan.forward(q[:, at], k[:, at], v[:, at])
        out, lse = attention(q[:, at], k[:, at], v[:, at], comm=comm, layout=layout, **how)
        assert bits(out, lse) == bits(*planned)
        agreed(comm, wrong(problem, Result(out, lse), ref, inputs, at, at), tile)


@pytest.mark.parametrize(
    "call",
    [
        {"cu_seqlens": [0, 4, 13]},
        {"cu_seqlens": [0, 4, 4], "cu_seqlens_k": [2, 9, 10], "padding": True},
        {"lengths": [9, 12]},
        {"lengths": [9, 12], "lengths_k": [0, 5]},
        {},
    ],
    ids=str,
)
def test_documents_and_sinks(comm, call):
    """As of a plan's forward pass; positions are those of the whole sequence."""
    q_lengths, k_lengths = (
        [13 // comm.size + (rank < 13 % comm.size) for rank in ranks]
        for ranks in (range(comm.size), range(comm.size)[::-1])
    )
    problem = Problem(batch=2, seqlen=13, seqlen_k=13, heads=4, kv_heads=2, head_dim=8, causal=True)
    inputs = draw_all(problem, sinks=True)
    own, own_k = slice(*pieces(comm, q_lengths)), slice(*pieces(comm, k_lengths))
    ref = expected(inputs, backward=False, **masks(problem, call))
    result = attention(
        inputs.q[:, own], inputs.k[:, own_k], inputs.v[:, own_k], comm=comm, causal=True, sinks=inputs.sinks, **call
    )
    agreed(comm, wrong(problem, Result(*result), ref, inputs, own, own_k, call), call)


def test_biases_and_dropout(comm):
    """As of a plan's forward pass, and with key_bias only where that is given; no tile of a bias."""
    p = Problem(batch=2, seqlen=13, seqlen_k=13, heads=4, kv_heads=2, head_dim=8)
    lengths = [13 // comm.size + (rank < 13 % comm.size) for rank in range(comm.size)]
    inputs, own = draw_all(p), slice(*pieces(comm, lengths))
    q, k, v = (array[:, own] for array in inputs[:3])
    for kinds in ("key_bias", "alibi relative dropout", "grid"):
        drawn = biased.draw(p, 1, kinds)
        given = {name: value for name, value in drawn._asdict().items() if value is not None}
        if drawn.key_bias is not None:
            given["key_bias"] = drawn.key_bias[..., own]
        out, lse = attention(q, k, v, comm=comm, backend="numpy", **given)
        right, right_lse, *_ = biased.expected(p, inputs, drawn)
        off = max(error(out, right[:, own]), error(lse, right_lse[..., own]))
        agreed(comm, f"{kinds}: off by {off}" if off > 2e-5 * max(1, largest(right)) else None)
    text = same_error(comm, lambda: attention(q, k, v, comm=comm, bias=np.zeros((1, 1, 13, 13), np.float32)))
    assert "bias is given; mpiattn.attention itself chooses" in text and "bias_positions" in text


def test_wrong_arguments(comm):
    """The same error on every rank, wherever it is wrong."""
    good = np.ones((1, 3, 2, 4), np.float32)
    last = comm.rank == comm.size - 1
    cases = [
        ({"q": good[0]}, r"q has shape \(3, 2, 4\); .* head_dim\), which q\[None\] makes of one sequence( \(|$)"),
        ({"k": good.ravel()}, r"k has shape \(24,\); it must be an array \(batch, tokens, heads, head_dim\)( \(on |$)"),
        ({"k": None}, "k is a NoneType"),
        ({"v": good.tolist()}, "v is a list; .*, which np.asarray makes of it"),
        ({"k": good[..., :2]}, "k has shape"),
        ({"v": good[:, :2]}, "v has shape"),
        ({"k": good[:, :, :0]}, "kv_heads"),
    ]
    if comm.size > 1:  # the others have told what the problem is
        cases += [({"q": good.astype(np.float64)}, "dtype is"), ({"q": good[..., :3]}, "head_dim is")]
    for wrong_one, text in cases:
        given = {**dict.fromkeys("qkv", good), **(wrong_one if last else {})}
        with pytest.raises(ArgumentError, match=text) as caught:
            attention(**given, comm=comm)
        assert len(set(comm.allgather(str(caught.value)))) == 1
    with pytest.raises(ArgumentError, match="cu_seqlens is"):
        attention(good, good, good, comm=comm, cu_seqlens=[0, 1, 99])
    attention(good, good, good, comm=comm)


def made(monkeypatch):
    """The plans that are made from now on."""
    plans = []
    make = MeshAttention.__init__

    def noted(plan, *args, **how):
        plans.append(plan)
        make(plan, *args, **how)

    monkeypatch.setattr(MeshAttention, "__init__", noted)
    return plans


def chunk_of(comm, tokens=4, heads=2, dtype="float32", seed=0):
    return np.random.default_rng([seed, comm.rank]).standard_normal((1, tokens, heads, 8)).astype(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_next_call_takes_the_same_plan(comm, monkeypatch, backend):
    fresh, plans = comm.Dup(), made(monkeypatch)
    q = chunk_of(comm)
    calls = [{}, {"causal": True}, {"causal": True, "cu_seqlens": [0, 3, 4 * comm.size]}, {}, {"causal": 1}]
    results = [attention(q, q, q, comm=fresh, backend=backend, **call) for call in calls]
    assert len(plans) == 2
    assert bits(*results[0]) == bits(*results[3]) and bits(*results[1]) == bits(*results[4])
    for call, result in zip(calls, results):
        other = comm.Dup()
        assert bits(*attention(q, q, q, comm=other, backend=backend, **call)) == bits(*result)
        other.Free()
    q = chunk_of(comm, seed=1)
    assert not np.array_equal(attention(q, q, q, comm=fresh, backend=backend)[0], results[0][0])
    assert np.array_equal(results[0][0], results[3][0]), "results are the caller's"
    fresh.Free()


def test_another_length_on_one_rank_is_another_plan(comm, monkeypatch):
    plans = made(monkeypatch)
    fresh = comm.Dup()
    for longer in (0, 1, 0, 1):
        q = chunk_of(comm, tokens=4 + (longer if comm.rank == comm.size - 1 else 0))
        out, _ = attention(q, q, np.ones_like(q), comm=fresh)
        assert out.shape == q.shape and np.allclose(out, 1)
    assert len(plans) == 2
    fresh.Free()


def test_kept_plans_are_few_and_small(comm, monkeypatch):
    fresh, plans = comm.Dup(), made(monkeypatch)
    for heads in (1, 2, 3, 4, 5, 2, 1):
        q = chunk_of(comm, heads=heads)
        attention(q, q, q, comm=fresh)
    assert [plan.problem.heads for plan in plans] == [1, 2, 3, 4, 5, 1]
    assert [plan._home is None for plan in plans] == [True, False, True, False, False, False]
    monkeypatch.setattr("mpiattn.plan.one_call.KEPT_PLAN_BYTES", 1)
    q = chunk_of(comm, heads=6)
    attention(q, q, q, comm=fresh)
    assert plans[-1]._home is None and plans[1]._home.users == 4
    fresh.Free()


def test_freed_communicators_leave_nothing(comm, monkeypatch):
    """More of them than MPI libraries hold at once, slowly; here the next call frees what the last has left."""
    q, homes = chunk_of(comm), []
    for _ in range(20):
        fresh = comm.Dup()
        attention(q, q, q, comm=fresh)
        homes.append(fresh.Get_attr(mesh._key()))
        assert homes[-1].comm != MPI.COMM_NULL and homes[-1].users == 1
        fresh.Free()
        assert not homes[-1].plans
    assert all(home.comm == MPI.COMM_NULL and not home.meshes for home in homes[:-1])


def test_a_communicator_freed_beside_an_open_plan(comm):
    fresh, q = comm.Dup(), chunk_of(comm)
    with MeshAttention(fresh, seqlen=4 * comm.size, heads=2, head_dim=8) as plan:
        home = plan._home
        attention(q, q, q, comm=fresh)
        fresh.Free()
        plan.forward(q, q, q)
    assert home.comm != MPI.COMM_NULL
    attention(q, q, q, comm=comm)
    assert home.comm == MPI.COMM_NULL


def test_heads_before_tokens(comm):
    """(batch, heads, tokens, head_dim) is refused; few tokens of as many heads as models have are not."""
    q = np.ones((1, 8, 192 * comm.size, 4), np.float32)
    with pytest.raises(ArgumentError, match=r"^q has shape .* must be \(batch, tokens, heads, head_dim\): np.swapaxes"):
        attention(q, q, q, comm=comm, causal=True)
    grouped = np.ones((1, 2, 192 * comm.size, 4), np.float32)
    with pytest.raises(ArgumentError, match=r"^k has shape \(1, 2, .* is 192 heads|^q has shape|^k has shape"):
        attention(q, grouped, grouped, comm=comm)
    right = np.swapaxes(q, 1, 2)
    attention(right, right, right, comm=comm)
    for tokens, heads, kv_heads in ((1, 128, 128), (1, 128, 1), (1, 256, 2), (0, 200, 200)):
        few = np.ones((1, tokens, heads, 4), np.float32)
        keys = np.ones((1, tokens, kv_heads, 4), np.float32)
        assert attention(few, keys, keys, comm=comm)[0].shape == few.shape
    last = np.ones((1, 1, 200, 4), np.float32)
    keys = np.ones((1, 300, 200, 4), np.float32)
    assert attention(last, keys, keys, comm=comm)[0].shape == last.shape  # a few queries of many keys


def test_ranks_that_differ_beside_a_kept_plan(comm, at_least):
    """Some ranks have a plan for what they ask, others not: still one clear error on all, and the plan stays."""
    at_least(2)
    q = chunk_of(comm)
    expected_bits = bits(*attention(q, q, q, comm=comm))
    for name, different, text in (
        ("causal", {"causal": comm.rank == 1}, "causal is False on rank 0 but True on rank 1"),
        ("scale", {"scale": 1.0 + comm.rank}, r"scale is 1.0 on rank 0 but 2.0 on rank 1"),
        ("verify", {"verify": comm.rank == 0}, "verify is True on rank 0 but False on rank 1"),
        ("tile", {"tile": "ring" if comm.rank else "auto"}, r"tile is left out \(auto\) on rank 0 but .ring. on"),
    ):
        with pytest.raises(ArgumentError, match=text) as caught:
            attention(q, q, q, comm=comm, **different)
        assert len(set(comm.allgather(str(caught.value)))) == 1, name
    other = q if comm.rank else chunk_of(comm, heads=1)
    with pytest.raises(ArgumentError, match="heads is 1 on rank 0 but 2 on rank 1"):
        attention(other, other, other, comm=comm)
    with pytest.raises(CallError, match="rank 0 is in attention"):
        attention(q, q, q, comm=comm) if comm.rank == 0 else MeshAttention(comm, seqlen=4, heads=1, head_dim=1)
    assert bits(*attention(q, q, q, comm=comm)) == expected_bits


def test_after_a_rank_has_failed(comm, at_least):
    """What a kept plan shares with the failed call is not used again."""
    at_least(2)
    fresh, q = comm.Dup(), chunk_of(comm)
    expected_bits = bits(*attention(q, q, q, comm=fresh))
    home = fresh.Get_attr(mesh._key())
    comm.Barrier()
    with pytest.raises(ZeroDivisionError if comm.rank == 1 else PeerFailure), home.call("test"):
        if comm.rank == 1:
            raise ZeroDivisionError("on purpose")
        home.peers(100).barrier()
    comm.Barrier()
    assert bits(*attention(q, q, q, comm=fresh)) == expected_bits
    assert fresh.Get_attr(mesh._key()) is not home and not home.plans
    fresh.Free()


def test_threads_with_a_communicator_each(comm):
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("needs MPI_THREAD_MULTIPLE")
    comms, results = [comm.Dup() for _ in range(3)], {}
    inputs = [chunk_of(comm, heads=1 + i, seed=i) for i in range(3)]

    def work(i):
        results[i] = [bits(*attention(*[inputs[i]] * 3, comm=comms[i])) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, q in enumerate(inputs):
        assert results[i] == [bits(*attention(q, q, q, comm=comm))] * 5
        comms[i].Free()
