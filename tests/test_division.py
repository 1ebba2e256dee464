"""Which tokens pieces need, who gives them to whom, and in which order a rank computes with them."""

import random
from itertools import pairwise

import divisions
import numpy as np
import pytest
from test_bands import drawn

from mpiattn.problem.group import Group
from mpiattn.problem.layout import Layout
from mpiattn.schedule import piece_steps
from mpiattn.schedule.bands import Piece, bands
from mpiattn.schedule.division import FEW_RUNS, RankPieces, needs_of
from mpiattn.schedule.kinds import IN_COLUMNS, REDUCED
from mpiattn.schedule.piece_steps import PORTIONS, PieceSteps
from mpiattn.schedule.ranges import total

CASES = range(30)


def cuts(rng, tokens, most):
    """Where a few parts of some tokens begin, and at last where they end."""
    return sorted({0, tokens, *(rng.randint(0, tokens) for _ in range(rng.randint(0, most)))})


def any_division(rng, mask, ranks, groups):
    """Each group's rows cut anyhow, each of these parts by its keys, and each piece given to any rank."""
    pieces = [[] for _ in range(ranks)]
    for group in range(groups):
        for rows in pairwise(cuts(rng, mask.seqlen, 4)):
            for keys in pairwise(cuts(rng, mask.seqlen_k, 4)):
                rng.choice(pieces).append(Piece(group, *rows, *keys))
    return tuple(map(tuple, pieces))


def any_documents(rng, mask, batch):
    """Of each sequence, of all alike, or none, as `mpiattn.problem.documents` makes them."""
    if mask.mask is not None or rng.random() < 0.4:
        return None
    count = rng.randint(1, 3)

    def side(tokens):
        return np.array([0, *sorted(rng.randint(0, tokens) for _ in range(count))], np.int64)

    return tuple(Group(side(mask.seqlen), side(mask.seqlen_k)) for _ in range(rng.choice([1, batch])))


class Case:
    """A division of a short problem among a few ranks with any layouts.

    seen: of each sequence, which query sees which key: bool (queries, keys).
    """

    def __init__(self, seed):
        rng = random.Random(seed)
        self.mask, self.ranks = drawn(rng), rng.randint(1, 6)
        self.batch, self.kv_heads = rng.randint(1, 3), rng.randint(1, 3)
        groups, tokens = self.batch * self.kv_heads, (self.mask.seqlen, self.mask.seqlen_k)
        self.documents = any_documents(rng, self.mask, self.batch)
        if rng.random() < 0.5:
            self.division = bands(self.mask, self.ranks, groups, rng.randint(1, 9), rng.randint(1, 9))
        else:
            self.division = any_division(rng, self.mask, self.ranks, groups)
        kinds = [rng.choice(["contiguous", "striped", "zigzag", None]) for _ in tokens]
        self.layouts = tuple(
            Layout(kind, count, self.ranks) if kind else divisions.either(rng, count, self.ranks)
            for kind, count in zip(kinds, tokens)
        )
        self.needs = needs_of(self.division, self.mask, self.kv_heads, self.documents)
        self.seen = [self._visible(sequence) for sequence in range(self.batch)]

    def _visible(self, sequence):
        seen = np.zeros((self.mask.seqlen, self.mask.seqlen_k), bool)
        documents = self.documents and (self.documents * self.batch)[sequence : sequence + 1]
        begin, end = (side[:, 0] for side in self.mask.key_intervals(np.arange(self.mask.seqlen), documents))
        for of_list in zip(begin, end):
            for query, (first, last) in enumerate(zip(*of_list)):
                seen[query, first:last] = True
        return seen

    def pieces(self):
        """The `RankPieces` of every rank."""
        return [RankPieces(self.needs, self.layouts, rank) for rank in range(self.ranks)]


def numbers(tokens):
    """The numbers in some `Ranges`."""
    return [number for part in tokens for number in range(*part)]


@pytest.mark.parametrize("seed", CASES)
def test_needs(seed):
    """The pieces of a KV head need the queries and the keys of their visible pairs, and no others."""
    case = Case(seed)
    for pieces, needs in zip(case.division, case.needs):
        expected = {}
        for group, *ends in pieces:
            sequence, head = divmod(group, case.kv_heads)
            rows, keys = slice(*ends[:2]), slice(*ends[2:])
            part = case.seen[sequence][rows, keys]
            if part.any():
                of_rows, of_keys = (np.flatnonzero(part.any(axis=axis)).tolist() for axis in (1, 0))
                all_rows, all_keys = expected.setdefault((sequence, head), (set(), set()))
                all_rows |= {rows.start + row for row in of_rows}
                all_keys |= {keys.start + key for key in of_keys}
        got = [((need.sequence, need.head), numbers(need.queries), numbers(need.keys)) for need in needs]
        assert got == [(name, sorted(rows), sorted(keys)) for name, (rows, keys) in sorted(expected.items())]


