"""`plan.save_trace`: what all ranks did, in one file that shows exactly what was sent, by clocks that agree."""

import json
import os
import time
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from dense import draw_all
from runs import attend, my_chunks, narrow, on

from mpiattn import ArgumentError, FileError, MeshAttention
from mpiattn.comm import clocks
from mpiattn.engine import coming, executor, piece_executor, regroup

PROBLEM = {"seqlen": 61, "heads": 4, "kv_heads": 2, "head_dim": 8, "backend": "numpy"}
MEASURES = (clocks, coming, executor, piece_executor, regroup)
TILES = {
    1: [(1, 1, 1)],
    2: [(1, 2, 1), (1, 1, 2), (2, 1, 1)],
    4: [(1, 2, 2), (1, 1, 4), (2, 1, 2), (2, 2, 1), (4, 1, 1)],
}


@pytest.fixture
def path_of(tmp_path_factory):
    """path_of(group): where rank 0 makes a file."""

    def path(group):
        return Path(group.bcast(str(tmp_path_factory.mktemp("trace") / "trace.json") if group.rank == 0 else None))

    return path


def traced(group, path, shift=0.0, **how):
    """(what the file of a plan's last passes says, bytes that each rank has sent in them, the plan), on rank 0."""
    with MeshAttention(group, **narrow({**PROBLEM, **how})) as plan:
        chunks = my_chunks(plan, *draw_all(plan.problem, 0))
        attend(plan, chunks, backward=False)
        before = plan.sent[0]
        attend(plan, chunks)
        sent = plan.sent[0] - before
        plan.save_trace(path)
        assert plan.sent[0] == before + sent, "the trace is not counted"
        sent = group.gather(sent)
    return json.loads(path.read_text()) if group.rank == 0 else None, sent, plan


def slices(trace, **some):
    """The events with a length; some: attributes that they have."""
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and all(event[name] == value for name, value in some.items())
    ]


def check_threads(trace, ranks):
    """Every thread of every rank has a name and does one thing at a time."""
    named = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    names = {event["pid"]: event["args"]["name"] for event in named if event["name"] == "process_name"}
    assert names == {rank: f"rank {rank} on {os.uname().nodename}" for rank in range(ranks)}
    threads = {(event["pid"], event["tid"]) for event in slices(trace)}
    assert {(event["pid"], event["tid"]) for event in named if event["name"] == "thread_name"} == threads
    for rank, thread in threads:
        events = sorted(slices(trace, pid=rank, tid=thread), key=lambda event: event["ts"])
        assert events[0]["ts"] >= 0 and all(event["dur"] >= 0 for event in events)
        for event, following in pairwise(events):
            assert event["ts"] + event["dur"] <= following["ts"] + 1e-6  # microseconds


def check_bytes(trace, sent):
    """Both ends say the same of every message, and what a rank sends is what the plan has counted."""
    out, into = {}, {}
    for event in slices(trace):
        arguments = event["args"]
        if "received" in arguments:
            what = arguments["pass"], event["cat"], arguments.get("hop", event["name"])
            out |= {(*what, event["pid"], int(peer)): nbytes for peer, nbytes in arguments["sent"].items()}
            into |= {(*what, int(peer), event["pid"]): nbytes for peer, nbytes in arguments["received"].items()}
            assert arguments["sent_bytes"] == sum(arguments["sent"].values())
    assert out == into and all(out.values())
    assert [sum(nbytes for what, nbytes in out.items() if what[-2] == rank) for rank in range(len(sent))] == sent


def check_steps(trace, plan):
    """The blocks are all that have work, and a rank waits where its blocks end."""
    activity, ranks = plan._decision.plane.activity, plan.tile.ranks
    order = plan._decision.mesh_order or range(ranks)
    for direction in ("forward", "backward"):
        for place, rank in enumerate(order):
            events = [event for event in slices(trace, pid=rank) if event["args"]["pass"] == direction]
            blocks = [name for event in events if event["cat"] == "blocks" for name in event["args"]["blocks"]]
            tile, chunk = plan.tile.plane, place % plan.tile.chunks
            pairs = [(i, j) for i in tile.row(chunk) for j in tile.column(chunk) if activity.has_work(i, j)]
            assert sorted(blocks) == sorted(f"Q{i} x KV{j}" for i, j in pairs)
            ends = {event["args"]["step"]: event["ts"] + event["dur"] for event in events if event["cat"] == "blocks"}
            waits = [event for event in events if event["cat"] == "waits"]
            assert all(event["ts"] == pytest.approx(ends[event["args"]["step"]], abs=1e-6) for event in waits)
            names = {event["name"] for event in events if "hop" in event["args"]}
            assert {name for event in waits for name in event["args"]["for"]} == names


def check_arrows(trace):
    """An arrow for each message between two ranks, which does not arrive before it is sent but for what clocks err."""
    begins = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "s"}
    ends = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "f"}
    messages = [peer for event in slices(trace) if event["args"].get("hop") for peer in event["args"]["sent"]]
    assert begins.keys() == ends.keys() and len(begins) == len(messages)
    error = [rank["clock_error_us"] for rank in trace["otherData"]["ranks"]]
    for number, begin in begins.items():
        end = ends[number]
        assert begin["pid"] != end["pid"]
        assert end["ts"] >= begin["ts"] - error[begin["pid"]] - error[end["pid"]] - 0.002
        for event in begin, end:
            assert any(
                piece["ts"] <= event["ts"] <= piece["ts"] + piece["dur"] and piece["args"]["kind"] == event["name"]
                for piece in slices(trace, pid=event["pid"], tid=event["tid"])
            )


