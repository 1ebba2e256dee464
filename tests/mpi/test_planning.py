"""What a plan chooses and tells: memory limits, machines, overlap off, the times of its steps."""

import json

import numpy as np
import pytest
from dense import bits, draw_all
from runs import attend, check, my_chunks, on
from test_agreement import same_error

from mpiattn import ArgumentError, KVCache, MeshAttention
from mpiattn.comm.agreement import from_rank_0, is_everywhere
from mpiattn.comm.peers import HEAD, Peers
from mpiattn.model import search
from mpiattn.model.machine import DEFAULT, H100
from mpiattn.system.words import number

SHAPE = {"seqlen": 203, "heads": 4, "head_dim": 8, "causal": True, "direction": "both"}


def results(comm, backward=True, **how):
    """A plan's results as bits, its bytes afterwards, and what it chose."""
    with MeshAttention(comm, **{**SHAPE, **how}) as plan:
        made = bits(*attend(plan, my_chunks(plan, *draw_all(plan.problem)), backward=backward))
        return made, plan.nbytes, (plan.tile, plan.schedule.name, plan.route, plan.schedule.ahead), plan.memory_cost


@on(4)
def test_less_memory_takes_slots_but_no_bit(group):
    """Up to two steps ahead, or none: the same blocks in the same order; `nbytes` shrinks with what is planned.

    Forward: a short backward pass has memory for chunks that come early, as their gradients take it later.
    """
    comm = group
    how = {"tile": "ring", "schedule": "greedy", "layout": "contiguous", "direction": "forward"}
    free, nbytes, chosen, cost = results(comm, False, **how)
    assert cost == 1 and chosen[3] == 2
    with MeshAttention(comm, **{**SHAPE, **how}) as plan:
        most = plan._decision.choice.nbytes
    limited, fewer, chosen, cost = results(comm, False, **how, max_memory=most - 1)
    assert chosen[3] < 2 and cost >= 1
    assert limited == free
    assert comm.allreduce(fewer < nbytes)


@pytest.mark.parametrize("schedule", ["greedy", "collective"])
def test_a_plan_made_again_takes_what_is_known_of_its_passes(comm, schedule):
    """Both are open, and called in turn, also with documents: the bits of a plan made alone."""
    how = {**SHAPE, "schedule": schedule, "layout": "zigzag"}
    documents = {"cu_seqlens": [0, 60, SHAPE["seqlen"]]}
    with MeshAttention(comm, **how) as first, MeshAttention(comm, **how) as second:
        chunks = my_chunks(first, *draw_all(first.problem))
        made = [[bits(*attend(plan, chunks, call)) for plan in (first, second)] for call in ({}, documents, {})]
        executors = [plan._passes.executors for plan in (first, second)]
        for direction, executor in executors[0].items():
            assert executors[1][direction].steps is executor.steps
    assert all(bits_of_first == bits_of_second for bits_of_first, bits_of_second in made) and made[0] == made[2]
    with MeshAttention(comm, **how, overlap=True, max_memory=2**40) as other:  # another choice, of the same passes
        assert [bits(*attend(other, chunks, call)) for call in ({}, documents)] == [made[0][0], made[1][0]]


def test_limits_of_numpy(comm):
    """Integers of NumPy are ints, whose products do not overflow."""
    limits = {"max_message": np.int32(2**30), "max_memory": np.int32(2**31 - 1)}
    with MeshAttention(comm, **SHAPE, **limits) as plan:
        assert type(plan._exchange.max_message) is int and plan._decision.choice.nbytes < 2**31 - 1


def test_memory_that_nothing_fits(comm):
    for wrong in (1000, 0, "1X"):
        with pytest.raises(ArgumentError, match="max_memory is"):
            MeshAttention(comm, **SHAPE, max_memory=wrong)


