"""Meshes of several planes, and meshes that compute in another layout than their caller's."""

import os
import time
from itertools import pairwise, product
from unittest.mock import patch

import numpy as np
import pytest
from dense import draw
from runs import BACKENDS, check, my_chunks, narrow, on
from test_counted import count

from mpiattn import ArgumentError, Layout, MeshAttention, masks
from mpiattn.backends import wire
from mpiattn.backends.testing.deferred import DeferredBackend
from mpiattn.engine import coming
from mpiattn.problem.layout import LAYOUTS

MORE = int(os.environ.get("MPIATTN_MORE", "0"))  # the first of the cases that are looked at on more ranks
PROBLEM = {"heads": 12, "kv_heads": 4, "head_dim": 8, "causal": True}


@pytest.fixture(autouse=True)
def pieces_of_a_token(monkeypatch):
    """Chunks of these tests are short; they too are waited for in several pieces."""
    monkeypatch.setattr(coming, "LEAST", 1)


def tiles(ranks):
    """Every tile of planes."""
    sides = product(range(1, ranks + 1), repeat=3)
    return [(h, a, b) for h, a, b in sides if h * a * b == ranks]


def splits(h, kv_heads, batch=1, heads=12):
    """Whether h planes can each have some whole sequences, and some heads of these."""
    parts = [h // i for i in range(1, h + 1) if h % i == 0 and batch % i == 0]
    return any(heads % part == 0 and (kv_heads % part == 0 or part % kv_heads == 0) for part in parts)


def check_tiles_and_layouts(group, some):
    """Some cases, a slice, of every tile and layout of a group."""
    cases = [
        (tile, layout, mesh_layout, kv_heads)
        for tile, layout, mesh_layout in product(tiles(group.size), LAYOUTS, ("auto", *LAYOUTS))
        for kv_heads in (4, 1, 12)
    ]
    for number, (tile, layout, mesh_layout, kv_heads) in enumerate(cases[some]):
        batch = next((n for n in (1, 2, 4, 6)[number % 4 :] if splits(tile[0], kv_heads, n)), tile[0])
        how = {"tile": tile, "layout": layout, "mesh_layout": mesh_layout, "kv_heads": kv_heads, "batch": batch}
        how["schedule"], how["route"] = ("greedy", "collective")[number % 2], "direct"
        how |= {"seqlen": (37, 5, 64)[number % 3], "sinks": number % 3 == 1}
        in_blocks = (number + group.rank) % 3  # one end may pack what the other end takes as it lies
        with patch.object(wire, "BLOCK_BYTES", 1 if in_blocks else 2**20):
            check(group, seed=number, **{**PROBLEM, **how})


@pytest.mark.draw(1)
@on(2, 3, 4)
@pytest.mark.parametrize("first", range(18))
def test_every_tile_and_layout(group, first):
    check_tiles_and_layouts(group, slice(first, None, 18))


@pytest.mark.slow
@on(6, 8, 12, 16)
def test_some_tiles_and_layouts_of_more_ranks(group):
    step = 3 * group.size + 1
    check_tiles_and_layouts(group, slice(MORE % step, None, step))


@on(4)
def test_tokens_that_come_late(group, monkeypatch):
    """A copy from the wire takes longer than all launches: nothing may read the tokens before."""
    later = DeferredBackend._later

    def slow(self, thread, after, work, *arguments, share=1):
        def late(*arguments):
            time.sleep(0.01)
            work(*arguments)

        return later(self, thread, after, late if thread is self._copies_in else work, *arguments, share=share)

    monkeypatch.setattr(DeferredBackend, "_later", slow)
    how = {"heads": 4, "kv_heads": 4, "mesh_layout": "contiguous", "seqlen": 64, "causal": True}
    for layout in ("zigzag", "striped", "contiguous"):
        # a fused launch, and a rank that sends none of its keys
        check(group, **{**PROBLEM, **how}, tile=(1, 2, 2), layout=layout, schedule="collective", route="ring")
        # gradients of sinks, on ranks whose queries see nothing
        call = {"cu_seqlens": [32, 64], "padding": True}
        check(group, **{**PROBLEM, **how}, tile=(2, 1, 2), layout=layout, schedule="greedy", sinks=True, call=call)


@on(2, 4)
def test_progress_within_pieces(group):
    """Shares of a block that runs in pieces are shares of the whole."""
    parts = []
    arguments = {**narrow(PROBLEM), "seqlen": 64, "tile": (2, 1, group.size // 2)}
    with MeshAttention(group, backend=BACKENDS[0], **arguments) as plan:
        plan.forward(*my_chunks(plan, *draw(plan.problem)), progress=parts.append)
        assert sum(parts) == len([block for step in plan.schedule.steps for block in step.blocks])
        most = max(len(step.blocks) if step.fused else 1 for step in plan.schedule.steps)
        assert all(0 < part <= most for part in parts)


@on(4)
@pytest.mark.parametrize("tile", [(1, 2, 2), (2, 1, 2), (4, 1, 1)])
def test_from_a_grid_and_back(group, tile):
    """Blocks of many rows each: what goes from a rank to another is one message, and the bytes are the formula's."""
    cart = group.Create_cart((2, 2), reorder=True)
    grid = {**PROBLEM, "tile": tile, "layout": Layout.grid((6, 9), cart)}
    cart.Free()
    for kv_heads, batch, mesh_layout in ((4, 1, "striped"), (1, 2, "zigzag"), (12, 4, "contiguous")):
        how = {**grid, "mesh_layout": mesh_layout, "kv_heads": kv_heads, "batch": batch}
        check(group, seqlen=54, **how)
        with MeshAttention(group, seqlen=54, **narrow(how), backend=BACKENDS[0]) as plan:
            regrouping, chunks = plan._decision.regrouping, my_chunks(plan, *draw(plan.problem))
            plan.forward(*chunks)
            assert plan.sent[0] == plan.formula()
            peers = [peer for peer, _ in regrouping.messages(plan._mesh.rank, "forward")]
            assert max(map(peers.count, peers)) <= 5, "q, k, v, out and lse"


@on(2, 4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(group, dtype):
    for h, kv_heads in ((group.size, 4), (group.size, 1)):
        check(group, **{**PROBLEM, "kv_heads": kv_heads}, seqlen=41, dtype=dtype, tile=(h, 1, group.size // h))


@on(4)
def test_values_in_the_keys(group):
    for tile, kv_heads in (((2, 2, 1), 2), ((4, 1, 1), 1)):
        check(
            group, seqlen=31, heads=4, kv_heads=kv_heads, head_dim=9, value_dim=4, shared_kv=True, scale=0.5, tile=tile
        )


@on(4)
def test_documents_and_padding(group):
    for tile in ((2, 1, 2), (4, 1, 1)):
        how = {**PROBLEM, "seqlen": 40, "tile": tile, "layout": "contiguous", "mesh_layout": "zigzag"}
        check(group, call={"cu_seqlens": [0, 7, 7, 19, 40]}, **how)
        check(group, call={"lengths": [33, 12]}, batch=2, **how)
        # each plane has some of the sequences, whose padding or documents differ
        check(group, call={"lengths": [33, 12, 40, 0]}, batch=4, sinks=True, **how)
        cuts = [[0, 7, 40], [0, 20, 40], [0, 39, 40], [0, 0, 40], [3, 9, 30], [0, 40, 40]]
        check(group, call={"cu_seqlens": cuts, "padding": True}, batch=6, **how)


@on(3, 4)
def test_chunks_that_the_caller_has(group):
    """Uneven and empty chunks of the caller's; the mesh has even ones."""
    n = group.size
    sizes = tuple([20, 0, 3, 14][:n])
    layout = Layout("contiguous", sum(sizes), n, sizes)
    tile = (2, 1, 2) if n == 4 else (3, 1, 1)
    arguments = {**PROBLEM, "kv_heads": 12, "seqlen": layout.seqlen, "layout": layout}
    for mesh_layout in LAYOUTS:
        check(group, tile=tile, mesh_layout=mesh_layout, **arguments)
        check(group, tile=(1, 1, n), mesh_layout=mesh_layout, **arguments)
    for given in (layout, Layout("striped", layout.seqlen, n)):
        with MeshAttention(group, backend=BACKENDS[0], tile=tile, **narrow({**arguments, "layout": given})) as plan:
            assert plan.positions.tolist() == given.positions(group.rank).tolist()


@pytest.mark.draw(1)
@on(2, 4)
@pytest.mark.parametrize("first", range(5))
def test_bytes_are_those_of_the_formula(group, first):
    cases = list(product(tiles(group.size), LAYOUTS, ("auto", *LAYOUTS)))
    for number, (tile, layout, mesh_layout) in enumerate(cases[first::5]):
        batch = (1, 4, 2)[number % 3]
        if not splits(tile[0], 4, batch):
            continue
        how = {"tile": tile, "layout": layout, "mesh_layout": mesh_layout, "direction": "both", "batch": batch}
        with MeshAttention(group, seqlen=37, backend=BACKENDS[0], **narrow({**PROBLEM, **how})) as plan:
            chunks = my_chunks(plan, *draw(plan.problem))
            before, results = plan.sent[0], []
            counted, _ = count(plan, lambda: results.extend(plan.forward(*chunks)))  # noqa: B023
            assert counted == plan.sent[0] - before == plan.formula("forward"), how
            counted, _ = count(plan, lambda: plan.backward(results[0], *chunks, *results))  # noqa: B023
            assert counted == plan.formula("backward"), how
            total = group.allreduce(plan.formula("forward") + plan.formula("backward"))
            assert total == pytest.approx(group.size * plan._decision.choice.sent_bytes), how


@on(4)
def test_memory_is_what_was_predicted(group):
    cases = ((4, 1, 1), "contiguous", "auto"), ((2, 1, 2), "striped", "striped"), ((2, 1, 2), "contiguous", "zigzag")
    for (tile, layout, mesh_layout), batch in product(cases, (1, 2, 8)):
        how = {"tile": tile, "layout": layout, "mesh_layout": mesh_layout, "schedule": "greedy", "batch": batch}
        with MeshAttention(group, seqlen=64, backend=BACKENDS[0], **narrow({**PROBLEM, **how})) as plan:
            scratch = plan._backend.scratch_bytes(8, 8, plan.problem.dtype)
            assert plan.nbytes - scratch - plan._backend.staged_bytes <= plan._decision.choice.nbytes


@on(2, 4)
def test_another_length(group):
    how = {**PROBLEM, "tile": (2, 1, group.size // 2), "layout": "contiguous", "mesh_layout": "zigzag"}
    with MeshAttention(group, seqlen=30, backend=BACKENDS[0], **narrow(how)) as plan, plan.like(seqlen=45) as other:
        assert str(other.tile) == str(plan.tile) and other._decision.choice.mesh_layouts[0].kind == "zigzag"
        with MeshAttention(group, seqlen=45, backend=BACKENDS[0], **narrow(how)) as fresh:
            chunks = my_chunks(other, *draw(other.problem))
            assert all(map(np.array_equal, other.forward(*chunks), fresh.forward(*chunks)))


@on(2, 4)
def test_chunks_of_any_lengths_stay(group):
    """A mesh of the caller's own kind takes his chunks, so that nothing travels where no rank sees another's keys."""
    sizes = tuple(range(3, 3 + group.size))
    cuts = [sum(sizes[:rank]) for rank in range(group.size + 1)]
    mask = masks.ranges([(start, stop, start, stop, "full") for start, stop in pairwise(cuts)])
    for mesh_layout in ("contiguous", "auto"):
        how = {"heads": 2, "head_dim": 4, "tile": "ring", "schedule": "greedy", "mesh_layout": mesh_layout}
        with MeshAttention(group, seqlen=cuts[-1], layout=sizes, mask=mask, **how) as plan:
            q = np.ones((1, len(plan.positions), 2, 4), np.float32)
            plan.forward(q, q, q)
            assert plan.sent == (0, 0) and len(q[0]) == sizes[group.rank]


@on(4)
def test_what_cannot_be_split(group):
    with pytest.raises(ArgumentError, match=r"^tile is 4x1x1; 4 planes cannot split 6 heads and 6 KV heads"):
        MeshAttention(group, seqlen=8, heads=6, head_dim=4, tile="ulysses")
    with pytest.raises(
        ArgumentError, match=r"^tile is 4x1x1; 4 planes cannot split 3 sequences of 6 heads and 6 KV heads"
    ):
        MeshAttention(group, seqlen=8, heads=6, head_dim=4, batch=3, tile="ulysses")
    with pytest.raises(
        ArgumentError, match=r"^mesh_layout is 'even'; it may be contiguous, striped, zigzag, grid, ranges, auto"
    ):
        MeshAttention(group, seqlen=8, heads=6, head_dim=4, mesh_layout="even")
