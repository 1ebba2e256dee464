"""Messages whose bytes are not ready yet, in which order they are posted, and when they are complete."""

import numpy as np
import pytest
from mpi4py import MPI

from mpiattn.backends.wire import WireBytes
from mpiattn.comm.exchange import Exchange
from mpiattn.comm.peers import Peers


@pytest.fixture
def exchange():
    made = Exchange(Peers(MPI.COMM_SELF))
    yield made
    made.close()


def wire(ready, number=0, answers=None):
    """Four bytes of a number, ready if its name is among the answers."""
    return WireBytes(np.full(4, number, np.uint8), lambda start, stop: lambda: ready in answers)


def test_what_is_ready_waits_for_nothing_of_the_other_direction(exchange):
    """A receive that may be written to is posted behind a send that is not ready, and a send behind such a receive."""
    for first, second in ((exchange.send, exchange.receive), (exchange.receive, exchange.send)):
        answers = {"second"}
        (late,) = first(MPI.COMM_SELF, wire("first", 7, answers), 0, 1)
        (early,) = second(MPI.COMM_SELF, wire("second", 7, answers), 0, 1)
        assert late.request is None and early.request is not None
        answers.add("first")
        exchange.wait([late, early])


def test_messages_of_a_direction_stay_in_order(exchange):
    """MPI matches them by it: a send that is ready does not overtake one that is not."""
    answers = {"second"}
    into = [np.zeros(4, np.uint8) for _ in range(2)]
    posted = [exchange.receive(MPI.COMM_SELF, WireBytes(array), 0, 1)[0] for array in into]
    sends = [
        exchange.send(MPI.COMM_SELF, wire(f"{name}", n, answers), 0, 1)[0] for n, name in ((1, "first"), (2, "second"))
    ]
    assert [send.request for send in sends] == [None, None]
    answers.add("first")
    exchange.wait([*posted, *sends])
    assert [array[0] for array in into] == [1, 2]


def test_a_transfer_lasts_until_it_is_over(exchange):
    """After MPI has done its part: the other side may have to say that it has read it."""
    answers, into = [False, False, True], np.zeros(4, np.uint8)
    wire = WireBytes(np.full(4, 7, np.uint8), over=lambda start, stop: answers.pop(0))
    posted = exchange.receive(MPI.COMM_SELF, WireBytes(into), 0, 1) + exchange.send(MPI.COMM_SELF, wire, 0, 1)
    while len(answers) > 1:
        assert not exchange.complete(posted)
    exchange.wait(posted)
    assert not answers and into.tolist() == [7] * 4


def test_pieces_come_when_they_are_ready(exchange):
    """Those of a collective call, which takes them at once, in whole items."""
    asked = []
    wire = WireBytes(
        np.zeros(7, np.uint8), lambda start, stop: lambda: asked.append(start) or asked.count(start) > 2, piece=5
    )
    seen = [(piece, asked.count(piece[0])) for piece in exchange.pieces(wire, 2)]
    assert seen == [((0, 4), 3), ((4, 7), 3)]
