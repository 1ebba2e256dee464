"""The tokens of every chunk that the tiles of a mesh need, of all ranks at once and for one set of documents at most.

`schedule.needed` gives the same for one rank and one call, with documents.  Both take from each run of a chunk's tokens
those from the first to the last that is needed.
"""

import numpy as np

NONE = np.iinfo(np.int64).max  # the start of no tokens; their stop is 0
PIECE = 2**16  # numbers looked at at a time


def _runs(layout):
    """Start and stop in the sequence, and number of the chunk's tokens before, of every run: int64 (runs, chunks)."""
    starts, lengths, _ = layout.all_ranges()
    return starts, starts + lengths, np.cumsum(lengths, axis=0) - lengths


class Spans:
    """The keys that the queries of every run see, and the queries that see a key of every run.

    The runs of the layouts are ranges of consecutive tokens: no layout is striped.
    """

    def __init__(self, mask, q_layout, k_layout):
        self.runs = _runs(q_layout), _runs(k_layout)
        (q_start, q_stop, _), (k_start, k_stop, _) = self.runs
        tokens = mask.unpadded
        q_start, q_stop = (ends.clip(tokens.start, tokens.stop) for ends in (q_start, q_stop))
        some_q, some_k = q_start < q_stop, k_start < k_stop
        (lo, lo_of_last), (_, hi) = mask.keys_seen_by(np.stack([q_start, q_stop - 1]).clip(0, max(mask.seqlen - 1, 0)))
        # whether each query sees all that those before it see: then the last of some runs sees what all of them see
        self.nested = not lo_of_last[some_q].any()
        first, after = mask.queries_seeing(k_start, k_stop)
        self.intervals = (
            (np.where(some_k, first, NONE), np.where(some_k, after, 0)),
            (np.where(some_q, lo, NONE), np.where(some_q, hi, 0)),
        )

    def tokens(self, column, chunks, others):
        """As `Work.tokens`."""
        first, last = self.ends(column, chunks, others)
        return np.where(first < last, last - first, 0).sum(axis=0)

    def ends(self, column, chunks, others):
        """The tokens [first, last) of each run that every rank needs: two int64 arrays (runs, hops, ranks).

        chunks: those that the rank gathers, of keys with `column`, else of queries: (hops, ranks).
        others: the chunks of the other side of its tile: (hops, ranks).
        """
        starts, stops, before = (ends[:, chunks] for ends in self.runs[column])
        lo, hi = (
            bound[:, others].reshape(len(bound) * len(others), chunks.shape[1]) for bound in self.intervals[column]
        )
        if self.nested:
            lo, hi = lo.min(axis=0, keepdims=True), hi.max(axis=0, keepdims=True)
        first, last = np.full_like(starts, NONE), np.zeros_like(starts)
        piece = max(1, PIECE // max(starts.size, 1))
        for i in range(0, len(lo), piece):
            lowest, highest = (ends[i : i + piece, None, None] for ends in (lo, hi))
            begin, end = np.maximum(starts, lowest), np.minimum(stops, highest)
            some = begin < end
            np.minimum(first, np.where(some, begin - starts + before, NONE).min(axis=0), out=first)
            np.maximum(last, np.where(some, end - starts + before, 0).max(axis=0), out=last)
        return first, last

    def moved(self, column, groups, own):
        """Tokens that groups of chunks of the other side need, except the group of their owner, summed over all groups.

        As of `ends`, counted from each run's first token that a group needs to its last.
        groups: chunks of the other side: (groups, members).
        own: the group of every chunk's owner: (chunks,).
        """
        lo, hi = (bound[:, groups].swapaxes(0, 1).reshape(len(groups), -1) for bound in self.intervals[column])
        lo = np.where(lo < hi, lo, NONE)
        hi = np.where(lo < hi, hi, 0)
        if self.nested:
            lo, hi = lo.min(axis=1, keepdims=True), hi.max(axis=1, keepdims=True)
        order = np.argsort(lo, axis=1)
        lo = np.take_along_axis(lo, order, axis=1)
        hi = np.maximum.accumulate(np.take_along_axis(hi, order, axis=1), axis=1)
        apart = lo < NONE  # begins an interval that the ones before do not reach
        apart[:, 1:] &= lo[:, 1:] > hi[:, :-1]
        closes = np.ones_like(apart)  # the interval's last; those of no tokens come at the end
        closes[:, :-1] = apart[:, 1:]
        of, _ = np.nonzero(apart)
        start = lo[apart]
        stop = hi[closes & (hi > 0)]
        starts, stops, _ = self.runs[column]
        some = starts < stops
        by_start = np.sort(starts[some])
        within = np.searchsorted(by_start, stop[:-1] - 1, "right") == np.searchsorted(by_start, start[1:], "right")
        gaps = (start[1:] - stop[:-1])[within & (of[1:] == of[:-1])]  # inside a run they travel too
        # What owners have of it does not travel.  One search finds it for all groups, if each group's tokens are moved
        # so far that they follow those of the group before.
        far = stops.max(initial=0) + 1
        group = np.broadcast_to(own, starts.shape)[some]
        starts, stops = starts[some] + group * far, stops[some] + group * far
        start, stop = start + of * far, stop + of * far
        i, j = np.searchsorted(stop, starts, "right"), np.searchsorted(start, stops, "left") - 1
        had = i <= j
        owned = np.minimum(stop[j[had]], stops[had]) - np.maximum(start[i[had]], starts[had])
        return int((stop - start).sum() + gaps.sum() - owned.sum())
