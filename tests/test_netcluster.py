"""Two hosts with a shaped link: bytes by the cards' own counters, and transfers that blocks hide."""

import json
import sys

import netcluster
import pytest

SCRIPT = """
import json, sys
import numpy as np
from mpi4py import MPI
import mpiattn
comm = MPI.COMM_WORLD
with mpiattn.MeshAttention(comm, seqlen=4096, heads=4, head_dim=128, tile="ring", schedule="greedy") as plan:
    chunk = np.random.default_rng(comm.rank).standard_normal((1, len(plan.positions), 4, 128), np.float32)
    due, waits = plan._exchange.due, {"apart": [], "beside": []}
    for way in ["apart", "beside"] * 4:
        plan._exchange.due = due if way == "beside" else lambda: False
        comm.Barrier()
        before = plan.wait_seconds
        plan.forward(chunk, chunk, chunk)
        waits[way].append(plan.wait_seconds - before)
    found = comm.gather((waits, plan.sent[0]))
if not comm.rank:
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def hosts():
    why = netcluster.missing()
    if why:
        pytest.skip(why)
    try:
        with netcluster.Hosts(2, "1gbit") as hosts:
            yield hosts
    except netcluster.NotUpError as error:
        pytest.skip(f"no hosts here: {error}")


def test_bytes_and_overlap(hosts):
    before = hosts.sent()
    outcome = hosts.mpirun(2, [sys.executable, "-c", SCRIPT])
    on_the_wire = [now - then for now, then in zip(hosts.sent(), before)]
    for (waits, sent), wire in zip(json.loads(outcome.stdout), on_the_wire):
        assert sent == 8 * 2 * 2048 * 4 * 128 * 4              # passes; k and v of a chunk
        assert sent < wire < 1.1 * sent + 2e6                  # headers, and starting the launch
        apart, beside = sorted(waits["apart"])[1], min(waits["beside"])      # others may hold one run up, not all
        assert apart > 0.02                                    # 8 MiB at 1 Gb/s take 67 ms
        assert beside < 0.7 * apart


def test_tune_finds_the_link(hosts, tmp_path):
    """Two ranks a host share its card, whose rate is known; what is inside a host does not go through it."""
    command = [sys.executable, "-m", "mpiattn", "tune", "--quick", "--dtype", "float32", "--json", "-", "--no-store"]
    data = json.loads(hosts.mpirun(4, command, env={"MPIR_CVAR_NOLOCAL": "0"}).stdout)
    machine, rate = data["machine"], 1e9 / 8
    assert data["key"]["ranks_per_node"] == 2 and data["key"]["several_nodes"]
    assert 0.3 * rate < machine["between"]["bandwidth"] < 1.1 * rate < machine["inside"]["bandwidth"]
    assert 0.3 * rate < machine["node_bandwidth"] < 1.1 * rate
    assert machine["between"]["overlap"] > 0


NEIGHBORS = """
import json, time
import numpy as np
from mpi4py import MPI
comm, found = MPI.COMM_WORLD, []
mine, theirs = np.zeros((2, 2 ** 18), np.uint8)
for other in [comm.rank ^ 1] + 6 * [comm.rank ^ 2]:            # on my host, then on the other
    time.sleep(0.15)                                           # a shaper saves up while nothing is sent
    comm.Barrier()
    start = time.perf_counter()
    comm.Sendrecv(mine, other, recvbuf=theirs, source=other)
    comm.Barrier()
    found.append(time.perf_counter() - start)
if not comm.rank:
    print(json.dumps(found[2:]))                               # the first time the hosts are connected
"""


def test_a_message_takes_what_the_rate_says(hosts, monkeypatch):
    """A rate set while the hosts are up; two ranks a host, whose own messages do not take its card."""
    monkeypatch.setattr(hosts, "per_host", 2)
    before = hosts.sent()
    hosts.set_rate("20mbit")
    try:
        took = json.loads(hosts.mpirun(4, [sys.executable, "-c", NEIGHBORS]).stdout)
    finally:
        hosts.set_rate("1gbit")
    moved, rate = 2 * 2 ** 18, 20e6 / 8
    assert min(took) > (moved - 2 * netcluster.BURST) / rate   # a shaper with a large bucket lets it all through
    assert min(took) < moved / (0.8 * rate)                    # the quickest of them, for others may hold some up
    for now, then in zip(hosts.sent(), before):
        assert 6 * moved < now - then < 1.1 * 6 * moved + 1e5
