"""What a plan keeps on a rank for calls to come: the steps of calls like those before, and their row intervals.

Calls without documents are alike, and so are calls with the same documents: every layer of a network has them.
"""

from itertools import chain, pairwise

import numpy as np

from ..schedule.ranges import increasing, places, positions
from ..schedule.rank_steps import RankSteps

RECENT = 8  # sets of documents of which the calls are kept
# Limit in bytes for the arrays of calls that are alike, and of all others with documents: intervals of 8 million rows.
KEPT_BYTES = 64 * 2**20
FEW_ROWS = 0.3  # share of rows that see a key, below which they are copied to lie side by side
NARROW = 256  # keys of an interval, on average, up to which one launch for all lists is the faster


def _side_by_side(parts):
    """Arrays (lists, groups, queries) as one; those with fewer lists are filled with empty intervals."""
    if len(parts) == 1:
        return parts[0]
    lists = max(map(len, parts))
    return np.concatenate([np.pad(part, ((0, lists - len(part)), (0, 0), (0, 0))) for part in parts], axis=2)


def _narrow(begin, end):
    """Whether intervals hold few keys, so that what a launch costs besides its pairs counts."""
    keys = np.maximum(end - begin, 0)
    return keys.sum() <= NARROW * np.count_nonzero(keys)


def _seeing(begin, end, apart):
    """The queries that a launch takes, as a slice: from the first to the last that sees a key; None if these are all.

    begin, end: (lists, groups, queries).  apart: whether a launch may take rows that do not lie side by side: if few
        see a key, as of a border along a grid's columns, the result is the numbers of these, int64.
    """
    some = np.flatnonzero((begin < end).any(axis=(0, 1)))
    rows = slice(int(some[0]), int(some[-1]) + 1)
    if apart and len(some) < FEW_ROWS * (rows.stop - rows.start):
        return some
    return None if rows == slice(0, begin.shape[2]) else rows


def _working(begin, end):
    """The numbers of the lists in which a query sees a key.  begin, end: (lists, groups, queries)."""
    return [number for number in range(len(begin)) if (begin[number] < end[number]).any()]


def _positions(tokens):
    """Positions as an array.  tokens: `Ranges` of them."""
    return np.concatenate([np.arange(start, stop) for start, stop in tokens])


