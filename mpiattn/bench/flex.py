"""Measure a neighbourhood on a grid against PyTorch's compiled flex_attention with the same mask, on the same threads.

  python -m mpiattn.bench.flex
  python -m mpiattn.bench.flex --grid 256x512 --kernel 15x15 --heads 1 --threads 2 --json flex.json

One rank. Both compute forward with the same number of threads. flex_attention gets the same mask as a function of the
points' coordinates, and the blocks of it that hold pairs, which are made before. Both are warmed up, checked against
each other, and then measured in turn: mpiattn, torch, mpiattn, torch, ... Needs the extra `bench` and a C++ compiler.
"""

import sys
import time
from functools import partial
from math import prod

import numpy as np

from ..comm.agreement import agreement
from ..console import options
from ..console.table import duration, facts, table
from ..errors import ArgumentError, MpiattnError, VerificationError
from ..plan.mesh_attention import MeshAttention
from ..system import host
from ..system.words import number
from ..version import __version__
from . import environment, neighborhood, standalone
from .baseline import TOLERANCE, from_torch, load_torch, to_torch
from .sdpa import asleep
from .turns import difference, in_turn, slowest, summary

BLOCK = 128  # queries and keys of a block of flex_attention's, as it has them by default


def _arguments():
    parser = standalone.parser_of(
        "flex",
        __doc__,
        ("heads", 1, "heads"),
        ("head-dim", 64, "elements per head"),
        ("runs", 7, "measured runs of each"),
    )
    options.add(parser, "grid")
    neighborhood.add(parser)
    parser.set_defaults(grid=(64, 128), kernel=(15, 15))
    options.add_dtype(parser)
    parser.add_argument("--threads", type=int, help="threads of either (default: the cores of this process)")
    options.add(parser, "json")
    return parser


def blocks_of(mask, tokens, block=BLOCK):
    """Pairs that a mask shows in each block of queries and keys: int64 (blocks, blocks)."""
    starts, pairs = np.arange(0, tokens, block), []
    for start in starts:
        begin, end = mask.intervals(np.arange(start, min(start + block, tokens)), tokens, tokens)
        more, fewer = (np.bincount(side[begin < end], minlength=tokens + 1) for side in (begin, end))
        pairs.append(np.add.reduceat(np.cumsum(more - fewer)[:-1], starts))  # of the queries that see each key
    return np.array(pairs)


class _Flex:
    """The baseline.  arrays: q, k, v, NumPy, (tokens, heads, dim)."""

    def __init__(self, threads, arrays, args, mask, cyclic):
        self.torch = torch = load_torch()
        if torch is None:
            raise MpiattnError("torch is not installed; the `bench` extra has it: pip install 'mpiattn[bench]'")
        torch.set_num_threads(threads)
        self.inputs = [to_torch(torch, array, "cpu") for array in arrays]
        self.mask = block_mask(torch, args.grid, args.kernel, cyclic, mask)
        from torch.nn.attention.flex_attention import flex_attention

        self.compiled = torch.compile(flex_attention, dynamic=False)
        try:
            self._run()
        except Exception as error:  # of many kinds, with many lines
            text = next(iter(str(error).split("\n")), "")
            raise MpiattnError(f"torch cannot compile flex_attention here: {type(error).__name__}: {text}") from error

    def _run(self):
        with self.torch.inference_mode():
            return self.compiled(*self.inputs, block_mask=self.mask)

    def seconds(self):
        """Those of one pass."""
        start = time.perf_counter()
        self._run()
        return time.perf_counter() - start

    def results(self):
        """That of one pass, (tokens, heads, dim)."""
        return [from_torch(self.torch, self._run())]


