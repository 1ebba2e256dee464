"""The owners and pages of tokens, compared with plain lists; trees of messages, played through without MPI."""

import random
from itertools import pairwise

import divisions
import numpy as np
import pytest
from calls import calls

from mpiattn import ArgumentError, Layout
from mpiattn.backends.pages import Pages, stretches
from mpiattn.decode import token_owners
from mpiattn.decode.ledgers import Ledgers
from mpiattn.decode.token_owners import Ledger
from mpiattn.model.machine import DEFAULT, Link
from mpiattn.problem import layout
from mpiattn.schedule import reduction


def owners_of(layout, ranks):
    owners = [None] * layout.seqlen
    for rank in range(ranks):
        for position in layout.positions(rank):
            owners[position] = rank
    return owners


def test_example_of_the_docstring():
    ledger = Ledger(3)
    ledger.place(Layout("contiguous", 8, 3, (5, 3, 0)))
    ledger.deal(10)
    assert owners_of(ledger, 3)[8:] == [2, 2, 2, 1, 2, 1, 2, 0, 1, 2]


def checked(ledger, expected, ranks, rng):
    """A ledger against the owner of every token, looked at from one rank."""
    rank = rng.randrange(ranks)
    own = [position for position, owner in enumerate(expected) if owner == rank]
    assert ledger.seqlen == len(expected) and ledger.length(rank) == len(own)
    assert ledger.positions(rank).tolist() == own
    cut = rng.randint(0, len(expected) + 3)
    assert ledger.below(rank, [cut, 0]).tolist() == [sum(position < cut for position in own), 0]
    since = [position for part in ledger.ranges(rank, cut) for position in part]
    assert since == [position for position in own if position >= cut]
    stop = rng.randint(cut, len(expected) + 3)
    before, parts = ledger.between(rank, cut, stop)
    assert before == sum(position < cut for position in own) and all(parts)
    assert [position for part in parts for position in part] == [p for p in own if cut <= p < stop]
    first, last = sorted(rng.randint(0, len(own)) for _ in range(2))
    assert ledger.numbered(rank, first, last).tolist() == own[first:last]