class AlikeCalls:
    """What is kept for calls that are alike.  Arrays are in the back end's memory.

    activity: the `Activity` of this rank's plane in these calls.
    arguments: by which the caller named their documents, as of `CallCache.activity`.
    nbytes: of the arrays.
    """

    def __init__(self, backend, activity):
        self.activity, self.arguments, self.nbytes = activity, (), 0
        self._backend, self._intervals, self._steps, self._sorting, self._rows = backend, {}, {}, None, {}
        self._piece_steps = {}

    def steps(self, schedule, rank):
        """The `RankSteps` of a pass, made once."""
        steps = self._steps.get(schedule.direction)
        if steps is None or steps.schedule is not schedule:
            steps = self._steps[schedule.direction] = RankSteps(schedule, rank, self.activity)
        return steps

    def piece_steps(self, direction, make):
        """The `PieceSteps` of a pass of a divided plan, which `make` returns; made once."""
        if direction not in self._piece_steps:
            self._piece_steps[direction] = make()
        return self._piece_steps[direction]

    def adopt(self, steps):
        """Take the `RankSteps` that another plan has made, to save making them."""
        self._steps[steps.schedule.direction] = steps

    def intervals(self, queries, keys):
        """The columns [begin, end) of some keys, in order of position, that each of some queries sees.  Made once.

        queries, keys: ((number of a chunk, `Ranges` of its tokens), ...).
        Returns the launches that the block takes, each (rows, fields): rows are those of `_seeing`, None for all,
        and fields are those of `BlockInputs`.  There is one for every list with work, or one for all where the back
        end takes them so and they are narrow.  There is always one, so that a pass without work has its events too.
        """
        launches = self._intervals.get((queries, keys))
        if launches is None:
            columns = increasing(positions(self.activity.k_layout, *chunk) for chunk in keys)
            pairs = [self.activity.columns(chunk, columns, rows) for chunk, rows in queries]
            begin, end = (_side_by_side(side) for side in zip(*pairs))
            working = _working(begin, end)
            launches = self._kept((queries, keys), self._launches(begin, end, working or [0]))
        return launches

    def between(self, sequence, queries, keys):
        """As `intervals`, of a sequence alone and of tokens by position; no launch if no query sees a key.

        queries, keys: positions in the sequence, as `Ranges`.
        """
        launches = self._intervals.get((sequence, queries, keys))
        if launches is None:
            activity = self.activity.of_sequences(slice(sequence, sequence + 1))
            begin, end = activity.columns_at(_positions(queries), [range(*part) for part in keys])
            working = _working(begin, end)
            launches = self._launches(begin, end, working) if working else []
            launches = self._kept((sequence, queries, keys), launches)
        return launches

    def _launches(self, begin, end, lists):
        """The launches of some lists of intervals.  begin, end: (all lists, groups, queries).  lists: their numbers."""
        together = len(lists) > 1 and self._backend.takes_lists and _narrow(begin, end)
        rows = None
        if self.activity.table.exact and (begin < end).any():
            rows = _seeing(begin, end, together)
        if rows is not None:
            begin, end = begin[:, :, rows], end[:, :, rows]
        if together:
            sides = [[np.stack([side[number] for number in lists], axis=-1) for side in (begin, end)]]
        else:
            sides = [(begin[number], end[number]) for number in lists]
        return [(rows, dict(zip(("begin", "end"), self._in_memory(bounds)))) for bounds in sides]

    def _kept(self, key, launches):
        """Keep launches while there is room for their arrays; returns them."""
        nbytes = sum(array.nbytes for _, fields in launches for array in fields.values())
        if self.nbytes + nbytes <= KEPT_BYTES:
            self._intervals[key] = launches
            self.nbytes += nbytes
        return launches

    def _in_memory(self, arrays):
        return tuple(self._backend.contiguous(array, array.itemsize) for array in arrays)

    def rows(self, held, tokens):
        """The rows of some tokens in arrays of the tokens `held`, both `Ranges`.  Made once."""
        rows = self._rows.get((held, tokens))
        if rows is None:
            slices = places(held, tokens)
            (rows,) = self._in_memory([np.concatenate([np.arange(part.start, part.stop) for part in slices])])
            self._rows[held, tokens] = rows
            self.nbytes += rows.nbytes
        return rows

    def sorting(self, held):
        """The rows of packed keys in order of position, and the inverse; () if they lie in that order.  Made once.

        held: the `Places` of the keys.
        """
        if self._sorting is None:
            chunks = (positions(self.activity.k_layout, *chunk) for chunk in held.tokens["KV"].items())
            parts, rows = list(filter(len, chain(*chunks))), ()
            if held.rows["KV"] and any(tokens[-1] > others[0] for tokens, others in pairwise(parts)):
                order = np.argsort(np.concatenate([np.arange(t.start, t.stop, t.step) for t in parts]), kind="stable")
                rows = order, np.argsort(order)
            self._sorting = self._in_memory(rows)
            self.nbytes += sum(array.nbytes for array in self._sorting)
        return self._sorting

    @property
    def rows_bytes(self):
        """Bytes of the rows of `rows` and `sorting`."""
        return sum(rows.nbytes for rows in (*(self._sorting or ()), *self._rows.values()))

    def free(self):
        """Free the arrays."""
        self._intervals, self._sorting, self._rows, self.nbytes = {}, None, {}, 0


class CallCache:
    """The `AlikeCalls` of a plan on this rank: without documents, and with each of the last `RECENT` sets of documents.

    activity: that of calls without documents, in which it is the same for every sequence.
    sequences: the slice of the batch that this rank's plane computes.
    The attribute `without_documents` has the `AlikeCalls` without documents.
    """

    def __init__(self, backend, activity, sequences):
        self._backend, self._activity, self._sequences = backend, activity, sequences
        self.without_documents = AlikeCalls(backend, activity)
        self._recent = {}  # by the activity of the whole batch, the latest last

    def activity(self, arguments, make_documents):
        """The `Activity` of a call, the same object for calls like it; these count as used last, and are kept longest.

        arguments: a tuple that is equal for calls that name their documents alike; () if no other call does.
        make_documents: returns those documents, as of `mpiattn.problem.documents.documents`.  It takes long where each
            sequence has its own.
        """
        alike = [activity for activity, calls in self._recent.items() if arguments and calls.arguments == arguments]
        if not alike:
            documents = make_documents()
            if documents is None:
                return self._activity
            alike = [activity for activity in self._recent if _equal(activity.documents, documents)]
        (activity,) = alike or [self._activity.with_documents(documents)]
        calls = self._recent.pop(activity, None)
        while len(self._recent) >= RECENT or sum(other.nbytes for other in self._recent.values()) > KEPT_BYTES:
            self._recent.pop(next(iter(self._recent))).free()  # an executor may refer to it until its next call
        if calls is None:
            calls = AlikeCalls(self._backend, activity.of_sequences(self._sequences))
        calls.arguments = arguments
        self._recent[activity] = calls
        return activity

    def alike(self, activity):
        """The `AlikeCalls` with an activity that `activity` has returned."""
        return self.without_documents if activity is self._activity else self._recent[activity]

    def released(self):
        """A cache of the same plan that keeps nothing."""
        return CallCache(self._backend, self._activity, self._sequences)


def _equal(groups, others):
    """Whether two results of `mpiattn.problem.documents.documents` are equal."""
    return len(groups) == len(others) and all(
        np.array_equal(cuts, of) for group, other in zip(groups, others) for cuts, of in zip(group, other)
    )
