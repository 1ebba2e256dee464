"""The tokens that travel, counted over all pairs of a query and a key; every tile, layout, route and kind of mask."""

import random
from itertools import product

import divisions
import numpy as np
import pytest
from interval_masks import random_mask

from mpiattn import masks
from mpiattn.problem.group import Group
from mpiattn.problem.layout import LAYOUTS, Layout
from mpiattn.problem.problem import Problem
from mpiattn.schedule import travels
from mpiattn.schedule.kinds import IN_COLUMNS, KINDS
from mpiattn.schedule.needed import Activity
from mpiattn.schedule.ranges import places, positions, rest, total
from mpiattn.schedule.table import Lines, Table
from mpiattn.schedule.tile import Tile, tiles


def visible(problem, documents):
    """Whether any batch entry's query sees a key: bool (queries, keys), one pair after the other."""
    seen = np.zeros((problem.seqlen, problem.seqlen_k), bool)
    lo, hi = problem.whole_mask.key_intervals(np.arange(problem.seqlen), documents)
    for of_list in zip(lo.reshape(-1, problem.seqlen), hi.reshape(-1, problem.seqlen)):
        for query, (first, last) in enumerate(zip(*of_list)):
            seen[query, first:last] = True
    return seen


def runs_of(layout, chunk):
    return [np.arange(t.start, t.stop, t.step) for t in layout.ranges(chunk)]


class Counted:
    """What each rank sends, by sets of tokens."""

    def __init__(self, seen, layouts, tile, exact):
        self.seen, self.layouts, self.tile, self.exact = seen, layouts, tile, exact
        self.striped = "striped" in [layout.kind for layout in layouts]

    def needed(self, column, chunk, rank):
        """The tokens of a chunk that the tile of a rank needs, as a bool for every token of the sequence."""
        tile, (q_layout, k_layout) = self.tile, self.layouts
        queries = np.concatenate([q_layout.positions(i) for i in (tile.row(rank) if column else [chunk])])
        keys = np.concatenate([k_layout.positions(j) for j in ([chunk] if column else tile.column(rank))])
        part, marks = self.seen[np.ix_(queries, keys)], np.zeros(self.seen.shape[column], bool)
        marks[(keys if column else queries)[part.any(axis=0 if column else 1)]] = True
        return marks

    def filled(self, column, chunk, marks, collective):
        """The same, with the gaps that travel too."""
        layout, marks = self.layouts[column], marks.copy()
        if self.exact and not collective and not self.striped:
            return marks
        runs = runs_of(layout, chunk)
        for run in [np.concatenate(runs)] if collective or self.striped else runs:
            inside = np.flatnonzero(marks[run])
            if len(inside):
                marks[run[inside[0] : inside[-1] + 1]] = True
                marks[run] |= self.striped
        return marks

    def sent(self, kind, rank, route, collective):
        """Tokens that a rank sends of a kind."""
        tile, column, reduced = self.tile, kind in IN_COLUMNS, kind not in ("Q", "KV")
        group, count = tile.column(rank) if column else tile.row(rank), 0
        extent = len(group)

        def ahead(chunk, distance):
            return tile.in_group(kind, chunk, -distance)

        for hop in range(1, extent):
            if route == "direct":
                owner = ahead(rank, -hop) if reduced else rank
                users = range(1, extent) if collective and not reduced else [hop]
            elif reduced:
                owner, users = ahead(rank, -hop), range(1, hop + 1)
            else:
                owner, users = ahead(rank, -(hop - 1)), range(hop, extent)
            marks = np.any([self.needed(column, owner, ahead(owner, user)) for user in users], axis=0)
            count += self.filled(column, owner, marks, collective).sum()
        return count


WINDOWS = [(0, 0), (2, None), (None, 3), (5, 1), (17, 4), (40, 40), (None, None)]


