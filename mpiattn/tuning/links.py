"""Links inside a node and between nodes: latency, and bandwidth while all ranks send and receive at once."""

from typing import NamedTuple

import numpy as np

from .samples import Sample, take_turns
from .wire import Wire

SHORT = 8                            # bytes, for what a message takes besides its bytes
EXCHANGES = 30                       # short ones in a row
SIZES = (2 ** 20, 8 * 2 ** 20)       # bytes, as chunks have, ...
PROBE = 2 ** 16                      # ... or less on links so slow that those would take too long, at least this
TURNS = 4                            # at least, that there has to be time for
SHARING = 0.9                        # of the rate of one rank a node: with less, all ranks of it share a card


class Found(NamedTuple):
    """latency: seconds.  bandwidth: bytes a second of a rank.  node: of all ranks of a node together, None if as many
    times that of one."""

    latency: Sample
    bandwidth: Sample
    node: Sample = None


def partners(nodes, rank, between, turn, crossing=None):
    """Whom a rank sends to and receives from, (dest, source), so that all do so at once; None if it has no part.

    nodes: of every rank.  between: whether to another node, then to the rank of the same place there.  turn: others
    come with every turn.  crossing: how many ranks of each node send to another, at most and by default as many as the
    smallest has.
    """
    places = [[other for other, node in enumerate(nodes) if node == one] for one in range(max(nodes) + 1)]
    group, at = places[nodes[rank]], nodes[rank]
    if between:
        place = group.index(rank)
        if place >= (crossing or min(map(len, places))):
            return None
        group = [node[place] for node in places]
    else:
        at = group.index(rank)
    if len(group) < 2:
        return None
    ahead = 1 + turn % (len(group) - 1)
    return group[(at + ahead) % len(group)], group[(at - ahead) % len(group)]


def swapping(wire, nodes, between, times=1, crossing=None):
    """A work for `take_turns`: swaps over such links."""
    def work(turn):
        ends = partners(nodes, wire.peers.rank, between, turn, crossing)
        if ends is None:
            return np.nan
        for _ in range(times):
            wire.swap(ends)
        return None
    return work


def rates(seconds, sizes, latency):
    """Bytes a second of transfers of every size in turn: seconds (..., sizes) as an array (...)."""
    took = seconds.sum(axis=-1)
    return sum(sizes) / np.maximum(took - len(sizes) * latency, took / 2)       # a latency as noisy as the rest


def exists(nodes, between):
    """Whether there are such links."""
    return any(partners(nodes, rank, between, 0) for rank in range(len(nodes)))


def measure(peers, nodes, backend, between, seconds, progress):
    """What the links are found to be, None where there are none; collective."""
    if not exists(nodes, between):
        progress(seconds)
        return None
    probe = Wire(peers, backend, PROBE)
    took = take_turns(peers, [swapping(probe, nodes, between)], 0)
    most = seconds / TURNS * probe.nbytes / np.nanmedian(took)
    short = Wire(peers, backend, SHORT)
    long = [Wire(peers, backend, int(max(size * min(1, most / sum(SIZES)), PROBE))) for size in SIZES]
    smallest = min(nodes.count(node) for node in set(nodes))
    shared = between and smallest > 1
    works = [swapping(short, nodes, between, EXCHANGES), *(swapping(wire, nodes, between) for wire in long)]
    if shared:
        works += [swapping(wire, nodes, between, crossing=1) for wire in long]
    took = take_turns(peers, works, seconds, progress)
    latency, sizes = Sample.of(took[..., 0] / EXCHANGES), [wire.nbytes for wire in long]
    loaded = Sample.of(rates(took[..., 1:1 + len(long)], sizes, latency.typical))
    if shared:
        alone = Sample.of(rates(took[..., 1 + len(long):], sizes, latency.typical))
        if loaded.typical < SHARING * alone.typical:
            node = Sample(*(smallest * rate for rate in loaded[:3]), loaded.count)
            return Found(latency, alone, node)
    return Found(latency, loaded)
