"""What the routes mean: played on a group of ranks, every chunk and partial gets where it belongs."""

import random
from dataclasses import replace

import pytest

from mpiattn.errors import ScheduleError
from mpiattn.schedule.collective import collective
from mpiattn.schedule.kinds import GATHERED, NAMES
from mpiattn.schedule.route import ROUTES, leg_of
from mpiattn.schedule.tile import Tile
from mpiattn.schedule.validate import validate

REDUCED = [kind for kind in NAMES if kind not in GATHERED]
WAYS = [(route, by_collective) for route in ROUTES for by_collective in (False, True)]


def needs_of(extent, share, seed=0):
    """Of every owner, how many hops ahead of it the ranks are that have work on its chunk."""
    rng = random.Random(seed)
    return [{ahead for ahead in range(1, extent) if rng.random() < share} for _ in range(extent)]


def play(kind, extent, route, by_collective, held, needs):
    """Play all hops of a kind; what moves is added to `held`, by rank and hop.  Returns the moves, (hop, owner)."""
    moves = set()
    for hop in range(1, extent):
        leg = leg_of(kind, hop, extent, route, by_collective)
        leaving = [held[rank].get(leg.leaves) for rank in range(extent)]
        for rank in range(extent):
            owner = (rank - leg.leaves) % extent
            if needs[owner] & set(leg.users):
                moves.add((hop, owner))
                to = held[(rank + leg.ahead) % extent]
                to[leg.lands] = to.get(leg.lands, frozenset()) | leaving[rank]
    return moves


@pytest.mark.parametrize("share", [0, 0.3, 1])
@pytest.mark.parametrize("extent", [1, 2, 3, 6])
@pytest.mark.parametrize("route, by_collective", WAYS)
@pytest.mark.parametrize("kind", GATHERED)
def test_chunks_reach_those_who_need_them(kind, route, by_collective, extent, share):
    needs, held = needs_of(extent, share), [{0: frozenset({rank})} for rank in range(extent)]
    moves = play(kind, extent, route, by_collective, held, needs)
    for rank, chunks in enumerate(held):
        assert all(owners == {(rank - hop) % extent} for hop, owners in chunks.items())
    for owner, distances in enumerate(needs):
        assert all(distance in held[(owner + distance) % extent] for distance in distances)
        hops = {hop for hop, chunk in moves if chunk == owner}
        expected = (
            set(range(1, max(distances, default=0) + 1))
            if route == "ring"
            else set(range(1, extent))
            if by_collective and distances
            else distances
        )
        assert hops == expected


@pytest.mark.parametrize("share", [0, 0.3, 1])
@pytest.mark.parametrize("extent", [1, 2, 3, 6])
@pytest.mark.parametrize("route, by_collective", WAYS)
@pytest.mark.parametrize("kind", REDUCED)
def test_partials_reach_their_owner(kind, route, by_collective, extent, share):
    needs = needs_of(extent, share)
    # held[rank][hop]: the ranks whose work is in that accumulator, of the chunk `hop` back
    held = [
        {hop: frozenset({rank} if not hop or hop in needs[(rank - hop) % extent] else ()) for hop in range(extent)}
        for rank in range(extent)
    ]
    moves = play(kind, extent, route, by_collective, held, needs)
    for owner, distances in enumerate(needs):
        assert held[owner][0] == {owner} | {(owner + distance) % extent for distance in distances}
        hops = {hop for hop, chunk in moves if chunk == owner}
        assert hops == (set(range(min(distances, default=extent), extent)) if route == "ring" else distances)


def test_no_collective_takes_the_ring():
    with pytest.raises(ScheduleError, match="cannot take the ring route"):
        validate(replace(collective(Tile(1, 3, 2)), route="ring"))