def block_mask(torch, grid, kernel, cyclic, mask):
    """flex_attention's mask: a function of coordinates, and the blocks in which it shows some pairs or all.

    As its `create_block_mask` makes it, which would take memory for a number for each pair of tokens.
    """
    from torch.nn.attention.flex_attention import BlockMask

    columns, tokens = grid[1], prod(grid)

    def near(query, key, axis):
        """Whether a coordinate is in the window of another along an axis."""
        apart = key - query + kernel[axis] // 2
        if cyclic[axis]:
            apart = torch.remainder(apart, grid[axis])
        return (apart >= 0) & (apart < kernel[axis])

    def sees(batch, head, query, key):
        return near(query // columns, key // columns, 0) & near(query % columns, key % columns, 1)

    pairs = blocks_of(mask, tokens)
    whole = pairs == BLOCK**2

    def listed(some):
        order = np.argsort(~some, axis=1, kind="stable")
        return (torch.from_numpy(array[None, None].astype(np.int32)) for array in (some.sum(axis=1), order))

    return BlockMask.from_kv_blocks(
        *listed((pairs > 0) & ~whole), *listed(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(tokens, tokens)
    )


def _measure(job, args):
    """Yield the results as data and text."""
    peers = job.peers
    threads = len(host.cores()) if args.threads is None else args.threads
    with agreement(peers):
        for name, value in (("heads", args.heads), ("head_dim", args.head_dim), ("runs", args.runs)):
            options.check_least(name, value, 1)
        options.check_least("threads", threads, 1)
        if job.comm.size > 1:
            raise ArgumentError(f"there are {job.comm.size} ranks; this program measures one, of several --threads")
        mask, cyclic = neighborhood.of(args)
        tokens = prod(args.grid)
        random = np.random.default_rng(0)
        arrays = random.standard_normal((3, tokens, args.heads, args.head_dim), np.float32).astype(args.dtype)
        torch = _Flex(threads, arrays, args, mask, cyclic)
    shape = options.given(args, "heads", "head-dim", "dtype")
    with MeshAttention(job.comm, seqlen=tokens, mask=mask, backend=f"cpu:{threads}", **shape) as plan:
        inputs = [array[None] for array in arrays]
        out, lse = plan.forward(*inputs)
        apart = difference([out[0]], [result.astype(np.float64) for result in torch.results()])
        if not apart <= TOLERANCE[args.dtype]:
            raise VerificationError(f"the plan and flex_attention differ by {apart:.2g} of the largest value")
        works = {
            "mpiattn": partial(slowest, peers, lambda: plan.forward(*inputs, out=out, lse=lse, check=False)),
            "torch": lambda: asleep(peers, torch.seconds),
        }
        seconds, flops = in_turn(works, args.runs), plan.problem.flops
    medians = {name: float(np.median(took)) for name, took in seconds.items()}
    data = {
        **options.given(args, "grid", "kernel"), "mask": str(mask), **shape, "flops": flops, "runs": args.runs,
        "threads": threads, "difference": apart, "machine": environment.machine(cores=len(host.cores())),
        "versions": {"mpiattn": __version__, "torch": host.version("torch"), **environment.versions()},
        "results": [
            summary(name, took, gflops_per_second=flops / median / 1e9, torch_over_it=medians["torch"] / median)
            for (name, took), median in zip(seconds.items(), medians.values())
        ],
    }  # fmt: skip
    yield data, _text(data)


def _text(data):
    machine, versions = data["machine"], data["versions"]
    head = [
        (
            "problem",
            f"{data['mask']}, {data['heads']} heads x {data['head_dim']}, {data['dtype']}, forward: "
            f"{data['flops'] / 1e9:.4g} Gflop by pairs that are seen",
        ),
        ("machine", f"{machine['processor']}, {machine['cores']} cores in use; {number(data['threads'], 'thread')}"),
        ("versions", f"mpiattn {versions['mpiattn']}, torch {versions['torch']}"),
        ("difference", f"{data['difference']:.2g} of the largest value; {TOLERANCE[data['dtype']]:g} is allowed"),
        ("measured", f"{data['runs']} runs of each, in turn"),
    ]
    names = {"mpiattn": "mpiattn, one rank", "torch": "torch, compiled flex_attention"}
    rows = [
        (
            names[row["name"]], duration(row["median"]), " - ".join(map(duration, row["quartiles"])),
            f"{row['gflops_per_second']:.3g}", f"{row['torch_over_it']:.2f}",
        )
        for row in data["results"]
    ]  # fmt: skip
    return f"{facts(head)}\n\n{table(rows, ('', 'median', 'quartiles', 'GFLOP/s', 'torch over it'))}"


def main():
    """Returns the exit code."""
    return standalone.run(_arguments().parse_args(), _measure)


if __name__ == "__main__":
    sys.exit(main())
