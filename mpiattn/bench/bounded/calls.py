"""What a call and a plan cost however few the tokens."""

from collections.abc import Iterator
from itertools import count

import numpy as np

from ...plan.mesh_attention import MeshAttention
from .operation import HEAD_DIM, TOKENS, Bench, Operation, agreeing


def small_calls(bench: Bench) -> Iterator[Operation]:
    """A token a rank, and plans."""
    peers = bench.peers
    plan = bench.plan(seqlen=peers.size, heads=1)
    q = np.ones((1, 1, 1, HEAD_DIM), np.float32)
    out, lse = plan.forward(q, q, q)
    lengths, others = count(TOKENS * peers.size), count(TOKENS * peers.size)

    def make(seqlen):
        how = {"backend": bench.backend, "timeout": peers.timeout}
        MeshAttention(peers.comm, seqlen=seqlen, heads=1, head_dim=HEAD_DIM, **how).close()

    def again():
        plan.forward(q, q, q, out=out, lse=lse)

    yield Operation("forward, a token a rank", "agreeing", again, agreeing(peers), in_mpi=True)
    for name, run in (
        ("making a plan again", lambda: make(peers.size)),
        ("making a plan for a new length", lambda: make(next(lengths))),
        ("plan.like for a new length", lambda: plan.like(seqlen=next(others)).close()),
    ):
        bound = "MPI_Comm_dup and MPI_Comm_free"
        yield Operation(name, bound, run, lambda: peers.comm.Dup().Free(), in_mpi=True)
