"""Measures MPI's collectives against messages between pairs of ranks that move the same bytes."""

import numpy as np

from ..backends.wire import Pieces
from .samples import Sample, take_turns
from .wire import ITEMSIZE, TAG, Wire

CHUNK = 2**20  # bytes of a chunk, at most
ALL = 64 * 2**20  # bytes of the chunks of all ranks together, at most
LEAST = 2**12  # bytes of a chunk, at least
TURNS = 12  # turns of the three works that must fit into the time


def measure(peers, backend, bandwidth, seconds, progress):
    """Seconds of a collective relative to the messages between pairs; None for one rank; collective.

    bandwidth: bytes per second of the slowest links.
    """
    if peers.size == 1:
        progress(seconds)
        return None
    in_time = int(bandwidth * seconds / (TURNS * (peers.size - 1)))
    tokens = max(LEAST, min(CHUNK, ALL // peers.size, in_time)) // ITEMSIZE
    wire, comm, row = Wire(peers, backend, tokens * peers.size * ITEMSIZE), peers.comm, ITEMSIZE
    exchange = wire.exchange
    counts, starts = [tokens] * peers.size, [tokens * rank for rank in range(peers.size)]
    others = [tokens * (rank != peers.rank) for rank in range(peers.size)]

    def parts(buffer):
        return [buffer[start : start + tokens] for start in starts]

    given, taken = parts(wire.given), parts(wire.taken)  # by the rank that they go to, or come from

    def gather(turn):
        own = backend.outgoing(given[peers.rank], collective=True)
        arena = backend.incoming(wire.taken, collective=True)
        wire.complete(exchange.allgather(comm, own, arena, counts, starts, row), [given[peers.rank]])

    def alltoall(turn):
        own, arena = backend.outgoing(wire.given, collective=True), backend.incoming(wire.taken, collective=True)
        wire.complete(exchange.alltoall(comm, Pieces(own, others, starts), Pieces(arena, others, starts), row, tokens))

    def pairs(turn):
        posted = []
        for hop in range(1, peers.size):
            dest, source = (peers.rank + hop) % peers.size, (peers.rank - hop) % peers.size
            posted += exchange.receive(comm, backend.incoming(taken[source]), source, TAG)
            posted += exchange.send(comm, backend.outgoing(given[dest]), dest, TAG)
        wire.complete(
            posted, *([each[rank] for rank in range(peers.size) if rank != peers.rank] for each in (given, taken))
        )

    took = take_turns(peers, [gather, alltoall, pairs], seconds, progress)
    exchange.close()
    return Sample.of(np.mean(took[..., :2], axis=-1) / took[..., 2])
