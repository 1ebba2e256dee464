"""A rank's own chunk of the mesh while its tokens are still on their way from the caller's ranks."""

from typing import NamedTuple

PIECES = 4  # at most so many pieces of a chunk are waited for one by one
LEAST = 64  # tokens of a piece


class _Part(NamedTuple):
    """Tokens of a chunk that another rank sends, or that are here: then there are no requests.

    messages: (received array, where it belongs in the chunk or None if it is there) of each array.
    """

    tokens: range
    requests: list
    messages: list


def _joined(parts):
    """The tokens of some parts, as `Ranges`."""
    ranges = []
    for part in parts:
        start, stop = part.tokens.start, part.tokens.stop
        if ranges and ranges[-1][1] == start:
            start, _ = ranges.pop()
        ranges.append((start, stop))
    return tuple(ranges)


class Coming:
    """The own chunk of one kind in one pass; true as long as some of it has not been waited for.

    kind: "Q" or "KV".
    where: what the rank does, for error messages.
    """

    def __init__(self, backend, exchange, kind, where):
        self.backend, self.exchange, self.kind, self.where = backend, exchange, kind, where
        self._parts = {}  # by tokens
        self._sends, self._sent = [], []

    def __bool__(self):
        return bool(self._parts)

    def add(self, tokens, requests=(), rows=None, place=None):
        """Note tokens of an array that come, or that are here.

        tokens: slice of the chunk, the same for all of its arrays.  requests: of the messages with them.
        rows, place: as in `messages` of a part.
        """
        tokens = range(tokens.start, tokens.stop, tokens.step or 1)
        part = self._parts.setdefault(tokens, _Part(tokens, [], []))
        if requests:
            part.requests.extend(requests)
            part.messages.append((rows, place))

    def send(self, requests, rows):
        """Note an array that leaves."""
        self._sends += requests
        self._sent.append(rows)

    def poll(self):
        """Let MPI make progress."""
        self.exchange.complete([request for part in self._parts.values() for request in part.requests])

    def wait(self):
        """Wait for all tokens that have not been waited for; returns the events after which they can be read."""
        parts, self._parts = self._parts, {}
        return self._wait(parts.values())

    def pieces(self):
        """Wait for the tokens piece by piece; yields the `Ranges` and events of each.

        The pieces and their order depend on no timing.  The first has what this rank itself had, the next ones come
        from ranks further and further behind it, as they send.
        """
        parts = sorted(self._parts.values(), key=lambda part: part.tokens.start)
        if any(part.tokens.step > 1 for part in parts):  # the tokens of several ranks alternate
            yield ((0, max(part.tokens.stop for part in parts)),), self.wait()
            return
        total, before = sum(len(part.tokens) for part in parts), 0
        count = max(1, min(PIECES, total // LEAST))
        pieces = [[] for _ in range(count)]
        for part in parts:
            pieces[before * count // total].append(part)
            before += len(part.tokens)
        pieces = list(filter(None, pieces))
        own = next((i for i, piece in enumerate(pieces) if any(not part.requests for part in piece)), 0)
        for piece in reversed(pieces[own + 1 :] + pieces[: own + 1]):
            for part in piece:
                del self._parts[part.tokens]
            yield _joined(piece), self._wait(piece)

    def _wait(self, parts):
        self.exchange.wait([request for part in parts for request in part.requests], self.where)
        events = []
        for rows, place in (message for part in parts for message in part.messages):
            event = self.backend.arrived(rows)
            if place is not None:
                self.backend.wait(event)
                event = self.backend.copy(place, rows)
            events.append(event)
        return tuple(events)

    def finish(self):
        """Wait for what leaves."""
        self.exchange.wait(self._sends, self.where)
        for rows in self._sent:
            self.backend.sent(rows)
        self._sends, self._sent = [], []
