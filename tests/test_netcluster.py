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