def test_machines(comm, tmp_path_factory):
    path = comm.bcast(str(tmp_path_factory.mktemp("machine") / "slow.json") if not comm.rank else None)
    if not comm.rank:
        with open(path, "w") as file:
            json.dump(DEFAULT.as_dict() | {"name": "slow", "flops": {"float32": 1e6}}, file)
    comm.Barrier()
    seconds = {}
    for machine in (DEFAULT, H100, "h100", path):
        with MeshAttention(comm, **SHAPE, machine=machine) as plan:
            seconds[plan.machine.name] = plan.predicted_seconds
    assert seconds["slow"] > seconds["default"] > seconds["h100"] > 0
    with pytest.raises(ArgumentError, match="machine is 'nowhere'"):
        MeshAttention(comm, **SHAPE, machine="nowhere")
    with pytest.raises(ArgumentError, match="machine is 7"):
        MeshAttention(comm, **SHAPE, machine=7)


def test_the_times_of_steps(comm):
    """One after another, each with its blocks before its end; every transfer of the schedule, within the pass."""
    for overlap in (True, False):
        with MeshAttention(comm, **SHAPE, schedule="greedy", tile="ring", overlap=overlap) as plan:
            assert plan.trace() is None and plan.trace("backward") is None
            before = plan.wait_seconds
            attend(plan, my_chunks(plan, *draw_all(plan.problem)))
            waited = 0.0
            for direction in ("forward", "backward"):
                trace, schedule = plan.trace(direction), plan._decision.schedule(direction)
                assert len(trace.steps) == len(schedule.steps) and trace.direction == direction
                times = np.array(trace.steps).reshape(-1)
                assert (np.diff(times) >= 0).all() and times[0] >= 0 and times[-1] == trace.seconds
                waited += trace.waiting
                predicted = plan.predicted_trace(direction)
                assert len(predicted.steps) == len(trace.steps) and predicted.seconds > 0
                assert predicted.steps[-1].ended.shape == (comm.size,)
                for moved in trace.moves:
                    assert 0 <= moved.begun <= moved.arrived <= trace.steps[moved.step].ended
                moves = comm.allgather({(moved.kind, moved.hop, moved.step) for moved in trace.moves})
                assert set().union(*moves) == {  # causal: none has them all
                    (t.kind, t.hops[0], i) for i, step in enumerate(schedule.steps) for t in step.transfers
                }
                overlapping = [i for i, step in enumerate(schedule.steps) if step.transfers and step.blocks]
                assert bool(overlapping) == (overlap and comm.size > 1)
            assert plan.wait_seconds - before <= waited + 1e-3
            with pytest.raises(ArgumentError, match=r"direction is 'sideways'"):
                plan.trace("sideways")
    with pytest.raises(ArgumentError, match="overlap is 2"):
        MeshAttention(comm, **SHAPE, overlap=2)


def test_what_a_plan_says_of_itself(comm):
    """In one line, open, closed and not made."""
    plan = MeshAttention(
        comm,
        batch=2,
        seqlen=203,
        seqlen_k=31,
        heads=4,
        kv_heads=2,
        head_dim=8,
        value_dim=5,
        causal=True,
        window=(9, None),
        tile="ring",
        layout="zigzag",
        schedule="greedy",
        route="ring",
    )
    said = (
        "MeshAttention(batch 2, 203 x 31 tokens, 4 heads (2 KV) x 8 (5 of values), float32, causal in window 9,; "
        f"tile 1x{comm.size}, zigzag layout, greedy schedule, ring route, {plan.backend}; open)"
    )
    assert repr(plan) == said
    plan.close()
    assert repr(plan) == said.replace("open", "closed")
    assert repr(MeshAttention.__new__(MeshAttention)) == "MeshAttention(not made)"


def test_what_a_cache_says_of_itself(comm):
    cache = KVCache(comm, capacity=100, sequences=2, kv_heads=2, head_dim=8, value_dim=5, dtype="float16", page_size=16)
    cache.append(np.zeros((2, 3, 2, 8), np.float16), np.zeros((2, 3, 2, 5), np.float16), counts=[3, 2])
    said = (
        f"KVCache(2 sequences, 5 of 100 tokens, 2 KV heads x 8 (5 of values), float16; {number(comm.size, 'rank')}, "
        f"pages of 16, {cache.backend}; open)"
    )
    assert repr(cache) == said
    cache.close()
    assert repr(cache) == said.replace("open", "closed")
    assert repr(KVCache.__new__(KVCache)) == "KVCache(not made)"


