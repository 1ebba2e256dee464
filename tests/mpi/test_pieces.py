"""Collective calls of what becomes ready piece by piece: each piece travels while the next is made ready."""

import numpy as np
import pytest

from mpiattn.backends import wire
from mpiattn.backends.wire import WireBytes
from mpiattn.comm.exchange import Exchange
from mpiattn.comm.peers import Peers

TOKENS, ROW = 10, 4  # tokens of a chunk, bytes of a token


class Pieces:
    """What one rank sends and receives; nothing is ready before `allow`."""

    def __init__(self, sent, received, piece):
        self.allowed, self.asked, self.taken = 0, [], []
        self.outgoing = WireBytes(sent.view(np.uint8), self._ready, piece=piece)
        self.incoming = WireBytes(received.view(np.uint8), taken=lambda *part: self.taken.append(part), piece=piece)

    def _ready(self, start, stop):
        self.asked.append((start, stop))
        return lambda: stop <= self.allowed


@pytest.mark.parametrize("call", ["allgather", "alltoall"])
@pytest.mark.parametrize("max_message", [2**30, 3])
def test_a_piece_travels_while_the_next_is_made_ready(comm, call, max_message):
    """The last rank has nothing in the allgather, and yet posts as many calls, in the order of the others."""
    exchange, everyone = Exchange(Peers(comm, 60.0), max_message), range(comm.size)
    if call == "allgather":
        lengths = [TOKENS] * max(1, comm.size - 1) + [0] * (comm.size > 1)
        sent = np.arange(lengths[comm.rank], dtype=np.int32) + 100 * comm.rank
        received = np.full(TOKENS * comm.size, -1, np.int32)
        offsets = [TOKENS * rank for rank in everyone]
        pieces = Pieces(sent, received, 4 * ROW)
        given = pieces.outgoing, pieces.incoming, lengths, offsets, ROW
        expected = [100 * rank + i if i < lengths[rank] else -1 for rank in everyone for i in range(TOKENS)]
    else:
        sent = np.repeat(np.arange(comm.size, dtype=np.int32), TOKENS) + 100 * comm.rank
        received = np.full(TOKENS * comm.size, -1, np.int32)
        pieces = Pieces(sent, received, 4 * ROW * max(1, comm.size - 1))
        counts, offsets = [TOKENS] * comm.size, [TOKENS * rank for rank in everyone]
        sides = (wire.Pieces(array, counts, offsets) for array in (pieces.outgoing, pieces.incoming))
        given = *sides, ROW, TOKENS
        expected = [100 * rank + comm.rank for rank in everyone for _ in range(TOKENS)]
    posted = getattr(exchange, call)(comm, *given)
    step = 4 if max_message > ROW else 1  # tokens of a round
    assert len(posted) == -(-TOKENS // step)
    assert sorted(pieces.asked) == pieces.asked or call == "alltoall"  # begun in the order in which they are needed
    if len(sent):
        assert all(transfer.request is None for transfer in posted)
    pieces.allowed = len(sent) * ROW if call == "alltoall" else step * ROW
    exchange.wait(posted[:1])
    first = sorted(pieces.taken)
    assert first[:1] == [(0, step * ROW)], "the first round is here"
    if call == "allgather" and len(sent):
        assert posted[1].request is None, "the second is not ready yet"
    pieces.allowed = len(sent) * ROW
    exchange.wait(posted)
    assert received.tolist() == expected
    covered = np.zeros(len(received) * ROW, int)
    for start, stop in pieces.taken:
        covered[start:stop] += 1
    assert (covered.reshape(-1, ROW) == (np.array(expected) >= 0)[:, None]).all(), "what came is taken once"
    exchange.close()
    comm.Barrier()