def draw(rng, several):
    ranks = rng.choice([1, 4, 5, 6, 7, 8, 12])
    seqlen = rng.randint(1, 60)
    seqlen_k = rng.choice([seqlen, rng.randint(1, 60)])
    problem = Problem(
        seqlen=seqlen,
        seqlen_k=seqlen_k,
        heads=2,
        head_dim=3,
        value_dim=5,
        causal=rng.random() < 0.5,
        window=rng.choice(WINDOWS),
        prefix=rng.choice([0, 0, 0, 9]),
        causal_block=rng.choice([None, None, 4]),
        mask=random_mask(rng, seqlen, seqlen_k) if several else None,
    )
    kinds = rng.choice([(kind, kind) for kind in LAYOUTS] * 3 + [(kind, rng.choice(LAYOUTS)) for kind in LAYOUTS])
    layouts = [Layout(kind, tokens, ranks) for kind, tokens in zip(kinds, (seqlen, seqlen_k))]
    for side, tokens in enumerate((seqlen, seqlen_k)):
        if kinds[side] == "contiguous" and rng.random() < 0.3:  # uneven and empty
            cuts = sorted(rng.randint(0, tokens) for _ in range(ranks - 1))
            sizes = [b - a for a, b in zip([0, *cuts], [*cuts, tokens])]
            layouts[side] = Layout("contiguous", tokens, ranks, sizes)
    if rng.random() < 0.3:
        layouts = [divisions.either(rng, tokens, ranks) for tokens in (seqlen, seqlen_k)]

    def group():
        cuts = [sorted(rng.randint(0, tokens) for _ in range(4)) for tokens in (seqlen, seqlen_k)]
        return Group(*(np.array(cuts[0] if seqlen == seqlen_k and rng.random() < 0.7 else cut) for cut in cuts))

    def padded():
        return Group(np.array([0, rng.randint(0, seqlen)]), np.array([0, rng.randint(0, seqlen_k)]))

    documents = rng.choice([None, None, lambda: (group(),), lambda: (group(), group()), lambda: (padded(), padded())])
    return problem, layouts, documents and documents(), rng.choice(tiles(ranks))


@pytest.mark.draw(40)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("seed", range(150))
def test_tokens_and_bytes_are_those_of_the_pairs(seed, several):
    problem, layouts, documents, tile = draw(random.Random(seed), several)
    activity = Activity(problem.whole_mask, *layouts, tile, documents)
    counted = Counted(visible(problem, documents), layouts, tile, several)
    lengths = [layout.lengths for layout in layouts]
    for route, collective in (("direct", False), ("direct", True), ("ring", False)):
        for direction, kinds in KINDS.items():
            nbytes = travels.token_bytes(problem, direction)
            for rank in range(tile.ranks):
                sent = travels.sent(problem, lengths, tile, rank, route, direction, activity, collective)
                assert sent == tuple(counted.sent(kind, rank, route, collective) * nbytes[kind] for kind in kinds)


@pytest.mark.draw(40)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("seed", range(150))
def test_the_table_of_all_ranks_is_that_of_the_pairs(seed, several):
    """Whatever hops carry; and parts of the table are as in the whole."""
    problem, layouts, documents, tile = draw(random.Random(1000 + seed), several)
    counted = Counted(visible(problem, documents), layouts, tile, several)
    table = Table(problem.whole_mask, *layouts, documents)
    for column, kind in ((False, "Q"), (True, "KV")):
        lines, extent = Lines(table.side(column), tile, column), tile.extent(kind)
        carried = {
            (False, False, False): lambda hop, _: [hop],
            (False, False, True): lambda hop, _: [hop],
            (True, False, False): lambda hop, extent: range(1, hop + 1),
            (False, True, False): lambda hop, extent: range(hop, extent),
            (True, True, True): lambda hop, extent: range(1, extent),
        }
        for (earlier, later, together), users in carried.items():
            expected = np.zeros((extent, tile.ranks), np.int64)
            for hop, owner in product(range(1, extent), range(tile.ranks)):
                needing = [tile.in_group(kind, owner, -user) for user in users(hop, extent)]
                marks = np.any([counted.needed(column, owner, rank) for rank in needing], axis=0)
                expected[hop, owner] = counted.filled(column, owner, marks, together).sum()
            assert np.array_equal(lines.moved(earlier, later, together), expected), (column, earlier, later, together)
        by_hop, of_own = lines.moved(False, False, False), lines.tokens(lines.needs())
        assert lines.total == by_hop.sum() and np.array_equal(of_own[1:], by_hop[1:])
        for rank in range(tile.ranks):
            needed = lines.tokens(lines.needs(groups=lines.place[rank]))
            assert np.array_equal(lines.tokens(lines.needs(owners=[rank]))[:, rank], of_own[:, rank])
            chunks = [tile.in_group(kind, rank, hop) for hop in range(extent)]
            assert np.array_equal(needed[range(extent), chunks], of_own[range(extent), chunks])


