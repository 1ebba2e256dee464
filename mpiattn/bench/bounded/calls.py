"""What a call and a plan cost however few the tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np

from ...plan.mesh_attention import MeshAttention
from .operation import HEAD_DIM, TOKENS, Operation, agreeing


@contextmanager
def small_calls(peers, backend) -> Iterator[list[Operation]]:
    """A token a rank, and plans."""
    shape = {"seqlen": peers.size, "heads": 1, "head_dim": HEAD_DIM, "backend": backend, "timeout": peers.timeout}
    with MeshAttention(peers.comm, **shape) as plan:
        q = np.ones((1, 1, 1, HEAD_DIM), np.float32)
        out, lse = plan.forward(q, q, q)
        lengths, others = count(TOKENS * peers.size), count(TOKENS * peers.size)

        def make(**changed):
            MeshAttention(peers.comm, **{**shape, **changed}).close()

        def duplicate():
            peers.comm.Dup().Free()

        yield [
            Operation(
                "forward, a token a rank",
                "agreeing",
                lambda: plan.forward(q, q, q, out=out, lse=lse),
                agreeing(peers),
                in_mpi=True,
            ),
            *(
                Operation(name, "MPI_Comm_dup and MPI_Comm_free", run, duplicate, in_mpi=True)
                for name, run in (
                    ("making a plan again", make),
                    ("making a plan for a new length", lambda: make(seqlen=next(lengths))),
                    ("plan.like for a new length", lambda: plan.like(seqlen=next(others)).close()),
                )
            ),
        ]
