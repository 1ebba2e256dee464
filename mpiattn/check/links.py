"""Measures how fast ranks send to their neighbours: all at once around a ring, as chunks travel."""

import time

import numpy as np

from ..backends.numpy.backend import NumpyBackend
from ..tuning.samples import take_turns
from ..tuning.wire import Wire

SHORT = 8  # bytes, for the latency
SIZES = (2**20, 4 * 2**20)  # bytes, for the rate
TURNS, REPEATS = 30, 7  # short exchanges in a row; at most this many repetitions of every measurement
LIMIT = 2.0  # seconds for all measurements together


def gather(peers, ranks):
    """The link that ends at each rank: [{"from", "to", "between", "latency", "rates"}]; collective.

    ranks: their facts.  between: whether the link joins two nodes.  latency: seconds of a short exchange.  rates:
    median bytes per second by size.  Empty for one rank.
    """
    if peers.size == 1:
        return []
    backend = NumpyBackend()
    works = [_arriving(Wire(peers, backend, SHORT), TURNS), *(_arriving(Wire(peers, backend, size)) for size in SIZES)]
    latency, *long = np.moveaxis(np.median(take_turns(peers, works, LIMIT, most=REPEATS), axis=1), -1, 0).tolist()
    backend.close()
    return [
        {
            "from": source,
            "to": rank,
            "latency": latency[rank] / TURNS,
            "between": ranks[source]["node"] != ranks[rank]["node"],
            "rates": {size: size / took[rank] for size, took in zip(SIZES, long)},
        }
        for rank in range(peers.size)
        for source in [(rank - 1) % peers.size]
    ]


def _arriving(wire, times=1):
    """A work for `take_turns`: seconds until `times` messages of the neighbour have come, without waiting for sends."""
    before, after = (wire.peers.rank - 1) % wire.peers.size, (wire.peers.rank + 1) % wire.peers.size

    def work(turn):
        start = time.perf_counter()
        for _ in range(times):
            coming, leaving = wire.receive(before), wire.send(after)
            wire.exchange.wait(coming)
            took = time.perf_counter() - start
            wire.complete(leaving)
        return took

    return work
