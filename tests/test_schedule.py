"""Schedules as data: greedy, collective, and a validator that refuses what is wrong."""

import random
import sys
from dataclasses import replace

import pytest

from mpiattn.errors import ArgumentError, ScheduleError
from mpiattn.schedule.collective import collective
from mpiattn.schedule.greedy import greedy
from mpiattn.schedule.route import ROUTES
from mpiattn.schedule.steps import Block, Costs, Step, Transfer, apart, with_slots
from mpiattn.schedule.tile import Tile
from mpiattn.schedule.validate import validate

SIDES = (1, 2, 3, 4, 6)
TILES = [(a, b) for a in SIDES for b in SIDES]


def moves(schedule):
    return [(t.kind, t.hops) for step in schedule.steps for t in step.transfers]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("a", "b"), TILES)
def test_every_tile_is_valid(a, b, route):
    rng, tile = random.Random(f"{a} {b} {route}"), Tile(1, a, b)
    for _ in range(12):
        costs = Costs(*(rng.choice([0.01, 0.3, 1, 1.5, 4, 1000]) for _ in range(3)))
        direction, ahead = rng.choice(["forward", "backward"]), rng.choice([1, 2, 3, 100])
        early, late = greedy(tile, costs, route, direction, ahead), greedy(tile, costs, route, direction)
        assert validate(early) == early.slots
        assert [step.blocks for step in early.steps] == [step.blocks for step in late.steps]
        assert all(early.slots[kind] >= late.slots[kind] for kind in late.slots)
        schedule = greedy(tile, costs, route)
        assert validate(schedule) == schedule.slots
        validate(apart(schedule))
        assert sorted(moves(schedule)) == sorted(
            [("Q", (u,)) for u in range(1, a)]
            + [("O", (u,)) for u in range(1, a)]
            + [("KV", (w,)) for w in range(1, b)]
        )
    schedule = collective(tile, route)
    assert validate(schedule) == schedule.slots
    assert len(schedule.steps) <= (3 if route == "direct" else max(a, b) - 1 + 1 + a - 1)
    assert sum(step.fused for step in schedule.steps) == 1
    assert all(t.collective == (route == "direct") for step in schedule.steps for t in step.transfers)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("a", "b"), [(1, 8), (8, 1), (4, 5)])
def test_chunks_of_both_sides_in_turn(a, b, direction):
    """The neighbour ahead is as many hops back as there are others: it comes second, not last."""
    schedule = greedy(Tile(1, a, b), direction=direction, ahead=2, both_sides=True)
    assert validate(schedule) == schedule.slots
    nearest = {1: [], 4: [1, 3, 2], 5: [1, 4, 2, 3], 8: [1, 7, 2, 6, 3, 5, 4]}
    for kind in ("Q", "KV"):
        hops = [t.hops[0] for step in schedule.steps for t in step.transfers if t.kind == kind]
        assert hops == nearest[schedule.tile.extent(kind)]
    passed = greedy(Tile(1, a, b), route="ring", direction=direction, both_sides=True)
    assert passed == greedy(Tile(1, a, b), route="ring", direction=direction)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_one_row_is_ring_attention(n, route):
    """Step i computes with the KV that arrived in step i - 1 while the next one comes: two slots of KV."""
    schedule = greedy(Tile(1, 1, n), Costs(), route)
    assert [step.blocks for step in schedule.steps] == [(Block(0, w),) for w in range(n)]
    assert moves(schedule) == [("KV", (w,)) for w in range(1, n)]
    assert schedule.slots == {"Q": 0, "KV": min(2, n - 1), "O": 0, "+O": 0}


def test_receiving_ahead_takes_slots():
    """Of a ring on the direct route: one more for every step ahead; from neighbors a chunk comes when it is there."""
    for ahead in range(5):
        assert greedy(Tile(1, 1, 8), ahead=ahead).slots["KV"] == min(2 + ahead, 7)
        assert [t.earliest for step in greedy(Tile(1, 1, 8), ahead=ahead).steps for t in step.transfers] == [
            max(0, i - ahead) for i in range(7)
        ]
        assert greedy(Tile(1, 1, 8), route="ring", ahead=ahead).slots["KV"] == 2


