"""Who shares a limit with whom, and whether what all of them need has room."""

import numpy as np
import pytest

from mpiattn.comm.room import Room, spread


def of(*needs):
    return np.array(needs, np.int64)


def test_who_shares():
    """Ranks of a node with the same mark: those of other nodes have other limits, and mark 0 is a rank's own."""
    shared, own = (100, 0, 7), (30, 0, 0)
    room = Room([0, 0, 1], [[shared], [shared, own], [shared]])
    assert [shared.ranks for shared in room.shared] == [[0, 1], [1], [2]]
    assert room.shortage(of(60, 30, 100)) is None
    assert room.shared[room.shortage(of(75, 30, 0))].ranks == [0, 1]
    assert room.shared[room.shortage(of(0, 31, 0))].ranks == [1] and room.mark(room.shortage(of(0, 31, 0))) == 0
    assert room.shared[room.shortage(of(0, 0, 101))].ranks == [2] and room.mark(room.shortage(of(0, 0, 101))) == 7
    assert room.shared[room.shortage(of(90, 20, 200))].ranks == [2]  # it lacks the most
    assert room.least() == 30
    assert [shared.ranks for shared in Room([0, 0], [[own], [own]]).shared] == [[0], [1]]


def test_what_is_left_is_read_at_different_times():
    room = Room([0, 0], [[(100, 5, 7)], [(90, 10, 7)]])
    assert room.shared[0].left == 90 - 15 and room.least() == 37


def test_advice_leaves_some():
    """For what is not foreseen."""
    room = Room([0, 0], [[(2**34, 0, 7)]] * 2)
    (tighter,) = room.tighter().shared
    assert tighter == ([0, 1], 2**34 - 2**29 - 2 * 2**24) and room.shared[0].left == 2**34
    assert Room([0], [[(5, 0, 7)]]).tighter().least() == 0


def test_no_limits():
    room = Room([0, 0], [[], []])
    assert room.shortage(of(2**60, 2**60)) is None


@pytest.mark.parametrize(
    "nodes, left, each, words",
    [
        ([0] * 4, 250, 100, "a node has room for 2 of these 4 ranks: take at least 2 nodes"),
        ([0] * 7, 350, 100, "a node has room for 3 of these 7 ranks: take at least 3 nodes"),
        ([0] * 4, 90, 100, "take more ranks, on more nodes: each then needs less"),
        ([0], 90, 100, "take more ranks, on more nodes: each then needs less"),
    ],
)
def test_more_nodes(nodes, left, each, words):
    room = Room(nodes, [[(left, 0, 1)] for _ in nodes])
    assert spread(room, np.full(len(nodes), each)) == words
