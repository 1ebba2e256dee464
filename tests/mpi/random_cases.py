"""Random problems and ways to run them: a function of a seed, an index and the number of ranks."""

import random
from typing import NamedTuple

import divisions
from drawn_masks import DRAW
from runs import tiles

from mpiattn import Layout, masks
from mpiattn.backends.cpu import library
from mpiattn.errors import ArgumentError
from mpiattn.plan.grids import check_grids
from mpiattn.schedule.regroup import every_tile

WINDOWS = [(3, 0), (5, 4), (None, 2), (20, None), (0, 0), (60, 60)]
COMPILED = "numpy" if library.missing() else "cpu"


class Case(NamedTuple):
    """One random run; `plan` and `call` are arguments of MeshAttention and of its calls."""

    members: list  # ranks of the launch, in the order of the sub-communicator
    plan: dict
    call: dict
    backends: tuple
    costs: tuple  # of greedy's, None for the plan's own
    sinks: bool
    dlse: bool
    spread: float
    seed: int


def cut(rng, tokens, ranks):
    """A random uneven cut, in which chunks may be empty."""
    points = sorted(rng.randint(0, tokens) for _ in range(ranks - 1))
    return tuple(stop - start for start, stop in zip([0, *points], [*points, tokens]))


def documents(rng, tokens, count):
    """Where documents begin and end; some are empty, and padding may come last."""
    end = tokens if rng.random() < 0.7 else rng.randint(0, tokens)
    return sorted([0, end, *(rng.randint(0, end) for _ in range(count - 1))])


def draw_call(rng, batch, seqlen, seqlen_k, causal):
    """Documents or padding of one call, or neither, and what documents see."""
    kind, count = rng.choice(["none", "none", "packed", "of each", "padding"]), rng.randint(1, 4)
    sides = {"": seqlen, "_k": seqlen_k} if seqlen != seqlen_k or rng.random() < 0.3 else {"": seqlen}
    call, shape = {}, {"packed": (count,), "of each": (batch, count)}.get(kind, (batch,))
    if kind == "packed":
        call = {f"cu_seqlens{side}": documents(rng, tokens, count) for side, tokens in sides.items()}
    if kind == "of each":
        call = {
            f"cu_seqlens{side}": [documents(rng, tokens, count) for _ in range(batch)] for side, tokens in sides.items()
        }
    if call:
        call["padding"] = True
    if kind == "padding":
        call = {f"lengths{side}": [rng.randint(0, tokens) for _ in range(batch)] for side, tokens in sides.items()}
    if kind == "packed" and rng.random() < 0.3:  # what they see then differs by entry
        shape = (batch, count)

    def of_documents(draw, *shape):
        return [of_documents(draw, *shape[1:]) for _ in range(shape[0])] if shape else draw()

    if rng.random() < 0.25:
        call["causal_documents"] = of_documents(lambda: rng.random() < 0.5, *shape)
    if (causal or "causal_documents" in call) and rng.random() < 0.25:
        call["prefixes"] = of_documents(lambda: rng.choice([0, 1, 3, rng.randint(0, seqlen_k), 1000]), *shape)
    return call


def draw_mask(rng):
    """A mask of several intervals, and for how many queries and keys."""
    mask, seqlen, seqlen_k = DRAW[rng.choice(list(DRAW))](rng)
    if rng.random() < 0.2:
        mask = mask | masks.global_tokens(rng.randint(0, 5))
    if rng.random() < 0.2:
        mask = mask & masks.window(rng.randint(0, 20), rng.choice([None, rng.randint(0, 20)]))
    return mask, seqlen, seqlen_k


def of_the_grid(mask, layout):
    """The layout, as plain ranges if it is a grid that a plan refuses, as it is not the grid of the mask."""
    try:
        check_grids(None, mask, layout)
    except ArgumentError:
        return Layout.of_ranges([layout.ranges(rank) for rank in range(layout.chunks)])
    return layout


