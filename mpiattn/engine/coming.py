"""A rank's own chunk of the mesh while its tokens are still on their way from the caller's ranks."""

from time import perf_counter as clock
from typing import NamedTuple

PIECES = 4  # at most so many pieces of a chunk are waited for one by one
LEAST = 256  # tokens of a piece: in each launch a query takes the time of a hundred keys more than it sees


class _Part(NamedTuple):
    """Tokens of a chunk that another rank sends, or that are here: then there are no requests.

    messages: (received array, [(where some of it belongs, that part of it)]) of each; nothing of what is there.
    """

    tokens: range
    requests: list
    messages: list


class Coming:
    """The arrays that a rank exchanges before a pass.

    kind: "Q" or "KV", the kind of chunk that may come during the pass; `wait_for_other` waits for the other one.
    where: what the rank does, for error messages.
    arrived: when the last of them was there, by the clock.
    """

    def __init__(self, backend, exchange, kind, where):
        self.backend, self.exchange, self.kind, self.where = backend, exchange, kind, where
        self._parts, self._other = {}, _Part(range(0), [], [])  # parts by their tokens
        self._sends, self._sent, self.arrived = [], [], 0.0
        self.posting = ()  # what is about to be posted: an interrupt may come before `add` and `send`

    @property
    def receiving(self):
        """Whether there is a part of the chunk of `kind` that has not been waited for."""
        return bool(self._parts)

    def add(self, kind, tokens, requests=(), rows=None, places=()):
        """Note tokens of an array that come, or that are here.

        tokens: slice of the chunk, the same for all arrays of a kind.  requests: of the messages with them.
        rows, places: as in `messages` of a part.
        """
        part = self._other
        if kind == self.kind:
            tokens = range(tokens.start, tokens.stop, tokens.step or 1)
            part = self._parts.setdefault(tokens, _Part(tokens, [], []))
        if requests:
            part.requests.extend(requests)
            part.messages.append((rows, places))

    def send(self, requests, rows):
        """Note an array that leaves."""
        self._sends += requests
        self._sent.append(rows)

    def poll(self):
        """Let MPI make progress with all that has not been waited for."""
        received = [request for part in self._parts.values() for request in part.requests]
        self.exchange.complete(self._sends + received)

    def wait_for_other(self):
        """Wait for the chunk of the other kind."""
        other, self._other = self._other, None
        self._wait([other])

    def wait(self):
        """Wait for all tokens that have not been waited for."""
        parts, self._parts = self._parts, {}
        self._wait(parts.values())

    def pieces(self):
        """Wait for the tokens piece by piece; yields the `Ranges` of each.

        The pieces and their order depend on no timing.  The first has what this rank itself had, the next ones come
        from ranks further and further behind it, as they send.
        """
        parts = sorted(self._parts.values(), key=lambda part: part.tokens.start)
        total, before = sum(len(part.tokens) for part in parts), 0
        count = max(1, min(PIECES, total // LEAST))
        if any(part.tokens.step > 1 for part in parts):  # the tokens of several ranks alternate
            count = 1
        pieces = [[] for _ in range(count)]
        for part in parts:  # which follow one another
            pieces[before * count // total].append(part)
            before += len(part.tokens)
        pieces = list(filter(None, pieces))
        own = next((i for i, piece in enumerate(pieces) if any(not part.requests for part in piece)), 0)
        for piece in reversed(pieces[own + 1 :] + pieces[: own + 1]):
            for part in piece:
                del self._parts[part.tokens]
            self._wait(piece)
            yield ((piece[0].tokens.start, max(part.tokens.stop for part in piece)),)

    def _wait(self, parts):
        """Wait until parts can be read by anything: launches, copies and messages."""
        self.exchange.wait([request for part in parts for request in part.requests], self.where)
        messages = [message for part in parts for message in part.messages]
        for event in [self.backend.arrived(rows) for rows, _ in messages]:
            self.backend.wait(event)
        for event in [self.backend.copy(*place) for _, places in messages for place in places]:
            self.backend.wait(event)
        self.arrived = clock()

    def finish(self):
        """Wait for what leaves."""
        self.exchange.wait(self._sends, self.where)
        for rows in self._sent:
            self.backend.sent(rows)
        self._sends, self._sent, self.posting = [], [], ()
