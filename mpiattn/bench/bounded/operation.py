"""An operation beside its bound, and the bounds that several parts of the library share.

A bound is work that no implementation can leave out: matrix products of as many operations by NumPy's BLAS, reading or
copying the bytes once, MPI's own collective, the messages by which ranks agree that they make the same call.  Or it is
the plain way to as much: NumPy by the definition, h5py without more, a call that is told less.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

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