@pytest.mark.draw(1)
@on(1, 2, 4)
@pytest.mark.parametrize("schedule", ["greedy", "collective"])
def test_all_that_is_sent(group, path_of, schedule):
    path = path_of(group)
    for number, tile in enumerate(TILES[group.size]):
        how = {"causal": number % 2 == 0, "layout": ("zigzag", "contiguous")[number % 2]}
        how["mesh_layout"] = "auto" if number % 3 else "striped"
        how["route"] = "ring" if number == 1 else "direct"
        how["window"] = (9, 9) if number == 1 else None
        trace, sent, plan = traced(group, path, tile=tile, schedule=schedule, **how)
        if group.rank == 0:
            check_threads(trace, group.size)
            check_bytes(trace, sent)
            check_steps(trace, plan)
            check_arrows(trace)
            assert trace["otherData"]["plan"]["schedule"] == schedule


@on(1, 2, 4)
def test_all_that_pieces_send(group, path_of):
    trace, sent, _ = traced(group, path_of(group), tile="bands", causal=True)
    if group.rank == 0:
        check_threads(trace, group.size)
        check_bytes(trace, sent)
        check_arrows(trace)


@on(4)
def test_ranks_are_the_callers(group, path_of, monkeypatch):
    """On nodes that the ranks are dealt out to, the mesh numbers them in another order."""
    from mpiattn.comm import mesh

    monkeypatch.setattr(mesh, "nodes_of", lambda peers: [0, 1, 0, 1])
    path, other = path_of(group), group.Dup()
    try:
        for tile in ((1, 1, 4), (2, 1, 2)):
            trace, sent, plan = traced(other, path, tile=tile, schedule="greedy", route="ring")
            assert plan._decision.mesh_order is not None
            if group.rank == 0:
                check_bytes(trace, sent)
                check_steps(trace, plan)
                check_arrows(trace)
    finally:
        other.Free()


@on(2, 4)
def test_clocks_that_differ(group, path_of, monkeypatch):
    """Each rank's clock is half an hour ahead of that of the rank before it; in the file they agree."""
    ahead = 1800.0 * group.rank
    for module in MEASURES:
        monkeypatch.setattr(module, "clock", lambda: time.perf_counter() + ahead)
    for tile in TILES[group.size]:
        trace, *_ = traced(group, path_of(group), tile=tile, schedule="greedy")
        if group.rank == 0:
            for rank in trace["otherData"]["ranks"]:
                wrong = rank["clock_ahead_us"] - 1800e6 * rank["rank"]
                assert abs(wrong) <= rank["clock_error_us"] + 1 < 1e6
            assert max(event["ts"] + event["dur"] for event in slices(trace)) < 600e6
            check_threads(trace, group.size)
            check_arrows(trace)


@on(2)
def test_what_cannot_be_saved(group, path_of, monkeypatch):
    """The same error on every rank, and neither a file nor a part of it; the plan goes on."""
    path = path_of(group)

    def full(handle):
        raise OSError(28, "No space left on device")

    with MeshAttention(group, **PROBLEM) as plan:
        chunks = my_chunks(plan, *draw_all(plan.problem, 0))
        with pytest.raises(ArgumentError, match="the plan has made no pass yet; call forward or backward before"):
            plan.save_trace(path)
        attend(plan, chunks, backward=False)
        with pytest.raises(ArgumentError, match="path is 3; it must be a str or a path"):
            plan.save_trace(3)
        with pytest.raises(ArgumentError, match=r"path is .* on rank 0 but .* on rank 1; it must be the same"):
            plan.save_trace(f"{path}{group.rank}")
        with pytest.raises(FileError, match=r"path is .*no/trace.json'; there is no folder"):
            plan.save_trace(path.parent / "no" / "trace.json")
        with monkeypatch.context() as patched, pytest.raises(FileError, match=r"path is .* No space left on device"):
            patched.setattr(os, "fsync", full)
            plan.save_trace(path)
        group.Barrier()
        assert not list(path.parent.iterdir())
        plan.save_trace(path)
        group.Barrier()
        if group.rank == 0:
            trace = json.loads(path.read_text())
            assert {event["args"]["pass"] for event in slices(trace)} == {"forward"}
            path.write_text("my notes")
        group.Barrier()
        with pytest.raises(FileError, match="holds something else"):
            plan.save_trace(path)
        assert path.read_text() == "my notes"
    with pytest.raises(ArgumentError, match="the plan is closed"):
        plan.save_trace(path)


@on(2)
def test_of_the_pass_before_a_refused_call(group, path_of):
    """A call that is refused on one rank has prepared the other's next pass; the trace is that of the last pass."""
    path = path_of(group)
    with MeshAttention(group, **PROBLEM, tile=(1, 1, 2), schedule="greedy") as plan:
        chunks = my_chunks(plan, *draw_all(plan.problem, 0))
        plan.forward(*chunks[:3])
        wrong = chunks[0] if group.rank == 0 else np.zeros((1, 3), np.float32)
        with pytest.raises(ArgumentError):
            plan.forward(wrong, *chunks[1:3], cu_seqlens=[0, plan.k_layout.length(0), plan.problem.seqlen])
        plan.save_trace(path)
        sent = group.gather(plan.sent[0])
        if group.rank == 0:
            trace = json.loads(path.read_text())
            check_bytes(trace, sent)
            blocks = [event["args"]["blocks"] for event in slices(trace, cat="blocks", pid=0)]
            assert sorted(chain.from_iterable(blocks)) == ["Q0 x KV0", "Q0 x KV1"]
