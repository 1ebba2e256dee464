"""Whole arrays and whole biases to ranks and back: any layout, axis, root, dtype and memory of both sides."""

import random
from itertools import product

import divisions
import draws
import numpy as np
import pytest
from dense import bits
from memories import KINDS, Memory
from runs import agreed
from test_agreement import same_error

from mpiattn import Layout, MeshAttention
from mpiattn.comm import rounds, whole_arrays
from mpiattn.problem.problem import dtype_name
from mpiattn.schedule.regroup import every_tile

TOKENS = 60
CASES = 30  # that a test draws
DTYPES = ["float32", ">f4", "bfloat16", "int8", ">i2", ">c16", "bool", "U3", ">U3", "M8[s]"]


def interleaved(comm):
    """Of every rank many ranges, of one token or a few."""
    parts, start = [[] for _ in range(comm.size)], 0
    for number in range(TOKENS):
        stop = min(TOKENS, start + 1 + number % 3)
        parts[number % comm.size].append((start, stop))
        start = stop
    return Layout.of_ranges(parts)


def rows_of_a_grid(comm):
    """Blocks that are cut along the last axis: several ranges each."""
    return Layout.grid((5, 12), (1, comm.size))


def uneven(comm):
    """The last rank has nearly all tokens."""
    return Layout("contiguous", TOKENS, comm.size, (1,) * (comm.size - 1) + (TOKENS - comm.size + 1,))


def drawn(comm):
    """Any division of the tokens."""
    return divisions.either(random.Random(f"{draws.seed()} {comm.size}"), TOKENS, comm.size)


LAYOUTS = "contiguous", "striped", "zigzag", interleaved, rows_of_a_grid, uneven, drawn


def numbers(shape, dtype):
    """Different elements, as far as the dtype has them."""
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 250
    if np.dtype(dtype).kind == "b":
        return array % 3 == 0
    return array.astype(dtype)


def kinds(rng):
    """Two kinds of memory, of one side and of the other."""
    return rng.choice(list(KINDS.values())), rng.choice(list(KINDS.values()))


@pytest.mark.draw(5)
@pytest.mark.many
@pytest.mark.parametrize("layout, run_bytes", list(product(LAYOUTS, [1, 2**20])))
def test_scatter_and_gather(comm, monkeypatch, layout, run_bytes):
    """Whether a message has the tokens of a place before the axis, or of all; in one round or in several."""
    monkeypatch.setattr(whole_arrays, "RUN_BYTES", run_bytes)
    layout, rng = layout(comm) if callable(layout) else layout, random.Random(draws.seed())
    with MeshAttention(comm, seqlen=TOKENS, heads=1, head_dim=1, layout=layout) as plan:
        at = plan.positions
        every = product((0, 1, 2, -1), [(), (3,), (2, 3), (2, 1, 4)], DTYPES)
        for axis, others, dtype in rng.sample([case for case in every if case[0] <= len(case[1])], CASES):
            shape = [*others, TOKENS] if axis == -1 else [*others[:axis], TOKENS, *others[axis:]]
            whole = numbers(shape, dtype_name(dtype) if dtype == "bfloat16" else dtype)
            root = rng.choice([None, 0, comm.size - 1])
            monkeypatch.setattr(rounds, "PIECE_BYTES", rng.choice([200, 4 * 2**20]))
            of_whole, of_chunk = kinds(rng)
            about = f"axis {axis} of {shape}, {dtype}, root {root}, {of_whole}, {of_chunk}"
            right = np.take(whole, at, axis).astype(rounds.native(whole.dtype))
            given = Memory.of(of_whole, whole)
            chunk = plan.scatter(given.array if root in (None, comm.rank) else None, root=root, axis=axis)
            same = chunk.dtype == right.dtype and bits(chunk) == bits(right)
            agreed(comm, None if same and given.intact else "scatter", about)
            given = Memory.of(of_chunk, np.take(whole, at, axis) if comm.rank % 2 else right)
            back = plan.gather(given.array, root=root, axis=axis)
            if root in (None, comm.rank):
                same = back.dtype == right.dtype and np.array_equal(back, whole)
            else:
                same = back is None
            agreed(comm, None if same and given.intact else "gather", about)


@pytest.mark.draw(3)
@pytest.mark.many
@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases(comm, monkeypatch, layout):
    layout, rng = layout(comm) if callable(layout) else layout, random.Random(draws.seed())
    tile = rng.choice(every_tile(comm.size, 4, 4, 2))
    shape = {"seqlen": TOKENS, "heads": 4, "head_dim": 1, "batch": 2, "layout": layout, "tile": tile}
    with MeshAttention(comm, **shape) as plan:
        rows, columns = plan.bias_positions
        for leading, dtype in rng.sample(list(product([(1, 1), (2, 4), (1, 4), (2, 1)], DTYPES)), CASES // 2):
            whole = numbers((*leading, TOKENS, TOKENS), dtype_name(dtype) if dtype == "bfloat16" else dtype)
            root = rng.choice([None, 0, comm.size - 1])
            monkeypatch.setattr(rounds, "PIECE_BYTES", rng.choice([2000, 4 * 2**20]))
            of_whole, of_tile = kinds(rng)
            about = f"{leading}, {dtype}, root {root}, {of_whole}, {of_tile}"
            own = whole[plan.bias_sequences if leading[0] > 1 else slice(None)]
            own = own[:, plan.bias_heads if leading[1] > 1 else slice(None)][:, :, rows[:, None], columns]
            right = own.astype(rounds.native(own.dtype))
            given = Memory.of(of_whole, whole)
            tile = plan.scatter_bias(given.array if root in (None, comm.rank) else None, root=root)
            same = tile.dtype == right.dtype and bits(tile) == bits(right)
            agreed(comm, None if same and given.intact else "scatter_bias", about)
            given = Memory.of(of_tile, own if comm.rank % 2 else right)
            shared = [name for name, length in zip(("batch", "heads"), leading) if length == 1]
            back = plan.gather_bias(given.array, root=root or 0, bias_shared=shared)
            if comm.rank == (root or 0):
                same = back.dtype == right.dtype and np.array_equal(back, whole)
            else:
                same = back is None
            agreed(comm, None if same and given.intact else "gather_bias", about)


def test_what_is_no_array_of_numbers(comm):
    """The same error on every rank, wherever it is, and the plan goes on."""
    with MeshAttention(comm, seqlen=TOKENS, heads=1, head_dim=1, tile=(1, comm.size)) as plan:
        rows, columns = plan.bias_positions
        shapes = {"array": (1, TOKENS), "chunk": (1, len(plan.positions))}
        shapes |= {"bias": (1, 1, TOKENS, TOKENS), "tile": (1, 1, len(rows), len(columns))}
        calls = {"array": plan.scatter, "chunk": plan.gather, "bias": plan.scatter_bias, "tile": plan.gather_bias}
        for name, call in calls.items():
            good = np.zeros(shapes[name])
            wrong = {
                "dtype object": good.astype(object),
                "it must be of numbers": np.zeros(good.shape, [("a", "i4"), ("b", "f8")]),
                "is a MaskedArray; .* its mask would be lost": np.ma.masked_array(good),
                "is a list": good.tolist(),
            }
            guilty = comm.size - 1 if name in ("chunk", "tile") else 0
            for text, bad in wrong.items():
                given = bad if comm.rank == guilty else good
                said = same_error(comm, lambda call=call, given=given: call(given))
                assert said.startswith(f"{name} ")
                assert all(part in said for part in text.split(" .* ")), said
            call(good)