@pytest.mark.parametrize("seed", CASES)
def test_what_one_gives_the_other_takes(seed):
    """With the same numbers and tokens; and every token of a need comes once, from its owner, to its place."""
    case = Case(seed)
    of_ranks = case.pieces()
    for column in (False, True):
        given = {
            (owner, parcel.peer, parcel.number): parcel
            for owner, of in enumerate(of_ranks)
            for parcel in of.given[column]
        }
        taken = {
            (parcel.peer, user, parcel.number): parcel
            for user, of in enumerate(of_ranks)
            for parcels in of.taken[column]
            for parcel in parcels
        }
        assert given.keys() == taken.keys()
        assert len(given) == sum(len(of.given[column]) for of in of_ranks)
        for name, parcel in taken.items():
            assert parcel[2:] == given[name][2:] and parcel.length == sum(map(len, parcel.places))
        for of in of_ranks:
            assert [parcel.peer for parcel in of.given[column]] == sorted(
                [parcel.peer for parcel in of.given[column]], key=lambda peer, of=of: (peer - of.rank - 1) % case.ranks
            )
            for need, parcels in zip(of.needs, of.taken[column]):
                wanted = numbers(need.of(column))
                came = [None] * len(wanted)
                for parcel in parcels:
                    positions = case.layouts[column].positions(parcel.peer)
                    for run, place in zip(parcel.tokens, parcel.places):
                        for token, at in zip(range(*run), place, strict=True):
                            assert came[at] is None
                            came[at] = positions[token]
                assert came == wanted
            assert of.sent(column) == sum(parcel.length for parcel in of.given[column] if parcel.peer != of.rank)
    # Messages with the same tag are those of different needs
    for of in of_ranks:
        for parcels in (*of.taken[False], *of.taken[True]):
            peers = [parcel.peer for parcel in parcels]
            assert all(peers.count(peer) <= FEW_RUNS for peer in peers)


@pytest.mark.parametrize("seed", CASES)
def test_steps_without_overlap(seed):
    """The same arrivals, blocks and partials; no block runs, and no partial leaves, before all portions are here."""
    for of in Case(seed).pieces():
        together, apart = (PieceSteps(of, "backward", 3, 2, overlap=overlap) for overlap in (True, False))
        *waiting, last = apart.steps
        assert [step.arrival for step in waiting] == together.arrivals and last.arrival is None
        assert all(not step.blocks and not step.complete for step in waiting)
        assert last.blocks == tuple(block for step in together.steps for block in step.blocks)
        assert last.complete == tuple(name for step in together.steps for name in step.complete)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("seed", CASES)
def test_steps(seed, direction, monkeypatch):
    """Portions have all tokens once; each block runs once, after its portions; each partial is complete once."""
    monkeypatch.setattr(piece_steps, "LEAST", 1 + seed % 4)
    case = Case(seed)
    reduced = {kind in IN_COLUMNS for kind in REDUCED[direction]}
    for of in case.pieces():
        steps = PieceSteps(of, direction, 3, 2)
        names = [step.arrival for step in steps.steps[:-1]]
        assert names == steps.arrivals and steps.steps[-1].arrival is None and len(set(names)) == len(names)
        assert [name.need for name in names] == sorted(name.need for name in names)
        assert set(names) == {
            (need, column, number)
            for (need, column), portions in steps.portions.items()
            for number in range(len(portions))
        }
        for (number, column), portions in steps.portions.items():
            assert 1 <= len(portions) <= PORTIONS and portions[0].start == 0
            assert all(portion.stop == following.start for portion, following in pairwise(portions))
            assert portions[-1].stop == total(of.needs[number].of(column))
            parcels = [parcel for portion in portions for parcel in portion.parcels]
            assert sorted(parcels) == sorted(of.taken[column][number])
            for portion in portions:
                places = sorted(at for parcel in portion.parcels for place in parcel.places for at in place)
                assert places == list(range(portion.start, portion.stop))
        here, blocks, complete = set(), [], []
        for step in steps.steps:
            for block in step.blocks:
                assert {(block.need, False, block.row), (block.need, True, block.column)} <= here
                assert not {(block.need, False, block.row), (block.need, True, block.column)} & set(complete)
                blocks.append(block)
            for name in step.complete:
                side = [
                    block
                    for block in blocks
                    if block.need == name.need and block[2 if name.column else 1] == name.number
                ]
                assert len(side) == len(steps.portions[name.need, not name.column])
                complete.append(name)
            here.add(step.arrival)
        assert (
            len(set(blocks))
            == len(blocks)
            == sum(len(steps.portions[need, False]) * len(steps.portions[need, True]) for need in range(len(of.needs)))
        )
        assert sorted(complete) == sorted(name for name in names if name.column in reduced)
