"""Measures MPI's collectives against messages between pairs of ranks that move the same bytes."""

import numpy as np

from ..backends.wire import WireBytes
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

    def part(buffer, rank):
        return buffer[rank * tokens * row : (rank + 1) * tokens * row]

    def arrays():
        return (
            exchange.whole(backend.outgoing(wire.given, collective=True)),
            exchange.whole(backend.incoming(wire.taken, collective=True)),
        )

    def gather(turn):
        given, taken = arrays()
        wire.complete(exchange.allgather(comm, part(given, peers.rank), taken, counts, starts, row))

    def alltoall(turn):
        given, taken = arrays()
        wire.complete(exchange.alltoall(comm, given, others, starts, taken, others, starts, row, tokens))

    def pairs(turn):
        (given, taken), posted = arrays(), []
        for hop in range(1, peers.size):
            dest, source = (peers.rank + hop) % peers.size, (peers.rank - hop) % peers.size
            posted += exchange.receive(comm, WireBytes(part(taken, source)), source, TAG)
            posted += exchange.send(comm, WireBytes(part(given, dest)), dest, TAG)
        wire.complete(posted)

    took = take_turns(peers, [gather, alltoall, pairs], seconds, progress)
    exchange.close()
    return Sample.of(np.mean(took[..., :2], axis=-1) / took[..., 2])
