"""Measuring the machine, on real ranks with both back ends, and the machine that a plan is given."""

import json
from dataclasses import replace

import numpy as np
import pytest
from runs import on

from mpiattn import KVCache, MeshAttention, backends
from mpiattn.comm.mesh import nodes_of
from mpiattn.comm.peers import Peers
from mpiattn.console.launch import Job
from mpiattn.errors import ArgumentError
from mpiattn.model import store
from mpiattn.model.machine import DEFAULT, H100
from mpiattn.model.tuned import key_of
from mpiattn.schedule import reduction
from mpiattn.tuning import collectives
from mpiattn.tuning.blocks import fit
from mpiattn.tuning.combining import ROWS
from mpiattn.tuning.links import partners
from mpiattn.tuning.measure import measure
from mpiattn.tuning.overlap import hidden

NODES = [[0], [0, 0], [0, 1], [0, 0, 0, 1, 1], [0, 1, 0, 1, 2, 2, 0], [0, 1, 1, 2], [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]]


@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("between, crossing", [(False, None), (True, None), (True, 1)])
def test_partners(nodes, between, crossing):
    """All who take part send to one and receive from one, who knows it, over the right kind of link."""
    sizes = [nodes.count(node) for node in sorted(set(nodes))]
    seen = set()
    for turn in range(12):
        ends = {rank: partners(nodes, rank, between, turn, crossing) for rank in range(len(nodes))}
        ends = {rank: pair for rank, pair in ends.items() if pair}
        expected = (
            len(sizes) * (crossing or min(sizes)) * (len(sizes) > 1)
            if between
            else sum(size for size in sizes if size > 1)
        )
        assert len(ends) == expected
        for rank, (dest, source) in ends.items():
            assert ends[dest][1] == rank and ends[source][0] == rank != dest
            assert (nodes[rank] != nodes[dest]) == between
            seen.add((nodes[rank], nodes[dest]) if between else (rank, dest))
    places = len(sizes) * (len(sizes) - 1) if between else sum(size * (size - 1) for size in sizes)
    assert len(seen) == places  # every pair of nodes, or of ranks of a node, in its turn


def test_fit():
    flops = np.array([1e6, 1e7, 1e9])
    assert fit(flops, 2e-4 + flops / 3e10) == pytest.approx((2e-4, 3e10))
    assert fit(flops, 2e-4 + flops / 3e10, launch=2e-4) == pytest.approx((2e-4, 3e10))
    launch, rate = fit(flops, np.maximum(flops / 3e10 - 1e-5, 1e-6))  # less than nothing besides the work
    assert launch == 0 and 2e10 < rate < 5e11


def test_the_figure_of_collectives(comm, at_least, monkeypatch):
    """Both collectives over the messages."""
    at_least(2)
    monkeypatch.setattr(collectives, "take_turns", lambda *of: np.array([[[2.0, 4.0, 6.0]] * 5] * comm.size))
    backend = backends.get("numpy")
    sample = collectives.measure(Peers(comm), backend, 1e9, 0.1, lambda seconds: None)
    backend.close()
    assert sample == (0.5, 0.5, 0.5, 5 * comm.size)


def test_hidden():
    """Of a transfer of 2 s and a block of 1 s, and of 3 s: nothing, half of what could be, all, and noise."""
    times = [(2, 1, 3), (2, 1, 2.5), (2, 1, 2), (2, 1, 4), (2, 1, 1), (2, 3, 4), (np.nan, 1, np.nan)]
    assert hidden(np.array(times)).tolist()[:-1] == [0, 0.5, 1, 0, 1, 0.5]
    assert np.isnan(hidden(np.array(times))[-1])


