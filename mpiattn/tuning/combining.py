"""Combining every rank's partial, as decoding does for each token: the seconds of every way."""

import numpy as np

from ..comm.exchange import Exchange
from ..decode.combine import Combiner, Partial, partial_bytes
from ..schedule import reduction
from .samples import Sample, take_turns

ROWS = (8, 128, 2048)                # heads of all queries: kilobytes, as one token has, to megabytes
TURNS = 4                            # of all ways, that there has to be time for; the fewest rows are measured anyway
DTYPE = "float32"


def combining(combiner, backend, way, mine, spare):
    """A work that combines two partials' contents, whatever they are, from the launch of one to its result."""
    def work(turn=0):
        mine.ready = (backend.clear(mine.out, mine.lse),)
        spare.ready = ()
        for event in combiner.run(way, mine, spare).ready:
            backend.wait(event)
    return work


def measure(peers, nodes, backend, head_dim, inside, between, seconds, progress):
    """{way: {rows: `Sample` of the seconds of the slowest rank}}, None for one rank; collective.

    nodes: of every rank.  inside, between: links, which tell for how many rows there is no time.
    """
    if peers.size == 1:
        progress(seconds)
        return None
    exchange, ways = Exchange(peers), reduction.ways(nodes)
    combiner = Combiner(exchange, backend, nodes)
    all_rows = [rows for rows in ROWS if rows == ROWS[0] or seconds > TURNS * len(ROWS) * sum(
        reduction.predicted_seconds(way, *partial_bytes(rows, head_dim, DTYPE), nodes, inside, between)
        for way in ways)]
    pairs = [[Partial(backend, 1, rows, head_dim, DTYPE) for _ in range(2)] for rows in all_rows]
    took = take_turns(peers, [combining(combiner, backend, way, *pair) for way in ways for pair in pairs], seconds,
                      progress)
    exchange.close()
    slowest = np.moveaxis(took.max(axis=0), -1, 0).reshape(len(ways), len(all_rows), -1)
    return {way: dict(zip(all_rows, map(Sample.of, by_rows))) for way, by_rows in zip(ways, slowest)}


def factors(found, head_dim, nodes, inside, between):
    """As of `Machine.combining`: what was found, over what these links let expect."""
    def factor(way, nbytes, seconds):
        return [nbytes[0], seconds / reduction.predicted_seconds(way, *nbytes, nodes, inside, between)]
    return {way: [factor(way, partial_bytes(rows, head_dim, DTYPE), sample.typical) for rows, sample in by_rows.items()]
            for way, by_rows in found.items()}