def test_qring_needs_few_slots():
    """Q chunks pass by as KV chunks do in Ring; a partial leaves as soon as its row is complete."""
    schedule = greedy(Tile(1, 8, 1))
    assert moves(schedule) == [("Q", (u,)) for u in range(1, 8)] + [("O", (u,)) for u in range(1, 8)]
    assert schedule.slots["KV"] == 0 and schedule.slots["+O"] <= 2


def test_algorithm_2_by_hand():
    """A tile of 2 x 3, unit costs, worked out from the listing (arXiv 2512.20968, Algorithm 2).

    Recv KV#1: Q would unlock 1 block, KV 1; ties take KV; it is hidden by (0,0).  Then Q unlocks 2 (two KV are
    here) and KV 1: Recv Q#1, hidden by (0,1).  Then Recv KV#2, hidden by (1,0), row 0 last; then O#1 lacks
    (1,1) and (1,2), which run alone; then Send O#1 is hidden by (0,2).
    """
    schedule = greedy(Tile(1, 2, 3))
    assert [(tuple((t.kind, t.hops) for t in step.transfers), step.blocks) for step in schedule.steps] == [
        ((("KV", (1,)),), ((0, 0),)),
        ((("Q", (1,)),), ((0, 1),)),
        ((("KV", (2,)),), ((1, 0),)),
        ((), ((1, 1),)),
        ((), ((1, 2),)),
        ((("O", (1,)),), ((0, 2),)),
    ]


def test_costs_choose_what_moves_first():
    assert moves(greedy(Tile(1, 3, 3), Costs(q=0.1, kv=1)))[:2] == [("Q", (1,)), ("Q", (2,))]
    assert moves(greedy(Tile(1, 3, 3), Costs(q=1, kv=0.1)))[:2] == [("KV", (1,)), ("KV", (2,))]


