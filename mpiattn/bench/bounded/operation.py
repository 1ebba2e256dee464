"""An operation beside its bound, what it is measured with, and the bounds that several parts of the library share.

A bound is work that no implementation can leave out: matrix products of as many operations by NumPy's BLAS, reading or
copying the bytes once, MPI's own collective, the messages by which ranks agree that they make the same call.  Or it is
the plain way to as much: NumPy by the definition, h5py without more, a call that is told less.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from ...comm.agreement import agreement
from ...comm.peers import Peers
from ...decode.cache import KVCache
from ...errors import VerificationError
from ...plan.mesh_attention import MeshAttention

HEADS, KV_HEADS, HEAD_DIM = 8, 1, 64
TOKENS = 2048  # of a rank
SIDE = 1024  # rows and columns of the matrices whose product is a bound


@dataclass
class Operation:
    """An operation and its bound, both collective.

    bound: a function or, of an operation whose time was predicted, the predicted seconds.
    worth: how many of the bound's calls the operation is worth.
    in_mpi: whether the bound waits for other ranks inside MPI, which knows no time limit.
    """

    name: str
    bounded_by: str
    run: Callable[[], object]
    bound: Callable[[], object] | float
    worth: float = 1.0
    in_mpi: bool = False


@dataclass
class Bench:
    """The ranks and the back end that operations are measured with; a stack closes what they use."""

    peers: Peers
    backend: str
    stack: ExitStack

    def plan(self, **shape):
        """A plan of HEADS heads of HEAD_DIM, unless the shape has others."""
        shape = {"heads": HEADS, "head_dim": HEAD_DIM, **shape}
        how = {"backend": self.backend, "timeout": self.peers.timeout}
        return self.stack.enter_context(MeshAttention(self.peers.comm, **shape, **how))

    def cache(self, sequences, keys, dtype="float32", spare=0):
        """A cache of sequences of so many keys, with room for `spare` more of each, and k and v in it."""
        cache = KVCache(
            self.peers.comm,
            capacity=sequences * (keys + spare),
            sequences=sequences,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=dtype,
            backend=self.backend,
            timeout=self.peers.timeout,
        )
        self.stack.enter_context(cache)
        tokens = np.random.default_rng(0).standard_normal((2, sequences, keys, KV_HEADS, HEAD_DIM), np.float32)
        tokens = tokens.astype(cache.dtype)
        cache.append(*tokens)
        return cache, tokens

    def equal(self, pairs, wrong):
        """Raise VerificationError on every rank unless the arrays of every pair are equal on all."""
        with agreement(self.peers):
            if not all(np.array_equal(*pair) for pair in pairs):
                raise VerificationError(wrong)


def products(operations):
    """Matrix products by NumPy's BLAS, and how many times theirs a number of operations is."""
    a, b, c = np.ones((3, SIDE, SIDE), np.float32)
    count = max(1, round(operations / (2 * SIDE**3)))

    def multiply():
        for _ in range(count):
            np.matmul(a, b, out=c)

    return multiply, operations / (count * 2 * SIDE**3)


def agreeing(peers):
    """Two allreduces of a few bytes, by which ranks find out that they make the same call, and that it ended."""
    given, taken = np.zeros((2, 4), np.int64)

    def agree():
        peers.comm.Allreduce(given, taken, MPI.MAX)
        peers.comm.Allreduce(given, taken, MPI.MAX)

    return agree
