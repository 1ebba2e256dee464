"""A plan whose caller's ranks are dealt out to the hosts at random, on the ranks of a launch of scaling.py.

It is measured with the mesh in the order of the hosts, and as dealt.
"""

import sys
import time
from pathlib import Path

import numpy as np
import scaling_case

from mpiattn import Layout, MeshAttention


def sent_by_this_host():
    """Bytes that this host's card has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() != "lo")


def measure(job, case):
    """{order: median seconds of a forward pass, and bytes that all hosts send in one}."""
    per_host = job.comm.size // case["hosts"]
    dealt = job.comm.Split(0, int(np.random.default_rng(0).permutation(job.comm.size)[job.comm.rank]))
    as_dealt = Layout("contiguous", case["tokens"], dealt.size)
    results = {}
    for name, layout in (("by host", "contiguous"), ("as dealt", (as_dealt, as_dealt))):
        how = {"tile": tuple(case["tile"]), "layout": layout, "mesh_layout": "contiguous", "schedule": "greedy"}
        shape = {"seqlen": case["tokens"], "heads": case["heads"], "head_dim": case["dim"]}
        with MeshAttention(dealt, **shape, **how, backend=case["backend"]) as plan:
            arrays = np.random.default_rng(job.comm.rank).standard_normal(
                (3, 1, len(plan.positions), case["heads"], case["dim"]), np.float32
            )
            plan.forward(*arrays)
            times, before = [], job.peers.allgather(sent_by_this_host())
            for _ in range(case["runs"]):
                job.peers.barrier()
                start = time.perf_counter()
                plan.forward(*arrays, check=False)
                times.append(max(job.peers.allgather(time.perf_counter() - start)))
            sent = np.subtract(job.peers.allgather(sent_by_this_host()), before)[::per_host].sum() / case["runs"]
        results[name] = {"seconds": float(np.median(times)), "sent": float(sent)}
    return results


if __name__ == "__main__":
    sys.exit(scaling_case.run(__doc__, measure))
