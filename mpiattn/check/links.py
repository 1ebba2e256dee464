"""How fast ranks send to their neighbours, all at once around a ring, as chunks travel."""

import time
from statistics import median

import numpy as np
from mpi4py import MPI

SHORT = 8                            # bytes, for the time that a message takes whatever its length
SIZES = (2 ** 20, 4 * 2 ** 20)       # bytes, for the rate
TURNS, REPEATS = 30, 7               # exchanges of short and of long messages, at most ...
LIMIT = 2.0                          # ... and seconds that the long ones of a size may take
TAG = 1


def gather(peers, ranks):
    """The link that ends at each rank: [{"from", "to", "between", "latency", "rates"}]; collective.

    ranks: their facts.  between: whether it joins two nodes.  latency: seconds of a short exchange.  rates: bytes a
    second by size, the median.  Empty for one rank.
    """
    if peers.size == 1:
        return []
    source = (peers.rank - 1) % peers.size
    _seconds(peers, SHORT)                                     # connections are made with the first message
    latency = _seconds(peers, SHORT, TURNS) / TURNS
    return peers.allgather({"from": source, "to": peers.rank, "latency": latency,
                            "between": ranks[source]["node"] != ranks[peers.rank]["node"],
                            "rates": {size: size / _typical(peers, size) for size in SIZES}})


def _typical(peers, size):
    """Median of the seconds that a message of some bytes takes to this rank."""
    first = np.array([_seconds(peers, size)])
    peers.reduce(first, MPI.MAX)
    repeats = min(REPEATS, max(1, int(LIMIT / first[0])))
    return median(_seconds(peers, size) for _ in range(repeats))


def _seconds(peers, size, turns=1):
    """Seconds until as many messages of the neighbour's have come."""
    given, taken = np.zeros(size, np.uint8), np.empty(size, np.uint8)
    before, after = (peers.rank - 1) % peers.size, (peers.rank + 1) % peers.size
    taken[...] = 1                                             # its memory is there before time is taken
    peers.barrier()
    start = time.perf_counter()
    for _ in range(turns):
        send = peers.comm.Isend([given, MPI.BYTE], after, TAG)
        peers.wait([peers.comm.Irecv([taken, MPI.BYTE], before, TAG)], lambda: f"for {size} bytes of rank {before}")
        took = time.perf_counter() - start
        peers.wait([send], lambda: f"to send {size} bytes to rank {after}")
    return took
