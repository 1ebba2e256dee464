"""Measures every algorithm that combines the ranks' partial results, as decoding does for each token."""

import numpy as np

from ..comm.exchange import Exchange
from ..decode.combine import Combiner, Partial, partial_bytes
from ..schedule import reduction
from .samples import Sample, take_turns

ROWS = (8, 128, 2048)  # heads of all queries: from kilobytes, for one token, to megabytes
TURNS = 4  # turns of all algorithms that must fit into the time, except for the fewest rows
DTYPE = "float32"


def combining(combiner, backend, algorithm, partial, spare):
    """A work for `take_turns`: clears a partial and combines it over the ranks; spare: a partial as scratch space."""

    def work(turn=0):
        partial.ready = (backend.clear(partial.out, partial.lse),)
        spare.ready = ()
        for event in combiner.run(algorithm, partial, spare).ready:
            backend.wait(event)

    return work


def measure(peers, nodes, backend, head_dim, inside, between, seconds, progress):
    """{algorithm: {rows: `Sample` of the seconds of the slowest rank}}; None for one rank; collective.

    nodes: node number of every rank.  inside, between: the links; they determine for which rows there is time.
    """
    if peers.size == 1:
        progress(seconds)
        return None
    exchange, algorithms = Exchange(peers), reduction.algorithms(nodes)
    combiner = Combiner(exchange, backend, nodes)
    all_rows = [
        rows
        for rows in ROWS
        if rows == ROWS[0]
        or seconds
        > TURNS
        * len(ROWS)
        * sum(
            reduction.predicted_seconds(algorithm, *partial_bytes(rows, head_dim, DTYPE), nodes, inside, between)
            for algorithm in algorithms
        )
    ]
    pairs = [[Partial(backend, 1, rows, head_dim, DTYPE) for _ in range(2)] for rows in all_rows]
    took = take_turns(
        peers,
        [combining(combiner, backend, algorithm, *pair) for algorithm in algorithms for pair in pairs],
        seconds,
        progress,
    )
    exchange.close()
    slowest = np.moveaxis(took.max(axis=0), -1, 0).reshape(len(algorithms), len(all_rows), -1)
    return {algorithm: dict(zip(all_rows, map(Sample.of, by_rows))) for algorithm, by_rows in zip(algorithms, slowest)}


def factors(combined, head_dim, nodes, inside, between):
    """The value of `Machine.combining`: measured seconds relative to those predicted from these links."""

    def factor(algorithm, nbytes, seconds):
        return [nbytes[0], seconds / reduction.predicted_seconds(algorithm, *nbytes, nodes, inside, between)]

    return {
        algorithm: [
            factor(algorithm, partial_bytes(rows, head_dim, DTYPE), sample.typical) for rows, sample in by_rows.items()
        ]
        for algorithm, by_rows in combined.items()
    }
