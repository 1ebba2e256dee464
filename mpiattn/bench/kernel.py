"""Measures single launches of a back end: no ranks, no mesh, no transfers.

Each result is first compared with dense float64 attention at a size where that is affordable, and with PyTorch's at
full size; a wrong result ends the benchmark.  Then mpiattn's and PyTorch's launches are measured in turn.
"""

import time
from dataclasses import replace
from functools import partial

import numpy as np

from ..backends.block import BackwardInputs, BlockInputs, Gradients
from ..errors import VerificationError
from ..model.machine import PRODUCTS
from ..verify import reference
from .baseline import TOLERANCE, baselines
from .clock import host_array
from .tensors import NAMES, Tensors
from .turns import difference, in_turn, repeats, summary

CHECKED_PAIRS = 2**21  # pairs of a query and a key, summed over heads, in the comparison with float64
PAGE = 64  # keys of a page
TORCH_FACTOR = 10  # torch may differ by so many times what mpiattn may: it adds up many keys less exactly
QUERIES = 8  # query heads per KV head of a decoded token
TINY = 16  # tokens of a block so small that its time is that of the launch


class Block:
    """A block on a back end.  arrays: its inputs q, k, v, dout as NumPy arrays (tokens, heads, dim)."""

    def __init__(self, backend, problem):
        self.backend, self.problem, p = backend, problem, problem
        tensors = Tensors(p)
        self.arrays = [tensors.tokens(name, np.arange(p.seqlen_k if name in "kv" else p.seqlen))[0] for name in NAMES]
        self.q, self.k, self.v, self.dout = map(backend.contiguous, self.arrays)
        interval = p.whole_mask.key_interval(np.arange(p.seqlen))
        self.pairs = int((interval[1] - interval[0]).sum()) * p.heads
        interval = tuple(backend.contiguous(side.astype(np.int32)) for side in interval)
        self.inputs = BlockInputs.of(p, self.q, (self.k, self.v), *interval)
        self.out, self.lse = self.partial()
        self.grads = ()

    def partial(self):
        """A new partial result, uninitialised."""
        p, make = self.problem, self.backend.empty
        return (make((p.seqlen, p.heads, p.value_dim), p.partial_dtype), make((p.seqlen, p.heads), p.partial_dtype))

    def clear(self):
        """Launch the reset of the partial result."""
        return self.backend.clear(self.out, self.lse)

    def attend(self):
        """Launch the block, which adds to the partial result."""
        return self.backend.attend(self.inputs, self.out, self.lse)

    def prepare_backward(self):
        """Compute the forward pass and delta, for `attend_backward`."""
        p, backend = self.problem, self.backend
        self.clear()
        backend.wait(self.attend())
        self.delta = backend.empty((p.seqlen, p.heads), p.partial_dtype)
        cast = backend.empty(self.out.shape, p.dtype)
        backend.copy(cast, self.out)
        backend.delta(self.delta, self.dout, cast, None)
        self.grads = [backend.empty(array.shape, p.partial_dtype) for array in (self.q, self.k, self.v)]
        backend.wait(backend.zero(self.grads))

    def attend_backward(self):
        """Launch the block's gradients, which add to `grads`."""
        given, grads = BackwardInputs(self.dout, self.lse, self.delta), Gradients(*self.grads)
        return self.backend.attend_backward(self.inputs, given, grads)

    def results(self, backward):
        """The out, or dq, dk, dv, of one launch, as NumPy arrays."""
        if backward:
            self.prepare_backward()
            event = self.attend_backward()
            return [host_array(self.backend, grad, event) for grad in self.grads]
        self.clear()
        event = self.attend()
        return [host_array(self.backend, self.out, event)]


def check(comparison, got, expected, allowed):
    """The difference; VerificationError where it exceeds what is allowed.  comparison: its name in the error."""
    off = difference(got, expected)
    if not off <= allowed:
        raise VerificationError(
            f"{comparison}: off by {off:.2g} of the largest value, {allowed:g} is allowed; nothing is measured"
        )
    return off


def check_small(backend, problem, backward):
    """Compare a block of few tokens with float64; returns the difference."""
    p, tokens = problem, max(1, min(problem.seqlen, int((CHECKED_PAIRS / problem.heads) ** 0.5)))
    small = Block(backend, replace(p, seqlen=tokens, seqlen_k=tokens))
    q, k, v, dout = (array[None] for array in small.arrays)
    expected = (
        reference.backward(dout, q, k, v, causal=p.causal)
        if backward
        else reference.attention(q, k, v, causal=p.causal)[:1]
    )
    results = small.results(backward), [array[0] for array in expected]
    return check(f"{tokens} tokens against float64", *results, TOLERANCE[p.dtype])


def timed_by(clock, launch, before=None):
    """A function that times a launch, with enough repeats."""
    timed = partial(clock.seconds, launch, before)
    return partial(timed, repeats(timed))


def with_torch(block, own, backward, on_gpu):
    """Torch's works over the arrays of a `Block`; their differences from `own` results; why others are missing."""
    possible, missing = baselines(block.arrays, block.problem.causal, backward, on_gpu)
    allowed = TORCH_FACTOR * TOLERANCE[block.problem.dtype]
    differences = {
        name: check(f"mpiattn against {name}", own, results, allowed) for name, (_, results) in possible.items()
    }
    works = {name: partial(sdpa.seconds, repeats(sdpa.seconds)) for name, (sdpa, _) in possible.items()}
    return works, differences, missing


