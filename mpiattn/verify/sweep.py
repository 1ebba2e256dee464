"""Float64 gradients by one sweep over pairs: keys in turns, and within a turn the queries that see any of its keys.

A pair gives to dq, dk and dv at once.  Every turn completes its keys, as far as these queries go; a query is complete
after the last turn that it sees keys of.  In memory are a turn of keys, and dq of queries that are not complete.
"""

import numpy as np

from . import reference
from .compare import largest, steps

TURN_BYTES = 32 * 2**20  # of keys, values and their gradients in memory at a time


def row_bytes(problem, heads):
    """Memory that a token of so many heads takes: two tensors, what a step gives to their gradients, and sums of it."""
    return 8 * problem.batch * heads * 3 * (problem.head_dim + problem.value_dim)


def key_turns(problem, keys_of_ranks):
    """The positions of all ranks' keys in turns.

    A turn has a piece of every rank's keys: where queries see only keys nearby, all ranks then have work in it.
    """
    count = sum(map(len, keys_of_ranks))
    turns = max(1, len(steps(count, row_bytes(problem, problem.kv_heads), TURN_BYTES)))
    pieces = zip(*(np.array_split(keys, turns) for keys in keys_of_ranks))
    return [np.sort(np.concatenate(turn)) for turn in pieces]


class _Incomplete:
    """dq of queries: sums over the turns so far, of those that have seen keys and have not seen all.

    begin, end: the keys that each query sees lie in [begin, end); one that sees none is complete after the first turn.
    """

    def __init__(self, problem, turns, begin, end):
        of_key = np.zeros(problem.seqlen_k + 2, np.int64)  # two more, so that ends are numbers of elements
        for turn, positions in enumerate(turns):
            of_key[positions] = turn
        ends = np.stack([begin, np.maximum(end, begin + 1)], axis=1).reshape(-1)
        self._first, self._last = (extreme.reduceat(of_key, ends)[::2] for extreme in (np.minimum, np.maximum))
        self._queries, self.sums = np.zeros(0, np.int64), np.zeros((problem.batch, 0, problem.heads, problem.head_dim))

    def go_on(self, turn):
        """Begin a turn; returns the queries, and which of them it completes."""
        queries = np.flatnonzero((self._first <= turn) & (turn <= self._last))
        _, now, before = np.intersect1d(queries, self._queries, assume_unique=True, return_indices=True)
        sums = np.zeros((len(self.sums), len(queries), *self.sums.shape[2:]))
        sums[:, now] = self.sums[:, before]
        self._queries, self.sums = queries, sums
        return queries, self._last[queries] == turn


def sweep(source, positions, turns, statistics, see_rows=None, see_keys=None, sums_of=None):
    """Compute what queries at some increasing positions, and keys, give to gradients.

    source: a `mpiattn.verify.compare.Source` that has dout.  turns: increasing positions of keys, all keys if dq is
    computed.  statistics(queries, dout): lse and delta, over all keys, of some of the queries, which are numbers of
    positions.  see_rows(queries, dq): called with each query once.  see_keys(positions, dk, dv): called with each turn.
    Without one of these its gradients are not computed.  sums_of(positions): the `reference_biases.Sums` to which the
    pairs of a turn are added; see_keys gets them too.  Returns the largest absolute values in q and in k.
    """
    p, of = source.problem, ("q" if see_rows else "") + ("kv" if see_keys else "")
    begin, end = reference.bounds(positions, p.batch, **source.masks)
    some = begin < end
    begin, end = np.where(some, begin, p.seqlen_k).min(axis=0), np.where(some, end, 0).max(axis=0)
    incomplete = _Incomplete(p, turns, begin, end) if see_rows else None
    sizes = np.zeros(2)
    for turn, at in enumerate(turns):
        k, v = source.rows("k", at), source.rows("v", at)
        dk, dv = np.zeros(k.shape), np.zeros(v.shape)
        sums = () if sums_of is None else sums_of(at)
        first, last = np.searchsorted(at, (begin, end))
        if see_rows:
            queries, complete = incomplete.go_on(turn)
        else:
            queries = np.flatnonzero(first < last)
        for step in steps(len(queries), row_bytes(p, p.heads)):
            these = queries[step]
            seen = slice(first[these].min(), last[these].max())
            q, dout = source.rows("q", positions[these]), source.rows("dout", positions[these])
            of_q, of_k, of_v = reference.gradients(
                dout,
                q,
                k[:, seen],
                v[:, seen],
                *statistics(these, dout),
                positions=positions[these],
                keys=at[seen],
                of=of,
                sums=sums,
                **source.scores,
                **source.masks,
            )
            sizes = np.maximum(sizes, [largest(q), largest(k[:, seen])])
            if see_keys:
                dk[:, seen] += of_k
                dv[:, seen] += of_v
            if see_rows:
                incomplete.sums[:, step] += of_q
                done = complete[step]
                see_rows(these[done], incomplete.sums[:, step][:, done])
        if see_keys:
            see_keys(at, dk, dv, *([] if sums_of is None else [sums]))
    return sizes
