"""Ranks that a launcher dealt out over nodes in turn: a mesh's rows still sit inside a node, and results are right."""

import json
import sys

import launch
import pytest

SCRIPT = """
import json
import numpy as np
from mpi4py import MPI
import mpiattn
from mpiattn.verify.reference import attention
comm = MPI.COMM_WORLD
rng = np.random.default_rng(1)
q, k, v = rng.standard_normal((3, 1, 97, 2, 8))
expected = attention(q, k, v, causal=True)[0]
node = comm.Split_type(MPI.COMM_TYPE_SHARED)
leader = node.bcast(comm.rank)
report = {}
with mpiattn.MeshAttention(comm, seqlen=97, heads=2, head_dim=8, dtype="float64", causal=True, tile="4x2") as plan:
    report["row"] = plan._mesh.row.allgather(leader)
    chunks = [plan.scatter(x if comm.rank == 5 else None, root=5) for x in (q, k, v)]
    scattered = all(np.array_equal(chunk, x[:, plan.positions]) for chunk, x in zip(chunks, (q, k, v)))
    out, lse = plan.forward(*chunks)
    whole = plan.gather(out, root=3)
    report["right"] = bool(scattered and (comm.rank != 3 or np.abs(whole - expected).max() < 1e-12))
    report["positions"] = np.array_equal(plan.positions, plan.q_layout.positions(comm.rank))
    report["chunk"] = plan.chunk
pieces = [np.array_split(x, comm.size, axis=1)[comm.rank] for x in (q, k, v)]
out, lse = mpiattn.attention(*pieces, comm=comm, causal=True, tile="4x2")         # pieces in the callers' own order
report["pieces"] = bool(np.abs(out - np.array_split(expected, comm.size, axis=1)[comm.rank]).max() < 1e-12)
report = comm.gather(report)
if not comm.rank:
    print(json.dumps(report))
"""


@pytest.mark.draw(1)
@pytest.mark.parametrize("nodes", [1, 2])
def test_rows_sit_inside_a_node(nodes):
    launch.require_launch()
    if launch.vendor() != "mpich":
        pytest.skip("MPICH can be told to see two nodes where there is one")
    env = {"MPIR_CVAR_ODD_EVEN_CLIQUES": "1"} if nodes == 2 else None
    report = json.loads(launch.mpirun(8, [sys.executable, "-c", SCRIPT], env=env).stdout)
    assert all(len(set(rank["row"])) == 1 for rank in report)
    assert len({rank["row"][0] for rank in report}) == nodes
    assert all(rank["right"] and rank["positions"] and rank["pieces"] for rank in report)
    chunks = [rank["chunk"] for rank in report]
    assert sorted(chunks) == list(range(8)) and (chunks == list(range(8))) == (nodes == 1)


def test_run_on_nodes_in_turn(tmp_path):
    """The command's files and figures do not depend on who holds what."""
    launch.require_launch()
    if launch.vendor() != "mpich":
        pytest.skip("MPICH can be told to see two nodes where there is one")
    mpiattn = [sys.executable, "-m", "mpiattn"]
    launch.mpirun(
        1, [*mpiattn, "generate", tmp_path / "in.h5", "--seqlen", "301", "--heads", "4", "--head-dim", "8", "--dout"]
    )
    launch.mpirun(
        6,
        [
            *mpiattn,
            "run",
            tmp_path / "in.h5",
            tmp_path / "out.h5",
            *"--causal --backward --verify --tile 3x2 --json".split(),
            tmp_path / "report.json",
        ],
        env={"MPIR_CVAR_ODD_EVEN_CLIQUES": "1"},
    )
    report = json.loads((tmp_path / "report.json").read_text())
    for name in ("forward", "backward"):
        assert all(rank[name]["sent_bytes"] == rank[name]["formula_bytes"] for rank in report["per_rank"])
        assert all(
            len(rank[name]["steps"]) == len(report["per_rank"][0][name]["steps"]) > 1 for rank in report["per_rank"]
        )
    assert sum(rank["pairs"] for rank in report["per_rank"]) == 301 * 302 // 2
    assert report["verify"]["passed"] and report["verify_gradients"]["passed"]
