"""Two hosts with a shaped link: bytes by the cards' own counters, and that the link is no faster than its rate.

How much slower this machine makes it is nothing to test here: tests/scaling.py measures that, and what blocks hide.
"""

import json
import sys

import launch
import netcluster
import pytest

pytestmark = pytest.mark.workshop
SCRIPT = """
import json, sys
import numpy as np
from mpi4py import MPI
import mpiattn
comm = MPI.COMM_WORLD
with mpiattn.MeshAttention(comm, seqlen=4096, heads=4, head_dim=128, tile="ring", schedule="greedy") as plan:
    chunk = np.random.default_rng(comm.rank).standard_normal((1, len(plan.positions), 4, 128), np.float32)
    for _ in range(2):
        plan.forward(chunk, chunk, chunk)
    sent = comm.gather(plan.sent[0])
if not comm.rank:
    print(json.dumps(sent))
"""


@pytest.fixture(scope="module")
def hosts():
    launch.require_launch()
    why = netcluster.missing()
    if why:
        pytest.skip(why)
    try:
        with netcluster.Hosts(2, "1gbit") as hosts:
            yield hosts
    except netcluster.NotUpError as error:
        pytest.skip(f"no hosts here: {error}")


def test_bytes(hosts):
    before = hosts.sent()
    outcome = hosts.mpirun(2, [sys.executable, "-c", SCRIPT])
    on_the_wire = [now - then for now, then in zip(hosts.sent(), before)]
    for sent, wire in zip(json.loads(outcome.stdout), on_the_wire):
        assert sent == 2 * 2 * 2048 * 4 * 128 * 4  # passes; k and v of a chunk
        assert sent < wire < 1.1 * sent + 2e6  # headers, and starting the launch


@pytest.mark.slow
def test_tune_finds_the_link(hosts, tmp_path):
    """Two ranks a host share its card, whose rate is known; what is inside a host does not go through it.

    Where ranks wait for a core, messages that arrived meanwhile are read at once, faster than the rate.
    """
    rate = 20e6 / 8
    hosts.set_rate("20mbit")
    command = [sys.executable, "-m", "mpiattn", "tune", "--quick", "--dtype", "float32", "--json", "-", "--no-store"]
    data = json.loads(hosts.mpirun(4, command, env={"MPIR_CVAR_NOLOCAL": "0"}).stdout)
    machine = data["machine"]
    assert data["key"]["ranks_per_node"] == 2 and data["key"]["several_nodes"]
    assert 0 < machine["between"]["bandwidth"] < 2 * rate < machine["inside"]["bandwidth"]
    assert 0 < machine["node_bandwidth"] < 2 * rate


NEIGHBORS = """
import json, time
import numpy as np
from mpi4py import MPI
comm, seconds = MPI.COMM_WORLD, []
sent, received = np.zeros((2, 2 ** 18), np.uint8)
for other in [comm.rank ^ 1] + 6 * [comm.rank ^ 2]:            # on my host, then on the other
    time.sleep(0.15)                                           # a shaper saves up while nothing is sent
    comm.Barrier()
    start = time.perf_counter()
    comm.Sendrecv(sent, other, recvbuf=received, source=other)
    comm.Barrier()
    seconds.append(time.perf_counter() - start)
if not comm.rank:
    print(json.dumps(seconds[2:]))                               # the first time the hosts are connected
"""


def test_a_message_takes_what_the_rate_says(hosts, monkeypatch):
    """A rate set while the hosts are up; two ranks a host, whose own messages do not take its card."""
    monkeypatch.setattr(hosts, "per_host", 2)
    before = hosts.sent()
    hosts.set_rate("10mbit")
    took = json.loads(hosts.mpirun(4, [sys.executable, "-c", NEIGHBORS]).stdout)
    moved, rate = 2 * 2**18, 10e6 / 8
    assert min(took) > (moved - 2 * netcluster.BURST) / rate  # a shaper with a large bucket lets it all through
    for now, then in zip(hosts.sent(), before):
        assert 6 * moved < now - then < 1.1 * 6 * moved + 1e5