def test_a_window_sends_its_width():
    """4 ranks of 16,384 tokens, 8 heads x 64, float32: 63 keys of the neighbour are seen, and so much travels."""
    problem, layout = Problem(65536, 8, 64, causal=True, window=(63, 0)), Layout("contiguous", 65536, 4)
    tile = Tile(1, 1, 4)
    activity = Activity(problem.whole_mask, layout, layout, tile)
    sent = [travels.sent(problem, (layout.lengths, layout.lengths), tile, rank, activity=activity) for rank in range(4)]
    assert [each.total for each in sent] == [63 * 2 * 8 * 64 * 4] * 3 + [0]
    assert travels.halo(problem, 4) == sum(each.total for each in sent) / 4
    both = travels.sent(problem, (layout.lengths, layout.lengths), tile, 3, "direct", "backward", activity)
    assert both.total == 63 * 2 * 8 * 64 * 4, "the last rank returns gradients"


def test_a_halo_exchange_sends_what_others_see():
    """Whatever ranks hold: of a neighbourhood on a grid, by rows, in blocks, in any ranges; and of a window."""
    near = {"mask": masks.neighborhood((9, 10), (3, 4), cyclic=(False, True))}
    window = {"window": (7, 3)}
    anywhere = Layout.of_ranges([[(0, 5), (40, 61)], [(5, 40), (70, 90)], [], [(61, 70)]])
    for shape, layout in product((near, window), (None, Layout.grid((9, 10), (2, 2)), anywhere)):
        problem = Problem(90, 2, 8, kv_heads=1, **shape)
        own = layout or Layout("contiguous", 90, 4)
        sees, tokens = visible(problem, None), 0
        for rank in range(4):
            at = own.positions(rank)
            tokens += int(np.delete(sees[at].any(axis=0), at).sum())
        nbytes = tokens / 4 * (8 + 8) * 4
        assert travels.halo(problem, 4, layout=layout) == nbytes
        assert travels.halo(problem, 4, "both", layout) == 3 * nbytes, (
            "backward sends them again, and the gradients back"
        )
        assert travels.halo(problem, 4, layout=layout or own) == nbytes, "without the short cut"


@pytest.mark.parametrize(
    "text, around",
    [
        ("neighborhood 3x3 grid=12x10", True),
        ("neighborhood 3x3 grid=12x10 cyclic=0,1", True),
        ("neighborhood 12x3 grid=12x10 edge=clipped", True),
        ("window 20,4", True),
        ("chunked 30", True),
        ("global 2 | window 4,4", False),
        ("causal", False),
        ("share-question 20,50,50", False),
        ("blocks 60 0:1,1:0", False),
        ("tree " + ",".join(map(str, range(-1, 119))), False),
    ],
)
def test_what_a_halo_exchange_is_of(text, around):
    """Queries see themselves and keys around them; else ranks would have to get nearly all keys, or others."""
    assert (travels.halo(Problem(120, 1, 8, mask=masks.parse(text)), 4) is not None) == around


def test_ranges():
    assert places(((1, 4), (6, 10)), ((2, 3), (6, 8), (9, 10))) == [slice(1, 2), slice(3, 5), slice(6, 7)]
    assert rest(((1, 4), (6, 10)), ((2, 3), (6, 8))) == ((1, 2), (3, 4), (8, 10))
    assert positions(Layout("zigzag", 20, 2), 1, ((1, 7),)) == [range(6, 10), range(10, 12)]
    assert total(((1, 4), (6, 10))) == 7
