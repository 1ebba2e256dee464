"""Messages by which a rank returns another rank's slots of GPU memory once it has read them."""

import numpy as np
from mpi4py import MPI

from . import arrivals

TAG = 31999  # of these messages only, on a communicator that plans and caches do not use for theirs
_NUMBERS = np.arange(256, dtype=np.uint8)  # what is sent; never freed, since MPI may still read it


class Acks:
    """The messages among the ranks of `comm`; each is a byte, the number of a slot of the rank that receives it."""

    def __init__(self, comm):
        self.comm = comm

    def send(self, rank, number):
        """Return a slot to its owner."""
        self.comm.Isend([_NUMBERS[number : number + 1], MPI.BYTE], rank, TAG).Free()

    def receive(self):
        """The numbers of the slots that have come back since the last call."""
        numbers = []
        while (message := arrivals.take(self.comm, TAG)) is not None:
            numbers += message[1]
        return numbers
