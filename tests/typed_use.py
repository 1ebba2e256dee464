"""A program that mypy checks and nobody runs: right uses of mpiattn pass, wrong ones are noticed.

An error that is ignored here has to be one (`warn_unused_ignores`).
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from mpi4py import MPI

import mpiattn
import mpiattn.jax
import mpiattn.torch
from mpiattn import backends
from mpiattn.backends.base import Backend
from mpiattn.backends.cuda.backend import CudaBackend
from mpiattn.backends.cuda.cudnn_backend import CudnnBackend
from mpiattn.backends.numpy.backend import NumpyBackend
from mpiattn.backends.testing.deferred import DeferredBackend
from mpiattn.backends.testing.emulated import DeferredEmulatedBackend, EmulatedBackend
from mpiattn.backends.testing.paced import PacedBackend

# Every back end has all that the protocol names, with as many arguments.  (mypy compares no names of arguments here.)
on_numpy: type[Backend] = NumpyBackend
on_cuda: type[Backend] = CudaBackend
with_cudnn: type[Backend] = CudnnBackend
deferred: type[Backend] = DeferredBackend
emulated: type[Backend] = EmulatedBackend
deferred_emulated: type[Backend] = DeferredEmulatedBackend
paced: type[Backend] = PacedBackend


def layouts() -> tuple[int, ...]:
    layout = mpiattn.Layout("contiguous", 8, 3, sizes=(5, 0, 3))
    mpiattn.Layout("zigzag", "8", 3)  # type: ignore[arg-type]
    owner: int = layout.owner([1, 2])  # type: ignore[assignment]
    return (owner, *layout.lengths)


def tiles() -> int:
    mpiattn.Tile(2, 3)  # type: ignore[call-arg]
    return mpiattn.Tile(1, 2, 3).ranks


def train(comm: MPI.Intracomm, q: Any, k: Any, v: Any) -> float:
    with mpiattn.MeshAttention(comm, seqlen=4099, heads=8, head_dim=64, window=(1024, None), tile=(2, 2)) as plan:
        out, lse = plan.forward(q, k, v, cu_seqlens=[0, 1000, 4099], progress=print)
        dq, dk, dv = plan.backward(out, q, k, v, out, lse, causal_documents=[[True, False]])
        plan.save_trace("trace.json")
        seconds: float = plan.trace().seconds  # type: ignore[union-attr]  # None before the first pass
        verified: bool = plan.verify(q, k, v, out, lse, dout=out, grads=(dq, dk, dv), samples=None).passed
        plan.forward(q, k, v, check="no")  # type: ignore[arg-type]
        with plan.like(seqlen=100) as other:
            sent: tuple[int, int] = other.sent
        plan.like(window=None, mask=None, causal=False, scale=0.1).close()
        plan.like(window=7)  # type: ignore[arg-type]
        plan.predicted_trace().waiting.mean()
    mpiattn.MeshAttention(comm, heads=8, head_dim=64)  # type: ignore[call-arg]
    tensors = mpiattn.torch.attention(plan, *map(torch.from_numpy, (dq, dk, dv)))
    traced = mpiattn.jax.attention(plan, *map(jax.numpy.asarray, (dq, dk, dv)), seed=jax.numpy.uint32(1), dropout=0.1)
    mpiattn.jax.attention(plan, dq, dk, dv, padding="no")  # type: ignore[arg-type]
    return sent[0] + seconds + len(tensors) + len(traced) + len(plan.positions) + verified


def failed(comm: MPI.Intracomm) -> tuple[int, ...]:
    try:
        mpiattn.KVCache(comm, capacity=9, kv_heads=1, head_dim=4).close()
    except mpiattn.PeerFailure as failure:
        return failure.ranks
    raise mpiattn.PeerFailure("none", ranks=1)  # type: ignore[arg-type]


def decode(comm: MPI.Intracomm, q: Any, k: Any, v: Any) -> str:
    with mpiattn.KVCache.load(comm, Path("cache.h5"), machine=mpiattn.Machine.from_dict({})) as cache:
        cache.append(k, v, sequences=[0], counts=np.array([5]))
        for decode in (mpiattn.tree_decode, mpiattn.ring_decode, mpiattn.query_ring_decode):
            out, lse = decode(q, cache, causal=False)
        mpiattn.tree_decode(q, cache, axis=1)  # type: ignore[call-arg]
        mpiattn.merge(out, lse, *mpiattn.attention(q, k, v, comm=comm, backend="numpy"))
        return f"{cache.lengths[0] + cache.positions(0)[0]} {cache.machine.compute(1e9, 'float32')}"


def names() -> str:
    from mpiattn import flash  # type: ignore[attr-defined]  # noqa: F401

    return backends.get("numpy").name + mpiattn.__version__
