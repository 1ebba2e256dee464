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