def rows(works, runs, rate="", amount=0, others=None, differences=None):
    """The results of a section: the works in turn.

    rate: the name of the speed, `amount` in a second.  others: the amount of works that do not do this amount, by name.
    differences: by name; None where there is none.
    """
    made = []
    for name, seconds in in_turn(works, runs).items():
        done = (others or {}).get(name, amount)
        more = {rate: done / float(np.median(seconds)), "difference": differences.get(name)} if rate else {}
        made.append(summary(name, seconds, **more))
    return made


def measure_block(backend, clock, problem, direction, runs):
    """Measure one pass of one size beside torch's and the BLAS's product; returns a section of the result."""
    backward = direction == "backward"
    off = check_small(backend, problem, backward)
    block = Block(backend, problem)
    own = block.results(backward)
    of_torch, differences, missing = with_torch(block, own, backward, clock.on_gpu)
    if not backward:
        block.clear()
    launch = (block.attend_backward, None) if backward else (block.attend, block.clear)
    works, others = {"mpiattn": timed_by(clock, *launch), **of_torch}, {}
    product = clock.product()
    if product:
        name, multiply, operations = product
        works[name], others[name] = timed_by(clock, multiply), operations
    flops = 2 * (problem.head_dim + problem.value_dim) * block.pairs * PRODUCTS[direction]
    results = rows(works, runs, "flops_per_second", flops, others, {"mpiattn": off, **differences})
    return {"what": direction, "seqlen": problem.seqlen, "flops": flops, "results": results, "missing": missing}


def measure_decode(backend, clock, problem, keys, runs, queries=QUERIES):
    """Measure one token over `keys` keys in pages, beside memory bandwidth; returns a section of the result.

    queries: query heads per KV head.
    """
    p = replace(problem, seqlen=1, seqlen_k=keys, heads=queries * problem.kv_heads, causal=False)
    block, count = Block(backend, p), -(-keys // PAGE)
    bounds = [np.full(1, side, np.int32) for side in (0, keys)]
    expected = [result[0] for result in reference.attention(*(array[None] for array in block.arrays[:3]))[:1]]
    nbytes, works, differences = sum(array.nbytes for array in block.arrays[1:3]), {}, {}
    for name, pages in (
        ("mpiattn", np.arange(count)),
        ("mpiattn, pages in any order", np.random.default_rng(0).permutation(count)),
    ):
        pages = pages.astype(np.int32)
        pools = [_paged(backend, array, pages) for array in block.arrays[1:3]]
        inputs = BlockInputs.of(p, block.q, pools, *bounds, pages=pages, page_size=PAGE)
        launch = partial(backend.attend_pages, inputs, block.out, block.lse)
        own = [host_array(backend, block.out, launch())]
        differences[name] = check(f"{name} over {keys} keys against float64", own, expected, TOLERANCE[p.dtype])
        works[name] = timed_by(clock, launch)
    of_torch, off, missing = with_torch(block, own, False, clock.on_gpu)
    memory, move, moved = clock.memory_bandwidth(nbytes, p.dtype)
    works |= {**of_torch, memory: timed_by(clock, move)}
    return {
        "what": "decode",
        "keys": keys,
        "heads": p.heads,
        "kv_heads": p.kv_heads,
        "page_size": PAGE,
        "bytes": nbytes,
        "results": rows(works, runs, "bytes_per_second", nbytes, {memory: moved}, differences | off),
        "missing": missing,
    }


def _paged(backend, array, pages):
    """(keys, kv_heads, dim) as a pool (kv_heads, slots, dim) of a cache, with its keys in these pages, in order."""
    paged = np.zeros((array.shape[1], len(pages) * PAGE, array.shape[2]), array.dtype)
    slots = (pages[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[: len(array)]
    paged[:, slots] = array.swapaxes(0, 1)
    pool = backend.empty(paged.shape, paged.dtype)
    backend.copy(pool, paged)
    return pool


def measure_carry(backend, clock, problem, keys, runs):
    """Measure the extra cost of adding a block of `keys` keys to a partial result; returns a section of the result."""
    block = Block(backend, replace(problem, seqlen_k=keys, causal=False))
    held, other = (block.out, block.lse), block.partial()

    def attend_onto(partial):
        block.out, block.lse = partial
        return block.attend()

    def clear():  # the same work before both
        return backend.clear(*other)

    backend.clear(*held)
    backend.wait(attend_onto(held))
    works = {
        "onto a cleared partial": timed_by(clock, lambda: attend_onto(other), clear),
        "onto a partial": timed_by(clock, lambda: attend_onto(held), clear),
    }
    cleared, onto = results = rows(works, runs)
    overhead = onto["median"] / cleared["median"] - 1
    return {"what": "carry", "seqlen": problem.seqlen, "keys": keys, "results": results, "overhead": overhead}


def measure_launch(backend, clock, problem, runs):
    """Measure the fixed cost of a step, a tiny block and a merge; returns a section of the result.

    "issuing" is the host's time until the launches return; it matters where they return before they are complete.
    """
    tiny = Block(backend, replace(problem, seqlen=TINY, seqlen_k=TINY, causal=False))
    other = [backend.contiguous(np.zeros(array.shape, array.dtype)) for array in (tiny.out, tiny.lse)]

    def merge():
        return backend.merge(tiny.out, tiny.lse, *other)

    def issued(launch, times):
        backend.wait(launch())
        start = time.perf_counter()
        for _ in range(times):
            event = launch()
        spent = time.perf_counter() - start
        backend.wait(event)
        return spent / times

    backend.wait(tiny.clear())
    works = {}
    for name, launch in (("block", tiny.attend), ("merge", merge)):
        works[name] = timed_by(clock, launch)
        works[f"{name}, issuing"] = partial(issued, launch, repeats(partial(clock.seconds, launch)))
    return {"what": "launch", "tokens": TINY, "results": rows(works, runs)}