def draw_case(seed, index, size):
    """The case of that index in a launch of `size` ranks."""
    rng = random.Random(f"{seed} {index} {size}")
    ranks = size if rng.random() < 0.7 else rng.randint(1, size)
    kv_heads, batch = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3, 4])
    seqlen = rng.choice([0, 1, 3, 5, 17, 31, 40, 64, 97, 150])
    seqlen_k = seqlen if rng.random() < 0.6 else rng.choice([0, 1, 7, 50, 64, 128])
    several = rng.random() < 0.4
    mask, seqlen, seqlen_k = draw_mask(rng) if several else (None, seqlen, seqlen_k)
    layout = rng.choice(["contiguous", "striped", "zigzag", "uneven", "any", "any"])
    if layout == "any":
        layout = tuple(of_the_grid(mask, divisions.either(rng, n, ranks)) for n in (seqlen, seqlen_k))
        layout = layout[:1] * 2 if seqlen == seqlen_k and rng.random() < 0.5 else layout
    elif layout == "uneven":
        layout = tuple(Layout("contiguous", n, ranks, cut(rng, n, ranks)) for n in (seqlen, seqlen_k))
    dtype, route = rng.choice(["float16", "bfloat16", "float32", "float64"]), rng.choice(["direct", "direct", "ring"])
    wire = rng.choice([None, None, "float16", "bfloat16", "float32"]) if route == "direct" else None
    spread = 1 if {dtype, wire} & {"float16", "bfloat16"} else rng.choice([1, 1, 1, 5])  # naive ones are lost there
    plan = {
        "batch": batch,
        "seqlen": seqlen,
        "seqlen_k": seqlen_k,
        "heads": kv_heads * rng.choice([1, 1, 2, 4]),
        "kv_heads": kv_heads,
        "head_dim": rng.choice([1, 4, 8, 13, 32]),
        "value_dim": rng.choice([1, 4, 8, 13, 32]),
        "dtype": dtype,
        "causal": rng.random() < (0.2 if several else 0.5),
        "softcap": rng.choice([None, None, 2.0, 50.0]),
        "window": rng.choice([None] * 2 + [None] * 9 * several + WINDOWS),
        "scale": rng.choice([None, None, 0.5, 2.0]),
        "tile": rng.choice(tiles(ranks)),
        "layout": layout,
        "mesh_layout": rng.choice(["auto", "auto", "contiguous", "striped", "zigzag"]),
        "schedule": rng.choice(["greedy", "greedy", "collective"]),
        "route": route,
        "wire_dtype": wire,
        "max_message": rng.choice([2**30, 2**30, 1000, 64]),
        "prefix": rng.choice([0, 0, 0, 1, 4, 30]) * (not several or rng.random() < 0.2),
        "causal_block": rng.choice([None, None, None, 1, 3, 8, 50]) if not several or rng.random() < 0.2 else None,
        "mask": mask,
    }
    if rng.random() < 0.2:
        plan |= {"shared_kv": True, "value_dim": min(plan["value_dim"], plan["head_dim"])}
        plan["scale"] = plan["scale"] or 0.25  # which has no default there
    if rng.random() < 0.4:
        plan["tile"] = rng.choice(every_tile(ranks, plan["heads"], plan["kv_heads"], batch))
    if rng.random() < 0.3:  # pieces have neither of the three
        plan |= {"tile": rng.choice(["bands", "dealt"]), "mesh_layout": "auto", "schedule": "auto", "route": "direct"}
    causal = plan["causal"] or plan["prefix"] > 0 or plan["causal_block"] is not None
    members, call = rng.sample(range(size), ranks), draw_call(rng, batch, seqlen, seqlen_k, causal)
    if (
        several
        and plan["window"] is not None
        and mask.places(seqlen_k) is not None
        and any("_k" in name for name in call)
    ):
        call = {}  # refused where the documents' queries and keys end at different positions
    return Case(
        members,
        plan,
        call,
        rng.choice([("numpy",), ("deferred",), ("numpy", "deferred"), (COMPILED,)]),
        tuple(rng.choice([0.1, 0.5, 1, 1.7, 3, 50]) for _ in range(4)) if rng.random() < 0.5 else None,
        sinks=rng.random() < 0.3,
        dlse=rng.random() < 0.5,
        spread=spread,
        seed=rng.randrange(2**30),
    )
