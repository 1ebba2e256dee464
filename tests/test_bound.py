"""Schedules bound to ranks: the numbers by hand, and all ranks' steps played together without MPI."""

from collections import deque

import pytest

from mpiattn.model import cost
from mpiattn.problem.layout import Layout
from mpiattn.problem.problem import Problem
from mpiattn.schedule import travels
from mpiattn.schedule.bound import BoundHop, Message, bind
from mpiattn.schedule.greedy import greedy
from mpiattn.schedule.kinds import GATHERED, IN_COLUMNS, REDUCED, chunk_of
from mpiattn.schedule.needed import Activity
from mpiattn.schedule.places import Places
from mpiattn.schedule.ranges import total
from mpiattn.schedule.tile import Tile, tiles

ALL = ((0, 5),)
FULL, CAUSAL, WINDOW = ({}, {"causal": True}, {"causal": True, "window": (9, None)})


def activity_of(tile, masks, kind="contiguous"):
    problem = Problem(30, 2, 4, **masks)
    layout = Layout(kind, 30, tile.ranks)
    return problem, layout.lengths, Activity(problem.whole_mask, layout, layout, tile)


def hops_of(steps):
    return [(transfer.kind, hop) for step in steps for transfer in step.transfers for hop in transfer.hops]


def test_numbers_by_hand():
    """Rank 4 of rows 0 1 2 and 3 4 5: Q comes from its left and goes to its right, KV from above, partials back."""
    tile = Tile(1, 3, 2)
    _, _, activity = activity_of(tile, FULL)
    steps = bind(greedy(tile), 4, activity)
    assert dict(hops_of(steps[:3])) == {
        "KV": BoundHop(1, 0, Message(1, 4, ALL, False), Message(1, 1, ALL, False)),
        "Q": BoundHop(2, 1, Message(3, 4, ALL, False), Message(5, 5, ALL, False)),
    }
    assert [hop for kind, hop in hops_of(steps) if kind == "O"] == [
        BoundHop(1, 0, Message(3, 3, ALL, False), Message(5, 4, ALL, False)),
        BoundHop(2, 0, Message(5, 5, ALL, False), Message(3, 4, ALL, False)),
    ]
    ring = bind(greedy(tile, route="ring"), 4, activity)
    assert [(kind, hop.send, hop.receive) for kind, hop in hops_of(ring) if kind in "QO"] == [
        ("Q", Message(5, 4, ALL, False), Message(3, 3, ALL, False)),
        ("Q", Message(5, 3, ALL, False), Message(3, 5, ALL, False)),
        ("O", Message(5, 3, ALL, False), Message(3, 5, ALL, False)),
        ("O", Message(5, 5, ALL, False), Message(3, 4, ALL, False)),
    ]
    blocks = [block for step in steps for block in step.blocks]
    assert blocks[0] == (4, 4) and sorted(blocks) == [(q, kv) for q in (3, 4, 5) for kv in (1, 4)]
    places = Places(greedy(tile), 4, activity)
    assert {kind: set(tokens) for kind, tokens in places.tokens.items()} == {
        "Q": {3, 4, 5},
        "KV": {1, 4},
        "O": {3, 4, 5},
    }
    assert places.rows == {"Q": 5, "KV": 5, "O": 5, "+O": 5}


def test_what_the_mask_leaves_out():
    """Under a causal mask, contiguous chunks on a Ring: rank 0 receives nothing, the last rank sends nothing."""
    tile = Tile(1, 1, 4)
    _, _, activity = activity_of(tile, CAUSAL)
    of_ranks = [hops_of(bind(greedy(tile), rank, activity)) for rank in range(4)]
    assert [sum(hop.receive is not None for _, hop in hops) for hops in of_ranks] == [0, 1, 2, 3]
    assert [sum(hop.send is not None for _, hop in hops) for hops in of_ranks] == [3, 2, 1, 0]
    assert [len(hops) for hops in of_ranks] == [3] * 4


def play(schedule, activity):
    """Run the steps of all ranks by numbers alone.

    Returns, by rank, {reduced kind: blocks in the result} and {kind: tokens of every message}.  A chunk is its number,
    a partial the set of its blocks; messages keep their order between two ranks.
    """
    ranks = range(schedule.tile.ranks)
    steps = [bind(schedule, rank, activity) for rank in ranks]
    held = [{("Q", rank): rank, ("KV", rank): rank} for rank in ranks]
    under_way, sent = {}, [{} for _ in ranks]

    def accumulator(rank, kind, chunk):
        return held[rank].setdefault((kind, chunk), set())

    for number in range(len(schedule.steps)):
        for rank in ranks:
            for transfer in steps[rank][number].transfers:
                for hop in filter(lambda hop: hop.send, transfer.hops):
                    content = held[rank][transfer.kind, hop.send.chunk]
                    if transfer.kind not in GATHERED:
                        del held[rank][transfer.kind, hop.send.chunk]
                    under_way.setdefault((transfer.kind, rank, hop.send.peer), deque()).append(content)
                    sent[rank].setdefault(transfer.kind, []).append(hop.send.tokens)
        for rank in ranks:
            for q, kv in steps[rank][number].blocks:
                if activity.has_work(q, kv):
                    assert (held[rank]["Q", q], held[rank]["KV", kv]) == (q, kv)
                    for kind in REDUCED[schedule.direction]:
                        partial = accumulator(rank, kind, chunk_of(kind, q, kv))
                        assert (q, kv) not in partial
                        partial.add((q, kv))
        for rank in ranks:
            for transfer in steps[rank][number].transfers:
                for hop in filter(lambda hop: hop.receive, transfer.hops):
                    content = under_way[transfer.kind, hop.receive.peer, rank].popleft()
                    if transfer.kind in GATHERED:
                        assert content == hop.receive.chunk
                        held[rank][transfer.kind, content] = content
                    else:
                        partial = accumulator(rank, transfer.kind, hop.receive.chunk)
                        assert not partial & content
                        partial |= content
    assert not any(under_way.values())
    return [{kind: accumulator(rank, kind, rank) for kind in REDUCED[schedule.direction]} for rank in ranks], sent


@pytest.mark.parametrize("masks", [FULL, CAUSAL, WINDOW])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("route", ["direct", "ring"])
@pytest.mark.parametrize("kind", cost.SCHEDULES)
@pytest.mark.parametrize("direction", REDUCED)
def test_every_partial_reaches_its_owner(masks, layout, route, kind, direction):
    """Every block with work is in the results of its query chunk's and its KV chunk's ranks; bytes are the formula."""
    for tile in (*tiles(1), *tiles(4), *tiles(6)):
        problem, lengths, activity = activity_of(tile, masks, layout)
        schedule = cost.build(kind, tile, route, problem, direction=direction)
        results, sent = play(schedule, activity)
        work = [(q, kv) for q in range(tile.ranks) for kv in range(tile.ranks) if activity.has_work(q, kv)]
        nbytes = travels.token_bytes(problem, direction)
        for rank in range(tile.ranks):
            for reduced, blocks in results[rank].items():
                assert blocks == {block for block in work if block[reduced in IN_COLUMNS] == rank}
            expected = travels.sent(
                problem, (lengths, lengths), tile, rank, route, direction, activity, schedule.collective
            )
            assert sum(nbytes[name] * sum(map(total, tokens)) for name, tokens in sent[rank].items()) == expected.total
