"""Measures blocks: their fixed overhead and the speed of their work by dtype, with all ranks computing at once."""

from typing import NamedTuple

import numpy as np

from ..engine.passes import Backward, Forward
from ..model.machine import PRODUCTS
from ..problem.problem import Problem
from ..schedule.kinds import REDUCED
from .samples import Sample, take_turns

HEADS = 2
SMALLEST, LEAST = 128, 16  # tokens of the smallest timed block; on slow machines fewer, at least LEAST
LARGEST = 2**14  # tokens of the largest timed block, at most
MERGED = 2**13  # tokens of a merged partial: megabytes, like the partials of chunks
LONG = 2e-3  # share of the seconds for all blocks that the largest block takes, about
PASSES = {"forward": Forward, "backward": Backward}


class BlockFigures(NamedTuple):
    """launch: seconds.  flops: operations per second forward, by dtype.  backward: speed relative to forward."""

    launch: Sample
    flops: dict
    backward: Sample


class Blocks:
    """Inputs and results of a block of one size, dtype and direction; `run` computes it, without a mask."""

    def __init__(self, backend, tokens, dtype, head_dim, direction, heads=HEADS):
        problem = Problem(seqlen=tokens, heads=heads, head_dim=head_dim, dtype=dtype)
        self.backend, self.work = backend, PASSES[direction](problem, backend)
        self.flops = PRODUCTS[direction] * problem.flops
        shapes, rng = self.work.shapes(), np.random.default_rng(tokens)

        def draw(token, dtype):
            return backend.contiguous(rng.standard_normal((tokens, *token), np.float32).astype(dtype))

        self.q, self.kv = [draw(*shape) for shape in shapes["Q"]], [draw(*shape) for shape in shapes["KV"]]
        if direction == "backward":  # the lse determines the weights: set it to about that of such rows
            _, dout, lse, delta = self.q
            backend.wait(backend.delta(delta, dout, dout, None))
            backend.wait(backend.copy(lse, backend.contiguous(np.full(lse.shape, np.log(tokens) + 0.5, lse.dtype))))
        self.reduced = {
            kind: [backend.empty((tokens, *token), dtype) for token, dtype in shapes[kind]]
            for kind in REDUCED[direction]
        }
        for kind, arrays in self.reduced.items():
            backend.wait(self.work.clear(kind, arrays))
        self.fields = {"begin": np.zeros((1, tokens), np.int32), "end": np.full((1, tokens), tokens, np.int32)}

    def launch(self, meanwhile=None):
        """Launch the block; returns the event.  meanwhile: as of `mpiattn.backends.base`."""
        return self.work.launch(self.q, self.kv, self.fields, self.reduced, (), meanwhile)

    def run(self, turn=0):
        """Compute the block."""
        self.backend.wait(self.launch())


def sizes(peers, backend, dtype, head_dim, seconds):
    """Tokens of the three blocks to be timed; the largest takes the share LONG of `seconds`; collective."""

    def is_long(tokens):
        block = Blocks(backend, tokens, dtype, head_dim, "forward")
        return np.max(take_turns(peers, [block.run], 0).min(axis=1)) >= LONG * seconds

    smallest = SMALLEST
    while smallest > LEAST and is_long(smallest):
        smallest //= 2
    doublings = 2
    while smallest << doublings < LARGEST and not is_long(smallest << doublings):
        doublings += 1
    return smallest, smallest << doublings // 2, smallest << doublings


def fit(flops, seconds, launch=None):
    """Fit launch + flops / rate to `seconds` by least squares of the relative errors; returns (launch, rate).

    flops, seconds: arrays over blocks.  launch: seconds, if known; a fitted launch is at least 0.
    """
    of_flops, of_launch = np.asarray(flops, float) / seconds, 1 / np.asarray(seconds, float)
    if launch is None:
        scale = of_flops.max() / of_launch.max()  # columns of the same magnitude
        (launch, slope), *_ = np.linalg.lstsq(
            np.stack([of_launch * scale, of_flops], axis=1), np.ones(len(of_flops)), rcond=None
        )
        launch = max(0.0, float(launch * scale))
    slope = of_flops @ (1 - launch * of_launch)
    if slope <= 0:  # noise: every block took less than a launch
        slope = of_flops.sum()
    return launch, float(of_flops @ of_flops / slope)


def measure(peers, backend, dtypes, head_dim, seconds, progress):
    """Measure blocks of every dtype, forward and backward; returns BlockFigures; collective."""
    chosen = sizes(peers, backend, dtypes[0], head_dim, seconds)
    blocks = {
        (dtype, direction): [Blocks(backend, tokens, dtype, head_dim, direction) for tokens in chosen]
        for dtype in dtypes
        for direction in PASSES
    }
    took = take_turns(peers, [block.run for some in blocks.values() for block in some], seconds, progress)
    times = dict(zip(blocks, np.split(took, len(blocks), axis=-1)))
    flops = {kind: [block.flops for block in some] for kind, some in blocks.items()}

    def quartiles(kind):
        """Low, typical and high seconds of each size."""
        return np.percentile(times[kind].reshape(-1, len(flops[kind])), (25, 50, 75), axis=0)

    launches = np.array(
        [[fit(flops[kind], by_size)[0] for by_size in quartiles(kind)] for kind in blocks if kind[1] == "forward"]
    )
    launch, count = float(np.median(launches[:, 1])), took[..., 0].size
    rates = {kind: np.array([fit(flops[kind], by_size, launch)[1] for by_size in quartiles(kind)]) for kind in blocks}
    backward = np.median([rates[dtype, "backward"] / rates[dtype, "forward"][1] for dtype in dtypes], axis=0)

    def about(typical, values):
        """The Sample of a figure that was fitted to the median and to the quartiles of the times."""
        return Sample(float(typical), float(np.min(values)), float(np.max(values)), count)

    return BlockFigures(
        about(launch, np.median(launches, axis=0).tolist() + [launch]),
        {dtype: about(rates[dtype, "forward"][1], rates[dtype, "forward"]) for dtype in dtypes},
        about(backward[1], backward),
    )


def merging(peers, backend, head_dim, seconds, progress):
    """Bytes of partials per second that a rank merges into its own; collective."""
    rng = np.random.default_rng(0)
    shapes = (MERGED, HEADS, head_dim), (MERGED, HEADS)
    partials = [[backend.contiguous(rng.standard_normal(shape, np.float32)) for shape in shapes] for _ in range(2)]

    def merge(turn):
        backend.wait(backend.merge(*partials[0], *partials[1]))

    took = take_turns(peers, [merge], seconds, progress)
    return Sample.of(sum(array.nbytes for array in partials[0]) / took)