@pytest.mark.draw(1)
@pytest.mark.parametrize("ranks, page_size", [(4, 1), (5, 16), (9, 64)])
def test_ten_thousand_appends_and_truncates(ranks, page_size):
    """Three sequences that share one rank's pages: owners and slots are those of a plain list of tokens."""
    rng = random.Random(ranks)
    me, sequences = rng.randrange(ranks), 3
    ledgers = [Ledger(ranks, first) for first in range(sequences)]
    expected = [[] for _ in range(sequences)]
    pages = Pages(60 + 3000 // page_size, page_size, sequences)
    for step in range(10_000):
        s = rng.randrange(sequences)
        ledger, plain = ledgers[s], expected[s]
        action = rng.choices(["deal", "place", "truncate", "free"], [80, 2, 17, 1])[0]
        if action == "deal" and len(plain) < 400:
            ledger.deal(rng.choice([1, 1, 1, 2, 30]))
            counts = [plain.count(rank) for rank in range(ranks)]
            for _, owner in sorted(
                (position, rank)
                for rank in range(ranks)
                for part in ledger.ranges(rank, len(plain))
                for position in part
            ):
                assert counts[owner] == min(counts), "a token goes to a rank that holds the fewest"
                counts[owner] += 1
                plain.append(owner)
        elif action == "place" and len(plain) < 400:
            layout = Layout(rng.choice(["contiguous", "striped", "zigzag"]), rng.randint(0, 60), ranks)
            if rng.random() < 0.3:
                layout = divisions.either(rng, layout.seqlen, ranks)
            ledger.place(layout)
            plain += owners_of(layout, ranks)
        elif action in ("truncate", "free"):
            length = 0 if action == "free" else max(0, len(plain) - rng.choice([1, 3, 50]))
            ledger.truncate(length)
            del plain[length:]
        pages.resize(s, ledger.length(me))
        if step % 7:
            continue
        checked(ledger, plain, ranks, rng)
        spans = stretches(pages.table(s), page_size, 0, ledger.length(me))
        own_slots = [slot for first, last in spans for slot in range(first, last)]
        assert len(own_slots) == ledger.length(me)
        assert all(b != a for (_, a), (b, _) in pairwise(spans)), "consecutive slots are one stretch"
        taken = np.concatenate([pages.table(sequence) for sequence in range(sequences)])
        assert len(set(taken.tolist())) == len(taken) == pages.count - pages.free, "a page belongs to one sequence"


@pytest.mark.draw(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_many_ledgers_at_once(ranks):
    """Changes of some of five sequences at a time, and of all: each is as its own ledger is."""
    rng, sequences = np.random.default_rng(ranks), 5
    ledgers, plain = Ledgers(ranks, sequences), [Ledger(ranks, s) for s in range(sequences)]
    for _ in range(600):
        some = rng.permutation(sequences)[: rng.integers(1, sequences + 1)]
        index = slice(None) if (every := rng.random() < 0.3) else some
        some = np.arange(sequences) if every else some
        action = rng.choice(["deal", "place", "truncate"], p=[0.75, 0.05, 0.2])
        if action == "deal":
            counts = rng.integers(0, rng.choice([2, 3, 40]), len(some))
            before = ledgers.lengths[some]
            ledgers.deal(index, counts)
            for s, count in zip(some.tolist(), counts.tolist()):
                plain[s].deal(count)
            for rank in range(ranks):
                turns = zip(some.tolist(), before.tolist(), *ledgers.next_turn(index, rank, before))
                for s, length, first, apart in turns:
                    new = [position for part in plain[s].ranges(rank, length) for position in part]
                    assert first < 0 or new == (first + apart * np.arange(len(new))).tolist()
        elif action == "place":
            layout = Layout(rng.choice(["contiguous", "striped", "zigzag"]), int(rng.integers(0, 30)), ranks)
            kept = int(rng.integers(0, layout.seqlen + 1))
            for s in some.tolist():
                ledgers.place(s, layout, kept)
                length = plain[s].seqlen + kept
                plain[s].place(layout)
                plain[s].truncate(length)
        else:
            most = ledgers.lengths[some]
            lengths = np.maximum(most - rng.integers(0, rng.choice([2, 30]), len(some)), 0)
            lengths = lengths if rng.random() < 0.95 else lengths * 0
            ledgers.truncate(index, lengths)
            for s, length in zip(some.tolist(), lengths.tolist()):
                plain[s].truncate(length)
        assert ledgers.lengths.tolist() == [ledger.seqlen for ledger in plain]
        assert ledgers.counts.tolist() == [ledger.counts.tolist() for ledger in plain]
        rank, at = int(rng.integers(ranks)), rng.integers(0, ledgers.lengths[some].max() + 3, (len(some), 3))
        below = [plain[s].below(rank, positions).tolist() for s, positions in zip(some.tolist(), at)]
        assert ledgers.below(index, rank, at).tolist() == below
        assert all(ledgers[s].ranges(rank) == plain[s].ranges(rank) for s in some.tolist())


def in_runs(count, run, ranks, first):
    """The ranks of `count` tokens that are dealt in runs as long as every rank gets one, and then one by one."""
    whole = count - count % (run * ranks)
    turns = [token // run if token < whole else token - whole for token in range(count)]
    return [(first + turn) % ranks for turn in turns]


@pytest.mark.parametrize("run", [1, 2, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_tokens_in_runs(ranks, run):
    """Of a file's sequences, one shorter than a run a rank and one without tokens; then more, and fewer."""
    rng = random.Random(ranks)
    lengths = [8 * run * ranks + 3, 5 * run * ranks, 0, 1, run * ranks - 1, run * ranks]
    ledgers = Ledgers(ranks, len(lengths))
    ledgers.deal_runs(np.array(lengths), run)
    expected = [in_runs(count, run, ranks, s) for s, count in enumerate(lengths)]
    for _ in range(60):
        for s, plain in enumerate(expected):
            checked(ledgers[s], plain, ranks, rng)
            assert ledgers.counts[s].tolist() == [plain.count(rank) for rank in range(ranks)]
        rank, some = rng.randrange(ranks), rng.choice([slice(None), np.array([4, 1, 0])])
        positions = np.array([[rng.randint(0, len(plain) + 2) for _ in range(4)] for plain in expected])[some]
        of_some = [expected[s] for s in np.arange(len(lengths))[some]]
        below = [[plain[:position].count(rank) for position in at] for plain, at in zip(of_some, positions)]
        assert ledgers.below(some, rank, positions).tolist() == below
        s = rng.randrange(len(lengths))
        before = len(expected[s])
        if rng.random() < 0.5:
            ledgers.deal([s], np.array([rng.randint(0, 9)]))
        else:
            ledgers.truncate([s], np.array([max(0, before - rng.randint(0, 9))]))
        del expected[s][ledgers[s].seqlen :]
        new = owners_of(ledgers[s], ranks)
        assert new[: len(expected[s])] == expected[s], "tokens stay where they are"
        for owner in new[len(expected[s]) :]:
            counts = [expected[s].count(rank) for rank in range(ranks)]
            assert counts[owner] == min(counts), "a token goes to a rank that holds the fewest"
            expected[s].append(owner)


def test_work_does_not_grow_with_the_turns():
    """A token more, the keys that queries see, and a token less: after 400 turns as after one."""
    counted, kept = [], []
    for turns in (1, 10, 400):
        ledger = Ledger(3)
        for _ in range(turns):
            ledger.place(Layout("zigzag", 4000 // turns - 3, 3))
            ledger.deal(2)
            ledger.deal(1)

        def step(ledger=ledger):
            ledger.deal(1)
            for rank in range(3):
                ledger.below(rank, [1200, 1201, 1202])
                ledger.ranges(rank, 4000)
                ledger.between(rank, 1200, 1203)
                ledger.numbered(rank, 400, 403)
            ledger.truncate(4000)

        step()  # the first counts what there is, and keeps it
        counted.append(calls(step, token_owners, layout))
        kept.append(len(ledger._pieces))
        for _ in range(100):
            ledger.place(Layout("striped", 70, 3))
            ledger.deal(10)
            ledger.truncate(4000)
        assert len(ledger._pieces) == kept[-1], "what is taken back leaves no trace"
    assert max(counted) <= 1.2 * min(counted), counted
    assert kept[-1] <= 3 * 400


def test_pages():
    """Sequences that grow in turn stay in few stretches; a full pool says so and changes nothing."""
    pages = Pages(64, 4, 2)
    for tokens in range(1, 100):
        pages.resize(0, tokens)
        pages.resize(1, tokens)
    assert [len(stretches(pages.table(s), 4, 0, 99)) for s in range(2)] == [1, 1]
    with pytest.raises(ArgumentError, match="14 free pages on this rank; 15 more"):
        pages.resize(0, 100 + 15 * 4 - 3)
    assert pages.free == 14
    assert stretches(pages.table(0), 4, 5, 6) == [(5, 6)]
    assert stretches(np.array([7, 8, 3], np.int32), 4, 3, 10) == [(31, 36), (12, 14)]


@pytest.mark.parametrize("count, tokens, rooms", [(30, [9, 0, 33, 4, 1], 2), (16, [8, 8, 8, 8, 8, 8, 8, 8], 0)])
def test_pages_spread(count, tokens, rooms):
    """Each sequence lies in one stretch, and grows there by as many pages as any other."""
    pages = Pages(count, 4, len(tokens))
    pages.spread(np.array(tokens))
    assert pages.free == count - sum(pages.needed(n) for n in tokens)
    for room in range(rooms + 1):
        wanted = [4 * (pages.needed(n) + room) for n in tokens]
        for sequence, most in enumerate(wanted):
            pages.resize(sequence, most)
        assert all(len(stretches(pages.table(s), 4, 0, most)) <= 1 for s, most in enumerate(wanted) if tokens[s])
    tables = np.concatenate([pages.table(s) for s in range(len(tokens))])
    assert len(set(tables.tolist())) == len(tables) == count - pages.free


def test_tables_of_all_sequences():
    """They are kept until a sequence's pages change, and are the right ones then."""
    pages, rng = Pages(200, 4, 3), random.Random(0)
    for _ in range(300):
        before = pages.tables(range(3))
        sequence, tokens = rng.randrange(3), rng.randint(0, 60)
        changed = pages.needed(tokens) != len(pages.table(sequence))
        pages.resize_each(np.array([sequence]), np.array([tokens]))
        for tables, order in ((pages.tables(range(3)), [0, 1, 2]), (pages.tables([2, 0]), [2, 0])):
            expected = [pages.table(s).tolist() for s in order]
            assert [table.tolist() for table in tables] == expected
            joined, starts = tables.joined
            assert joined.tolist() == [page for table in expected for page in table] and joined.dtype == np.int32
            assert [joined[a:b].tolist() for a, b in pairwise(starts)] == expected
        assert (pages.tables(range(3)) is before) == (not changed)


def test_a_layout_of_other_ranks():
    with pytest.raises(ArgumentError, match="it must have one a rank, 3"):
        Ledger(3).place(Layout("striped", 10, 4))


# Trees


def play(plans):
    """What every rank has in the end, as nested pairs (lower operand, higher), and how many rounds it took."""
    have, done = [(rank,) for rank in range(len(plans))], [0] * len(plans)
    rounds = [0] * len(plans)
    moved = True
    while moved:
        moved = False
        for rank, plan in enumerate(plans):
            if done[rank] == len(plan):
                continue
            move = plan[done[rank]]
            peer = move.peer
            if done[peer] == len(plans[peer]) or plans[peer][done[peer]].peer != rank:
                continue
            other = plans[peer][done[peer]]
            assert (move.sends, move.receives, move.final) == (other.receives, other.sends, other.final)
            own, other_tree = have[rank], have[peer]
            both = (own, other_tree) if rank < peer else (other_tree, own)
            have[rank] = have[rank] if not move.receives else other_tree if move.final else both
            have[peer] = have[peer] if not other.receives else own if move.final else both
            rounds[rank] = rounds[peer] = max(rounds[rank], rounds[peer]) + 1
            done[rank], done[peer], moved = done[rank] + 1, done[peer] + 1, True
    assert done == list(map(len, plans)), "nobody is left waiting"
    return have, max(rounds)


def leaves(tree):
    return [tree[0]] if isinstance(tree[0], int) else [leaf for part in tree for leaf in leaves(part)]


@pytest.mark.parametrize("ranks", [*range(1, 18), 64, 100])
def test_trees(ranks):
    """Every rank's partial counts once, on all ranks in the same order, or on the root; in few rounds."""
    rng = random.Random(ranks)
    for nodes in ([0] * ranks, [rank // 4 for rank in range(ranks)], [rng.randrange(3) for _ in range(ranks)]):
        for algorithm in ("butterfly", "levels"):
            have, rounds = play([reduction.moves(algorithm, nodes, rank) for rank in range(ranks)])
            assert len(set(map(str, have))) == 1 and sorted(leaves(have[0])) == list(range(ranks))
            power = 1 << (ranks.bit_length() - 1)
            assert algorithm == "levels" or rounds == power.bit_length() - 1 + (2 if ranks > power else 0)
            root = rng.randrange(ranks)
            plans = [reduction.moves(algorithm, nodes, rank, root) for rank in range(ranks)]
            have, rounds = play(plans)
            assert sorted(leaves(have[root])) == list(range(ranks))
            assert sum(move.sends for plan in plans for move in plan) == ranks - 1
            assert algorithm == "levels" or rounds <= (ranks - 1).bit_length()


def test_levels_send_once_between_nodes():
    """Of four ranks a node, one sends to other nodes."""
    nodes = [rank // 4 for rank in range(32)]
    for algorithm, most in (("levels", 1), ("butterfly", 4)):
        senders = {
            rank
            for rank in range(32)
            for move in reduction.moves(algorithm, nodes, rank)
            if move.sends and nodes[move.peer] != nodes[rank]
        }
        assert all(sum(nodes[rank] == node for rank in senders) == most for node in range(8))


def test_choice():
    """Few bytes: messages between pairs; many bytes: MPI_Allreduce; two levels where nodes have several ranks."""
    inside, between = DEFAULT.inside, DEFAULT.between
    apart, shared = list(range(64)), [rank // 8 for rank in range(64)]

    def seconds(algorithm, nbytes, nodes, **links):
        links = {"inside": inside, "between": between, **links}
        return reduction.predicted_seconds(algorithm, nbytes, nbytes // 128, nodes, **links)

    assert reduction.choose(4128, 32, apart, inside, between) == "butterfly"
    assert reduction.choose(64 * 2**20, 2**19, apart, inside, between) == "allreduce"
    assert reduction.choose(4128, 32, shared, inside, between) == "levels"
    assert reduction.choose(4128, 32, [0] * 64, inside, between) == "butterfly"
    assert reduction.choose(4128, 32, [0], inside, between) == "butterfly"
    factors = {"butterfly": [(1000, 1.0), (16_000, 9.0)], "allreduce": [(1000, 1.5)]}  # 5 of 4000 bytes
    for nbytes, algorithm in ((500, "butterfly"), (1000, "butterfly"), (4000, "allreduce"), (10**5, "allreduce")):
        assert reduction.choose(nbytes, 32, apart, inside, between, factors=factors) == algorithm
    assert reduction.choose(4128, 32, shared, inside, between, factors={"levels": [(4000, 99.0)]}) == "butterfly"
    for nodes, levels in (([0], False), ([0, 0], False), ([0, 1], False), ([0, 0, 1], True), ([0, 1, 2, 2], True)):
        assert ("levels" in reduction.algorithms(nodes)) == levels
    assert seconds("butterfly", 0, apart) == pytest.approx(6 * between.latency)
    assert seconds("allreduce", 0, apart) == pytest.approx(12 * between.latency)
    assert seconds("butterfly", 3000, apart, between=Link(0, 1000)) == pytest.approx(18)
    assert seconds("butterfly", 3000, shared, inside=Link(0, 1e12), between=Link(0, 1000)) == pytest.approx(72)
    assert seconds("levels", 3000, shared, inside=Link(0, 1e12), between=Link(0, 1000)) == pytest.approx(9)
