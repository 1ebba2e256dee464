"""Arrays that are moved, rounded or read: MPI's own collectives, copying or reading the bytes once bound this."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from ... import backends
from ...comm.agreement import agreement
from ...errors import VerificationError
from ...plan.mesh_attention import MeshAttention
from ..clock import reading
from .operation import HEAD_DIM, HEADS, Operation

GATHERED = 2**24  # bytes of a rank in scatter and gather, and of a partial result
ROW = HEADS * HEAD_DIM * 4  # bytes of a token in float32


@contextmanager
def whole_arrays(peers, backend) -> Iterator[list[Operation]]:
    """A whole array in and out of the ranks' chunks."""
    with ExitStack() as stack:
        rows = []
        for layout in ("contiguous", "zigzag"):
            plan = stack.enter_context(
                MeshAttention(
                    peers.comm,
                    seqlen=peers.size * (GATHERED // ROW),
                    heads=HEADS,
                    head_dim=HEAD_DIM,
                    layout=layout,
                    backend=backend,
                    timeout=peers.timeout,
                )
            )
            rows += _moves(plan, peers, layout)
        yield rows


def _moves(plan, peers, layout):
    comm, root = peers.comm, peers.rank == 0
    shape = 1, plan.problem.seqlen, HEADS, HEAD_DIM
    whole = np.random.default_rng(0).standard_normal(shape, np.float32)
    chunk = plan.scatter(whole if root else None)
    with agreement(peers):
        if not np.array_equal(chunk[0], whole[0, plan.positions]):
            raise VerificationError(f"scatter with a {layout} layout does not give every rank its tokens")
    again = plan.gather(chunk, root=None)
    with agreement(peers):
        if not np.array_equal(again, whole):
            raise VerificationError(f"gather with a {layout} layout does not give the array that was scattered")
    size = chunk.size
    yield Operation(
        f"scatter, {layout}",
        "MPI_Scatter",
        lambda: plan.scatter(whole if root else None),
        lambda: comm.Scatter(whole if root else None, np.empty(size, np.float32)),
        in_mpi=True,
    )
    yield Operation(
        f"gather, {layout}",
        "MPI_Gather",
        lambda: plan.gather(chunk),
        lambda: comm.Gather(chunk, np.empty(shape, np.float32) if root else None),
        in_mpi=True,
    )
    yield Operation(
        f"gather to all, {layout}",
        "MPI_Allgather",
        lambda: plan.gather(chunk, root=None),
        lambda: comm.Allgather(chunk, np.empty(shape, np.float32)),
        in_mpi=True,
    )


@contextmanager
def half_types(peers, backend) -> Iterator[list[Operation]]:
    """What passes in float16 do besides attention, as their back end does it."""
    here = backends.get(backend)
    try:
        shape = GATHERED // ROW, HEADS, HEAD_DIM
        partial, dout = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
        out, delta = np.empty(shape, np.float16), np.empty(shape[:2], np.float32)
        dout = dout.astype(np.float16)
        here.wait(here.copy(out, partial))
        here.wait(here.delta(delta, dout, out, None))
        with agreement(peers):
            if not np.array_equal(out, partial.astype(np.float16)):
                raise VerificationError(f"the back end {here.name} does not round float32 to float16 as NumPy does")
            expected = np.einsum("thd,thd->th", dout, out, dtype=np.float32)
            if not np.allclose(delta, expected, rtol=1e-4, atol=1e-4):
                raise VerificationError(f"delta by the back end {here.name} is not the sum of dout * out")
        read, written = np.ones((2, (partial.nbytes + out.nbytes) // 2), np.uint8)
        yield [
            Operation(
                "narrow float32 to float16",
                "copying as many bytes",
                lambda: here.wait(here.copy(out, partial)),
                lambda: np.copyto(written, read),
            ),
            Operation(
                "delta, float16",
                "reading its arrays",
                lambda: here.wait(here.delta(delta, dout, out, None)),
                reading(dout.nbytes + out.nbytes),
            ),
        ]
    finally:
        here.close()
