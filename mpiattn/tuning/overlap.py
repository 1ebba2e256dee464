"""Measures overlap: the share of a transfer that proceeds while the rank computes, polled as the executor polls."""

from typing import NamedTuple

import numpy as np

from .blocks import Blocks
from .links import exists, partners, swapping
from .samples import Sample, take_turns
from .wire import Wire

TARGET, SHORTEST = 0.03, 5e-3  # duration of the block and of the transfer: share of all seconds; seconds at least
MOST_BYTES, LEAST_BYTES = 32 * 2**20, 2**16
LEAST_TOKENS = 64


class BlockSpeed(NamedTuple):
    """How fast blocks are: flops, operations per second of blocks of these."""

    dtype: str
    head_dim: int
    flops: float


def measure(peers, nodes, backend, between, bandwidth, speed, seconds, progress):
    """The share of transfers that blocks hide; None where there are no such links; collective.

    bandwidth: bytes per second of such links.  speed: of blocks.  From both follows a block that takes about as long as
    the transfer; a longer one would hide more than the share to be measured.
    """
    if not exists(nodes, between):
        progress(seconds)
        return None
    nbytes = int(np.clip(max(TARGET * seconds, SHORTEST) * bandwidth, LEAST_BYTES, MOST_BYTES))
    tokens = max(LEAST_TOKENS, int((nbytes / bandwidth * speed.flops / (4 * speed.head_dim)) ** 0.5))
    wire, block = Wire(peers, backend, nbytes), Blocks(backend, tokens, *speed[:2], "forward", heads=1)

    def both(turn):
        ends = partners(nodes, peers.rank, between, turn)
        if ends is None:
            return np.nan
        dest, source = ends
        posted = wire.receive(source) + wire.send(dest)
        event = block.launch(lambda share: wire.exchange.due() and wire.exchange.complete(posted))
        wire.complete(posted)
        backend.wait(event)
        return None

    took = take_turns(peers, [swapping(wire, nodes, between), block.run, both], seconds, progress)
    return Sample.of(hidden(took))


def hidden(took):
    """The hidden share, in [0, 1].  took (..., 3): seconds of the transfer, of the block, and of both at once."""
    transfer, block, together = np.moveaxis(took, -1, 0)
    return np.clip((transfer + block - together) / np.minimum(transfer, block), 0, 1)
