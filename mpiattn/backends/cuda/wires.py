"""How the arrays of a CUDA back end reach other ranks: by MPI, or by copies from GPU to GPU within a node."""

from functools import partial

import numpy as np

from ...errors import ArgumentError
from ..wire import WireBytes
from .ipc import Ipc
from .staging import Staging


class Wires:
    """The messages of one `CudaBackend`.

    gpu: the back end.  by_mpi: how arrays go that MPI carries, "device" (as they are) or "staged" (through pinned host
    memory).  leaving, arriving: the streams of the copies to the wire and from it.
    Collectives are always staged, because no MPI's nonblocking collectives reliably take device memory.
    """

    def __init__(self, gpu, by_mpi, leaving, arriving):
        self.gpu, self.by_mpi, self._streams = gpu, by_mpi, (leaving, arriving)
        self.staging, self._as_it_is, self._ipc = Staging(gpu, leaving, arriving), AsItIs(gpu), None

    @property
    def transport(self):
        """ "ipc" once GPUs of ranks of the node copy from each other, else how MPI carries all."""
        return self.by_mpi if self._ipc is None else "ipc"

    @property
    def near(self):
        """What `connect` was given; None before."""
        return self._ipc and self._ipc.near

    def connect(self, near):
        """Let GPUs of these ranks copy from each other.  Raises ArgumentError.  near: `mpiattn.comm.near.Near`."""
        if near.device != self.gpu.device:
            raise ArgumentError(
                f"the current GPU is {self.gpu.device}; it must be {near.device}, through which other ranks are reached"
            )
        self._ipc = Ipc(self.gpu, *self._streams, near)

    def outgoing(self, array, after, collective):
        """As `Backend.outgoing`."""
        if self._ipc is None or collective:
            return self._way(collective).outgoing(array, after)
        return WireBytes(None, by_peer=partial(self._outgoing_to, array, after))

    def _outgoing_to(self, array, after, rank):
        if rank not in self.near.opened:
            return self._way().outgoing(array, after)
        self.staging.count(array)
        return self._ipc.outgoing(array, after or (self.gpu.begun,), rank)

    def incoming(self, array, after, collective):
        """As `Backend.incoming`."""
        if self._ipc is None or collective:
            return self._way(collective).incoming(array, after)
        return WireBytes(None, by_peer=partial(self._incoming_from, array, after))

    def _incoming_from(self, array, after, rank):
        near = rank in self.near.opened
        return self._ipc.incoming(array, after, rank) if near else self._way().incoming(array, after)

    def _way(self, collective=False):
        """What makes the messages that MPI carries."""
        return self.staging if collective or self.by_mpi == "staged" else self._as_it_is

    def quiet(self):
        """Whether all copies from other GPUs are done, or soon will be."""
        return self._ipc is None or self._ipc.quiet()


class AsItIs:
    """Device arrays that MPI is given.  It does not know streams, so `ready` lets the host wait for the events."""

    def __init__(self, gpu):
        self.gpu = gpu

    def outgoing(self, array, after):
        """As `Backend.outgoing`."""
        events = after or (self.gpu.begun,)
        return WireBytes(array.reshape(-1).view(np.uint8), lambda start, stop: partial(self.gpu.all_done, events))

    def incoming(self, array, after):
        """As `Backend.incoming`."""
        return self.outgoing(array, after)