def test_no_more_blocks_than_hide_a_transfer():
    for costs in (Costs(), Costs(2, 3, 4), Costs(0.2, 1.2, 2.5)):
        limit = {"Q": max(1, -(-costs.q // 1)), "KV": max(1, -(-costs.kv // 1)), "O": max(1, -(-costs.o // 1))}
        for step in greedy(Tile(1, 5, 6), costs).steps:
            for transfer in step.transfers:
                assert len(step.blocks) <= limit[transfer.kind]


def test_row_0_is_last():
    """Whenever a block of row 0 runs after row 1 has come, no block of another row was runnable: row-major, 0 last."""
    schedule, done, q, kv = greedy(Tile(1, 4, 4), Costs(1, 1, 1)), set(), 0, 0
    for step in schedule.steps:
        runnable = {(u, w) for u in range(q + 1) for w in range(kv + 1)} - done
        for block in step.blocks:
            assert block == min(runnable, key=lambda at: (at[0] == 0, at))
            runnable.discard(block)
            done.add(block)
        for transfer in step.transfers:
            q += transfer.kind == "Q"
            kv += transfer.kind == "KV"


def test_work_grows_with_the_blocks():
    """Lines executed for four times as many blocks: a search through all blocks at each would be 16 times as many."""

    def lines(a, b):
        count = [0]

        def trace(frame, event, _):
            count[0] += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            greedy(Tile(1, a, b))
        finally:
            sys.settrace(before)
        return count[0]

    assert lines(32, 32) < 6 * lines(16, 16)


def test_text_names_every_step():
    text = str(greedy(Tile(1, 2, 2)))
    assert "greedy 2x2, forward, direct route" in text
    assert "recv KV#1 -> KV[0] from 0" in text and "send O#1 -> +O[0] from 4" in text


@pytest.mark.parametrize("costs", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_costs_must_be_positive(costs):
    with pytest.raises(ArgumentError, match="costs are"):
        greedy(Tile(1, 2, 2), costs)


def test_route_must_exist():
    with pytest.raises(ArgumentError, match=r"scenic.*direct, ring"):
        greedy(Tile(1, 2, 2), route="scenic")


# The validator must refuse every way in which a schedule can be wrong.


def edit(schedule, index, **changes):
    """The schedule with one step changed."""
    steps = list(schedule.steps)
    steps[index] = replace(steps[index], **changes)
    return replace(schedule, steps=tuple(steps))


def index_of(schedule, kind, hop=1):
    return next(
        i for i, step in enumerate(schedule.steps) for t in step.transfers if (t.kind, t.hops) == (kind, (hop,))
    )


def drop_block(s):
    return edit(s, -1, blocks=s.steps[-1].blocks[1:])


def repeat_block(s):
    return edit(s, -1, blocks=(*s.steps[-1].blocks, Block(0, 0)))


def foreign_block(s):
    return edit(s, -1, blocks=(*s.steps[-1].blocks, Block(0, s.tile.b)))


def drop_transfer(kind, hop):
    return lambda s: edit(s, index_of(s, kind, hop), transfers=())


def too_early(s):
    last = max(i for i, step in enumerate(s.steps) for t in step.transfers if t.kind == "KV")
    block = next(b for step in s.steps for b in step.blocks if b.w == s.tile.b - 1)
    steps = [replace(step, blocks=tuple(b for b in step.blocks if b != block)) for step in s.steps]
    steps[last] = replace(steps[last], blocks=(*steps[last].blocks, block))  # the step that brings its KV
    return replace(s, steps=tuple(steps))


def received_twice(s):
    transfer = s.steps[index_of(s, "KV")].transfers[0]
    return edit(s, index_of(s, "KV") + 1, transfers=(*s.steps[index_of(s, "KV") + 1].transfers, transfer))


def no_such_hop(s):
    return edit(s, -1, transfers=(Transfer("KV", (s.tile.b,), (0,)),))


def no_such_slot(kind):
    def corrupt(s):
        transfer = s.steps[index_of(s, kind)].transfers[0]
        return edit(s, index_of(s, kind), transfers=(replace(transfer, slots=(99,)),))

    return corrupt


def one_slot_for_all_kv(s):
    return replace(
        s,
        steps=tuple(
            replace(step, transfers=tuple(replace(t, slots=(0,)) if t.kind == "KV" else t for t in step.transfers))
            for step in s.steps
        ),
    )


def one_slot_for_all_q(s):
    return replace(
        s,
        steps=tuple(
            replace(step, transfers=tuple(replace(t, slots=(0,)) if t.kind == "Q" else t for t in step.transfers))
            for step in s.steps
        ),
    )


def shared_accumulator(s):
    return replace(s, accumulators={"O": (0,) * len(s.accumulators["O"])})


def no_such_accumulator(s):
    return replace(s, accumulators={"O": (*s.accumulators["O"][:-1], 99)})


def sent_before_complete(s):
    at = index_of(s, "O", 2)
    rest = edit(s, at, transfers=())
    return edit(rest, 0, transfers=(*rest.steps[0].transfers, replace(s.steps[at].transfers[0], earliest=0)))


def posted_too_early(s):
    """A partial may go along with an earlier step's transfer, but not before its blocks are complete."""
    at = index_of(s, "O", 2)
    transfer = s.steps[at].transfers[0]
    return edit(s, at, transfers=(replace(transfer, earliest=transfer.earliest - 1),))


def posted_too_late(s):
    at = index_of(s, "KV", 2)
    return edit(s, at, transfers=(replace(s.steps[at].transfers[0], earliest=at + 1),))


def slot_taken_too_early(s):
    """KV#3 before the step in which its slot is free."""
    at = index_of(s, "KV", 3)
    return edit(
        s,
        at,
        transfers=(
            replace(s.steps[at].transfers[0], earliest=0, slots=s.steps[index_of(s, "KV", 1)].transfers[0].slots),
        ),
    )


def added_to_after_sent(s):
    block = next(b for step in s.steps for b in step.blocks if b.u == 1)
    steps = [replace(step, blocks=tuple(b for b in step.blocks if b != block)) for step in s.steps]
    steps[-1] = replace(steps[-1], blocks=(*steps[-1].blocks, block))
    return replace(s, steps=tuple(steps))


def sent_twice(s):
    transfer = s.steps[index_of(s, "O")].transfers[0]
    return replace(s, steps=(*s.steps, Step((transfer,))))


def slots_missing(s):
    transfer = s.steps[index_of(s, "KV")].transfers[0]
    return edit(s, index_of(s, "KV"), transfers=(replace(transfer, slots=()),))


def fused_in_part(s):
    at = next(i for i, step in enumerate(s.steps) if step.blocks)
    return edit(s, at, fused=True)


def outlived(arena):
    """What lies in a slot is used after the memory may have gone to others."""

    def corrupt(s):
        (first, last), *rest = s.lives[arena][0]
        return replace(s, lives={**s.lives, arena: (((first, last - 1), *rest), *s.lives[arena][1:])})

    return corrupt


CORRUPTIONS = [
    (outlived("KV"), r"KV\[0\] is not used in one life"),
    (outlived("O"), r"O\[0\] is not used in one life"),
    (outlived("+O"), r"\+O\[0\] is not used in one life"),
    (fused_in_part, "a fused step has . block.*; it must have all of the tile"),
    (drop_block, "never run"),
    (repeat_block, "runs twice"),
    (foreign_block, "KV#4 is used before"),
    (drop_transfer("Q", 1), "before it has arrived"),
    (drop_transfer("KV", 1), "before it has arrived"),
    (drop_transfer("O", 3), "lacks the partials"),
    (too_early, "before it has arrived"),
    (received_twice, "received twice"),
    (no_such_hop, "does not exist"),
    (no_such_slot("Q"), "does not exist"),
    (no_such_slot("KV"), "does not exist"),
    (no_such_slot("O"), "does not exist"),
    (one_slot_for_all_kv, "overwritten"),
    (one_slot_for_all_q, "overwritten"),
    (shared_accumulator, "is taken by"),
    (no_such_accumulator, "does not exist"),
    (sent_before_complete, "before its blocks are complete"),
    (added_to_after_sent, "before its blocks are complete"),
    (sent_twice, "after it was sent"),
    (slots_missing, "slots"),
    (posted_too_late, "only after the step that needs it"),
    (posted_too_early, "before its blocks are complete"),
    (slot_taken_too_early, "overwritten|before it has arrived"),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("corrupt", "text"), CORRUPTIONS)
def test_validate_refuses(corrupt, text, route):
    good = greedy(Tile(1, 4, 4), Costs(1, 1, 1), route)
    validate(good)
    with pytest.raises(ScheduleError, match=text):
        validate(corrupt(good))


def test_validate_refuses_a_wrong_order_of_partials_on_the_ring():
    """O#u is merged into O#(u+1) on its way: sending O#2 before O#1 would lose O#1."""
    steps = [
        Step((Transfer("Q", (1,), ()),)),
        Step((Transfer("Q", (2,), ()),)),
        Step((), tuple(Block(u, 0) for u in range(3))),
    ]
    partials = [Step((Transfer("O", (hop,), ()),)) for hop in (1, 2)]
    validate(with_slots("x", "forward", Tile(1, 3, 1), "ring", steps + partials))
    with pytest.raises(ScheduleError):
        validate(with_slots("x", "forward", Tile(1, 3, 1), "ring", steps + partials[::-1]))
    validate(with_slots("x", "forward", Tile(1, 3, 1), "direct", steps + partials[::-1]))


def test_validate_refuses_a_collective_whose_partials_share_a_slot():
    good = collective(Tile(1, 3, 2))
    transfer = good.steps[-1].transfers[0]
    with pytest.raises(ScheduleError, match="overwritten before it was merged"):
        validate(edit(good, -1, transfers=(replace(transfer, slots=(0, 0)),)))