@pytest.mark.parametrize("direction", ["forward", "both"])
def test_expected_documents(comm, direction):
    """Short ones: chunks stay consecutive, and what is sent is what the calls then send."""
    seqlen = 256 * comm.size
    how = {"seqlen": seqlen, "heads": 2, "head_dim": 16, "causal": True, "direction": direction}
    cuts = [7, *range(40, seqlen - 20, 30)]  # padding before and after them
    zigzag = MeshAttention(comm, **how, layout="zigzag")
    with zigzag as other, MeshAttention(comm, **how, expected_cu_seqlens=cuts) as plan:
        assert plan.q_layout.kind == plan._decision.choice.mesh_layouts[0].kind == "contiguous"
        passes = ("forward", "backward")[: 1 + (direction == "both")]
        sent = [
            comm.allreduce(
                sum(of.formula(of_pass, of.activity_of(cu_seqlens=cuts, padding=True)) for of_pass in passes)
            )
            for of in (plan, other)
        ]
        assert sent[0] == pytest.approx(comm.size * plan._decision.choice.sent_bytes)
        assert sent[0] < sent[1] or comm.size == 1
        assert (plan.predicted_seconds < other.predicted_seconds) and plan.timeout == other.timeout
        with plan.like(seqlen=seqlen + 9) as longer:
            assert longer.tile == plan.tile and longer.q_layout.kind == "contiguous"
    check(comm, **how, call={"cu_seqlens": cuts, "padding": True}, expected_cu_seqlens=np.array(cuts, np.int32))
    check(comm, **how, call={"cu_seqlens": [0, seqlen]}, expected_cu_seqlens=[cuts])  # and any others


def test_expected_documents_that_cannot_be(comm):
    how = {"seqlen": 30, "heads": 2, "head_dim": 8}
    for wrong, said in (
        ([0, 31], "positions from 0 to 30"),
        (30, "a sequence of positions"),
        ([[0, 3]] * 3, "3 entries"),
    ):
        error = same_error(comm, lambda wrong=wrong: MeshAttention(comm, **how, expected_cu_seqlens=wrong))
        assert error.startswith("expected_cu_seqlens ") and said in error
    error = same_error(comm, lambda: MeshAttention(comm, **how, seqlen_k=20, expected_cu_seqlens=[0, 20]))
    assert "seqlen 30 and seqlen_k 20; these must be equal" in error
    if comm.size > 1:
        error = same_error(comm, lambda: MeshAttention(comm, **how, expected_cu_seqlens=[0, comm.rank, 30]))
        assert "expected_cu_seqlens" in error


def test_a_choice_is_made_once(comm, monkeypatch):
    """Rank 0 remembers what it chose, by all that the choice depends on."""
    searched = []
    survey = search.survey
    monkeypatch.setattr(search, "survey", lambda *args, **how: searched.append(args) or survey(*args, **how))
    slow = DEFAULT.with_ranks(1 + comm.size)
    counts = []
    for how in ({}, {}, {"timeout": 50}, {"machine": slow}, {"machine": slow}, {"seqlen": 207}, {}, {"overlap": False}):
        with MeshAttention(comm, **{**SHAPE, "head_dim": 9, **how}) as plan:
            assert plan.problem.seqlen == how.get("seqlen", 203) and plan._decision.overlap == how.get("overlap", True)
            assert plan.machine == slow if "machine" in how else plan.machine != slow
        counts.append(len(searched))
    assert counts == ([1, 1, 1, 2, 2, 3, 3, 4] if comm.rank == 0 else [0] * 8)


@pytest.mark.parametrize("length", [0, 1, HEAD, 3 * HEAD])
def test_a_broadcast_of_any_length(comm, length):
    assert Peers(comm).broadcast("x" * length if comm.rank == 0 else None) == "x" * length


def test_what_rank_0_makes(comm):
    def fail():
        raise ArgumentError(f"rank {comm.rank} has none")

    assert from_rank_0(Peers(comm), lambda: [comm.rank]) == [0]
    with pytest.raises(ArgumentError, match=r"^rank 0 has none$") as caught:
        from_rank_0(Peers(comm), fail)
    assert is_everywhere(caught.value, comm)
