"""Measures links inside a node and between nodes: latency, and bandwidth while all ranks send and receive."""

from typing import NamedTuple

import numpy as np

from .samples import Sample, take_turns
from .wire import Wire

SHORT = 8  # bytes, for the latency
EXCHANGES = 30  # short exchanges in a row
SIZES = (2**20, 8 * 2**20)  # bytes, like chunks; less on slow links, at least PROBE
PROBE = 2**16  # bytes of the first, untimed estimate
TURNS = 4  # turns that must fit into the time
SHARING = 0.9  # below this share of the rate of one rank per node, its ranks share a card


class LinkFigures(NamedTuple):
    """latency: seconds.  bandwidth: bytes per second of a rank.  node: bytes per second of all ranks of a node
    together; None if they do not limit each other.
    """

    latency: Sample
    bandwidth: Sample
    node: Sample | None = None


def partners(nodes, rank, between, turn, crossing=None):
    """The (dest, source) of a rank when all ranks send and receive at once; None if it takes no part.

    nodes: node number of every rank.  between: send to another node, to the rank with the same number on that node.
    turn: partners change with every turn.  crossing: ranks of each node that send to another one; default and maximum:
    the ranks of the smallest node.
    """
    by_node = [[other for other, node in enumerate(nodes) if node == number] for number in range(max(nodes) + 1)]
    group, at = by_node[nodes[rank]], nodes[rank]
    if between:
        place = group.index(rank)
        if place >= (crossing or min(map(len, by_node))):
            return None
        group = [node[place] for node in by_node]
    else:
        at = group.index(rank)
    if len(group) < 2:
        return None
    ahead = 1 + turn % (len(group) - 1)
    return group[(at + ahead) % len(group)], group[(at - ahead) % len(group)]


def swapping(wire, nodes, between, times=1, crossing=None):
    """A work for `take_turns`: swaps with the `partners` of the turn."""

    def work(turn):
        ends = partners(nodes, wire.peers.rank, between, turn, crossing)
        if ends is None:
            return np.nan
        for _ in range(times):
            wire.swap(ends)
        return None

    return work


def rates(seconds, sizes, latency):
    """Bytes per second of transfers of all sizes together, an array (...), from their seconds (..., sizes)."""
    took = seconds.sum(axis=-1)
    return sum(sizes) / np.maximum(took - len(sizes) * latency, took / 2)  # the latency is noisy, too


def exists(nodes, between):
    """Whether there are links between nodes, or inside a node for between=False."""
    return any(partners(nodes, rank, between, 0) for rank in range(len(nodes)))


def measure(peers, nodes, backend, between, seconds, progress):
    """Measure the links; returns LinkFigures, None where there are no such links; collective."""
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
    loaded = Sample.of(rates(took[..., 1 : 1 + len(long)], sizes, latency.typical))
    if shared:
        alone = Sample.of(rates(took[..., 1 + len(long) :], sizes, latency.typical))
        if loaded.typical < SHARING * alone.typical:
            node = Sample(*(smallest * rate for rate in loaded[:3]), loaded.samples)
            return LinkFigures(latency, alone, node)
    return LinkFigures(latency, loaded)