@pytest.mark.parametrize("name", ["numpy", "deferred"])
@on(1, 3, 4)
def test_measure(group, name):
    """On pretended nodes, the last of one rank: every figure is there, and is the default's where it cannot be."""
    nodes = {1: [0], 3: [0, 0, 0], 4: [0, 0, 1, 1]}[group.size]
    backend, passed = backends.get(name), []
    job, seconds = Job(group), 0.1
    result = measure(job, nodes, backend, ("float32", "bfloat16"), 8, seconds, passed.append)
    backend.close()
    job.peers.channel.close()  # the communicator is freed after this test
    machine = result.machine
    assert sum(passed) == pytest.approx(seconds) and min(passed) >= 0
    assert len(set(group.allgather(json.dumps(machine.as_dict())))) == 1
    assert set(machine.flops) == {"float32", "bfloat16"} and machine.ranks_per_node == max(map(nodes.count, nodes))
    alone = {"inside", "between", "collective", "combining"}
    assert set(result.lacking) == {1: alone, 3: {"between"}, 4: set()}[group.size]
    for side in ("inside", "between"):
        link, lacking = getattr(machine, side), side in result.lacking
        assert (link == getattr(DEFAULT, side)) == lacking == (f"{side} bandwidth" not in result.samples)
        assert link.latency > 0 and link.bandwidth > 0 and 0 <= link.overlap <= 1
        assert lacking or link == tuple(result.samples[f"{side} {field}"].typical for field in link._fields)
        assert (f"{side} of the default" in machine.assumes) == lacking
    assert machine.node_bandwidth is None or group.size == 4
    assert set(machine.combining) == set(reduction.algorithms(nodes) if group.size > 1 else ())
    for algorithm, points in machine.combining.items():  # the factors make of the links' prediction what was measured
        for rows, (nbytes, factor) in zip(ROWS, points):
            predicted = reduction.predicted_seconds(algorithm, nbytes, 4 * rows, nodes, machine.inside, machine.between)
            assert nbytes == 36 * rows
            assert factor * predicted == pytest.approx(result.samples[f"combining {rows} {algorithm}"].typical)
    for sample in result.samples.values():
        assert 0 <= sample.low <= sample.typical <= sample.high < float("inf") and sample.samples >= 3


def test_machine_of_a_plan(comm, tmp_path_factory, monkeypatch):
    """Rank 0's store, variable and file decide, for all ranks; an argument goes before them."""

    def machine(**how):
        with MeshAttention(comm, seqlen=16, heads=2, head_dim=8, **{"backend": "numpy", **how}) as plan:
            return plan.machine

    nodes = nodes_of(Job(comm).peers)
    assert len(nodes) == comm.size and nodes[0] == 0 and set(range(max(nodes) + 1)) == set(nodes)
    default = DEFAULT.with_ranks(max(map(nodes.count, nodes)))
    assert machine() == default
    measured_here = replace(default, name="mine", launch=1.0)
    folder = tmp_path_factory.mktemp("config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    if comm.rank == 0:
        key = key_of(backends.get("numpy"), nodes, 8)
        assert key.backend == f"numpy {np.__version__}" and key.several_nodes == (len(set(nodes)) > 1)
        store.store(store.Entry(key, measured_here, store.now(), {}))
    assert machine() == measured_here
    assert machine(backend="deferred") == default
    assert machine(machine="h100") == H100
    assert machine(machine=measured_here.with_ranks(5)) == measured_here.with_ranks(5)
    for slow, algorithm in (("butterfly", "allreduce"), ("allreduce", "butterfly")):
        measured = replace(measured_here, combining={slow: [[100, 50.0]], "levels": [[100, 99.0]]})
        with KVCache(comm, capacity=8, kv_heads=2, head_dim=8, machine=measured) as cache:
            assert cache.algorithm(72, 8) == (algorithm if comm.size > 1 else "butterfly")
    if comm.rank == 0:
        monkeypatch.setenv("MPIATTN_MACHINE", "h100")
    assert machine() == H100
    for wrong, said in ((3, "machine is 3; it may be"), ("/none", "none'; it may be default, h100")):
        with pytest.raises(ArgumentError, match=said) as caught:
            machine(machine=wrong)
        assert caught.value.everywhere
