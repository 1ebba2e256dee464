"""Arrays that are moved, rounded or read: MPI's own collectives, copying or reading the bytes once bound this."""

from collections.abc import Iterator

import numpy as np

from ... import backends
from ...comm.agreement import agreement
from ...errors import VerificationError
from ..clock import reading
from .operation import HEAD_DIM, HEADS, Bench, Operation

GATHERED = 2**24  # bytes of a rank in scatter and gather, and of a partial result
ROW = HEADS * HEAD_DIM * 4  # bytes of a token in float32


def whole_arrays(bench: Bench) -> Iterator[Operation]:
    """A whole array in and out of the ranks' chunks."""
    for layout in ("contiguous", "zigzag"):
        plan = bench.plan(seqlen=bench.peers.size * (GATHERED // ROW), layout=layout)
        yield from _moves(bench, plan, layout)


def _moves(bench, plan, layout):
    comm, root = bench.peers.comm, bench.peers.rank == 0
    shape = 1, plan.problem.seqlen, HEADS, HEAD_DIM
    whole = np.random.default_rng(0).standard_normal(shape, np.float32)
    chunk = plan.scatter(whole if root else None)
    wrong = f"scatter with a {layout} layout does not give every rank its tokens"
    bench.equal([(chunk[0], whole[0, plan.positions])], wrong)
    again = plan.gather(chunk, root=None)
    bench.equal([(again, whole)], f"gather with a {layout} layout does not give the array that was scattered")
    for name, call, run, bound in (
        (
            "scatter",
            "MPI_Scatter",
            lambda: plan.scatter(whole if root else None),
            lambda: comm.Scatter(whole if root else None, np.empty(chunk.size, np.float32)),
        ),
        (
            "gather",
            "MPI_Gather",
            lambda: plan.gather(chunk),
            lambda: comm.Gather(chunk, np.empty(shape, np.float32) if root else None),
        ),
        (
            "gather to all",
            "MPI_Allgather",
            lambda: plan.gather(chunk, root=None),
            lambda: comm.Allgather(chunk, np.empty(shape, np.float32)),
        ),
    ):
        yield Operation(f"{name}, {layout}", call, run, bound, in_mpi=True)


def half_types(bench: Bench) -> Iterator[Operation]:
    """What passes in float16 do besides attention, as their back end does it."""
    here = backends.get(bench.backend)
    bench.stack.callback(here.close)
    shape = GATHERED // ROW, HEADS, HEAD_DIM
    partial, dout = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    out, delta = np.empty(shape, np.float16), np.empty(shape[:2], np.float32)
    dout = dout.astype(np.float16)
    here.wait(here.copy(out, partial))
    here.wait(here.delta(delta, dout, out, None))
    wrong = f"the back end {here.name} does not round float32 to float16 as NumPy does"
    bench.equal([(out, partial.astype(np.float16))], wrong)
    with agreement(bench.peers):
        expected = np.einsum("thd,thd->th", dout, out, dtype=np.float32)
        if not np.allclose(delta, expected, rtol=1e-4, atol=1e-4):
            raise VerificationError(f"delta by the back end {here.name} is not the sum of dout * out")
    read, written = np.ones((2, (partial.nbytes + out.nbytes) // 2), np.uint8)
    yield Operation(
        "narrow float32 to float16",
        "copying as many bytes",
        lambda: here.wait(here.copy(out, partial)),
        lambda: np.copyto(written, read),
    )
    yield Operation(
        "delta, float16",
        "reading its arrays",
        lambda: here.wait(here.delta(delta, dout, out, None)),
        reading(dout.nbytes + out.nbytes),
    )
