"""One decoding call: its checked arguments, and attention over this rank's keys before results are combined."""

import functools
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from ..arguments.arguments import Arguments
from ..arguments.arrays import Axes, Required, checked_array
from ..arguments.counts import sequence_numbers
from ..backends.block import BlockInputs
from ..comm.collective_calls import Collective
from ..comm.refusal import of_call
from ..comm.whole_arrays import check_root
from ..errors import ArgumentError
from ..masks.interval_mask import checked_mask
from ..masks.sequence import Window
from ..problem.problem import Problem, check_scale_given
from ..system.choices import one_of
from .biases import DecodeBiases, checked_functions
from .combine import Partial, partial_bytes
from .interval_lists import interval_lists

QUERIES = Axes(("sequences", "queries", "heads", "head_dim"))
RESULTS = Axes(("sequences", "queries", "heads", "value_dim"))
ROWS = Axes(("sequences", "heads", "queries"))
SINKS = Axes(("heads",))


def _problem_of(cache, queries, heads, arguments):
    """The `Problem` of a call, and what its queries see of a sequence, counted from its end.  Raises ArgumentError.

    The problem is that of a sequence as long as the cache can hold.  What queries see: int64 (2 * queries,), the first
    key of each and then past the last; a negative position in a sequence that is shorter means its first key.
    The cache keeps those of the last call: decoding makes the same one for every token.
    """
    scores = {name: getattr(arguments, name) for name in ("causal", "window", "softcap", "scale")}
    longest = cache.ranks * cache.pages * cache.page_size
    # then the window goes by places too, and is a part of the mask
    mask = None if arguments.window is None or arguments.mask is None else checked_mask(arguments.mask)
    by_places = mask is not None and mask.places(longest) is not None
    key = repr((queries, heads, *scores.values(), by_places))
    if key not in cache.last_problem:
        check_scale_given(arguments.scale, cache.shared_kv, cache.head_dim)
        problem = Problem(
            seqlen=queries,
            heads=heads,
            head_dim=cache.head_dim,
            seqlen_k=longest,
            kv_heads=cache.kv_heads,
            value_dim=cache.value_dim,
            shared_kv=cache.shared_kv,
            dtype=cache.dtype,
            **scores,
        )
        limits = problem.whole_mask
        if by_places:
            limits = replace(limits, window=(None, None))
        bounds = limits.key_interval(np.arange(queries))
        cache.last_problem = {key: (problem, np.concatenate(bounds, axis=None) - longest)}
    return cache.last_problem[key]


def _is_cache(cache):
    return isinstance(cache, Collective) and cache.KIND == "cache"


def checked_cache(cache):
    """The cache of a call.  Raises ArgumentError, on this rank alone, if it is none."""
    if not _is_cache(cache):
        raise ArgumentError(f"cache is a {type(cache).__name__}; it must be a KVCache: the queries come first, then it")
    return cache


def refused(method):
    """What a decoding call does with a keyword that it does not have, for `mpiattn.comm.refusal.refusing`."""
    return of_call(method, lambda q=None, cache=None, *args, **how: cache if _is_cache(cache) else None)


class DecodeCall:
    """One decoding call with a cache.

    collective: the collective call in progress, a `mpiattn.comm.collective_calls.Call`.
    given: the `DecodeArguments`.  algorithms: values of `algorithm` allowed besides "auto".
    A row is one query of one sequence; there are `queries` rows per sequence.
    """

    def __init__(self, collective, cache, q, given, algorithms=()):
        self.cache, self.backend, self.q_given = cache, cache.combiner.backend, q
        collective.buffers.append(self)
        self.buffers = ()  # more arrays of the call's transfers, which stay alive if it fails
        with collective.agreement(given.check) as same:
            self.sequences = sequence_numbers(given.sequences, cache.sequences)
            wanted = Required((len(self.sequences), None, None, cache.head_dim), cache.dtype, QUERIES)
            q = checked_array(self.backend, "q", q, wanted)
            check_root(given.root, cache.ranks)
            if given.algorithm is not None:
                one_of("algorithm", given.algorithm, ("auto", *algorithms))
            self.index = cache.storage.index_of(self.sequences)
            lengths = cache.storage.ledgers.lengths[self.index]
            self.queries, self.heads = q.shape[1:3]
            if self.heads % cache.kv_heads:
                swapped = "; axes 1 and 2 may be swapped" if self.queries and self.queries % cache.kv_heads == 0 else ""
                raise ArgumentError(
                    f"kv_heads is {cache.kv_heads}; it must divide heads, which is {self.heads}: q has shape "
                    f"{q.shape}, which is (sequences, queries, heads, head_dim){swapped}"
                )
            if len(lengths) and self.queries and not lengths.any():
                raise ArgumentError(
                    "cache has no token in any sequence of the call; append the keys and values of the queries' tokens "
                    "before decoding"
                )
            self.problem, ends = _problem_of(cache, self.queries, self.heads, given)
            self.rows = len(self.sequences) * self.queries
            arguments = self._arguments()
            sinks = arguments.sinks(given.sinks)
            self.results = arguments.results({"out": given.out, "lse": given.lse}, {"q": q, "sinks": sinks})
            whole = self.backend.contiguous(q, empty=functools.partial(cache.combiner.kept, "q"))
            self.q = whole.reshape(self.rows, self.heads, cache.head_dim)
            same |= {
                "q's number of queries and heads": q.shape[1:3],
                "sequences": self.sequences,
                "root": given.root,
                "algorithm": given.algorithm,
                "sinks": None if sinks is None else sinks.tolist(),
            }
            # as checked: equal masks may be written in several ways
            same |= {name: getattr(self.problem, name) for name in ("causal", "window", "softcap", "scale")}
            # Positions of the first key that each query sees, and then past the last: (sequences, 2 * queries) a list
            self._lists = [np.maximum(lengths[:, None] + ends, 0)]
            if given.mask is not None:
                mask = checked_mask(given.mask)
                if self.problem.window != (None, None) and mask.places(int(lengths.max(initial=0))) is not None:
                    mask = Window(*self.problem.window) & mask
                self._lists = interval_lists(mask, lengths, *self._lists, self.sequences)
            same["mask"] = given.mask
            functions = checked_functions(given.alibi_slopes, given.relative_bias, self.problem, self.backend, same)
            if functions and given.mask is not None:
                given.mask.places(self.problem.seqlen_k)  # raises where parts of the mask disagree
        self.sinks, self._biases = sinks, None
        if functions:
            ledgers = cache.storage.ledgers
            self._biases = DecodeBiases(self.backend, self.problem, functions, ledgers, self.sequences, given.mask)

    def _arguments(self):
        """The `Arguments` of the call besides q, whose queries and heads are the caller's."""
        cache, count = self.cache, len(self.sequences)
        return Arguments(
            self.backend,
            {
                "sinks": Required((self.heads,), cache.partial_dtype, SINKS),
                "out": Required((count, self.queries, self.heads, cache.value_dim), cache.dtype, RESULTS),
                "lse": Required((count, self.heads, self.queries), cache.partial_dtype, ROWS),
            },
        )

    @property
    def partial_bytes(self) -> tuple[int, int]:
        """Bytes of a partial, and how many of these are its lse."""
        return partial_bytes(self.rows * self.heads, self.cache.value_dim, self.cache.partial_dtype)

    def partial(self, rows=None, name=None):
        """An uninitialized partial of all rows, or of the given number.

        name: key under which the cache keeps the memory for the next call; None for new memory.
        """
        return Partial(
            self.backend,
            self.rows if rows is None else rows,
            self.heads,
            self.cache.value_dim,
            self.cache.partial_dtype,
            name and functools.partial(self.cache.combiner.kept, name),
        )

    def row_intervals(self, rank, ends):
        """The range of a rank's keys that each query of each sequence sees: begin and end, int32 (rows,)."""
        below = self.cache.storage.ledgers.below(self.index, rank, ends).astype(np.int32)
        return below[:, : self.queries].reshape(-1), below[:, self.queries :].reshape(-1)

    def attend(self, partial, q=None, rows=None, after=()):
        """Launch attention over this rank's keys; the result goes into a partial.

        q, rows: some of the rows, and their range, if the partial holds only these; None for all.
        after: events to wait for before reading q.
        """
        cache = self.cache
        keys = (cache.storage.pools, cache.storage.tables(self.sequences), cache.page_size)
        q, rows = (self.q, range(self.rows)) if rows is None else (q, rows)
        first, *others = self._lists
        self.attend_to(keys, cache.rank, partial, q, rows, after, ends=first)
        for ends in others:
            part = self.partial(name="list")
            self.attend_to(keys, cache.rank, part, q, rows, partial.ready, ends=ends)
            partial.absorb(self.backend, part, part.ready)

    def attend_to(self, keys, rank, partial, q, rows, after=(), meanwhile=None, ends=None):
        """Launch attention of rows over the keys of a rank.

        keys: (the pools, table of pages of every sequence, page size).  q, rows, after: as of `attend`.
        meanwhile: as of `mpiattn.backends.base`.  ends: of the intervals; None for those of a call without a mask.
        """
        begin, end = self.row_intervals(rank, self._lists[0] if ends is None else ends)
        pools, tables, page_size = keys
        block = BlockInputs.of(self.problem, q, pools, begin, end, pages=tables, page_size=page_size)
        if self._biases is not None:
            self._attend_with_bias(block, rank, partial, rows, after, meanwhile)
            return
        if rows == range(self.rows) and (len(tables) > 1 or (begin < end).any()):
            partial.ready = (
                self.backend.attend_pages(block, partial.out, partial.lse, after=after, meanwhile=meanwhile),
            )
            return
        event = None
        for i, table in enumerate(tables):
            first = i * self.queries
            start, stop = (min(max(bound, first), first + self.queries) for bound in (rows.start, rows.stop))
            if start == stop:
                continue
            part, these = slice(start - rows.start, stop - rows.start), slice(start, stop)
            of_part = partial.out[part], partial.lse[part]
            if (begin[these] < end[these]).any():
                of_sequence = block._replace(
                    q=q[part], begin=begin[these], end=end[these], pages=tables if len(tables) == 1 else table
                )
                event = self.backend.attend_pages(of_sequence, *of_part, after=after, meanwhile=meanwhile)
            else:
                event = self.backend.clear(*of_part)
        partial.ready = (event,)

    def _attend_with_bias(self, block, rank, partial, rows, after, meanwhile):
        """As `attend_to`, part by part; parts of the same rows are merged."""
        event = None
        for part, of_part, more in self._biases.launches(block, rank, rows):
            these = slice(part.start - rows.start, part.stop - rows.start)
            into = partial.out[these], partial.lse[these]
            if of_part is None:
                event = self.backend.clear(*into)
            elif not more:
                event = self.backend.attend_pages(of_part, *into, after=after, meanwhile=meanwhile)
            else:
                other = self.partial(part.stop - part.start, "part")
                ready = self.backend.attend_pages(
                    of_part, other.out, other.lse, after=(*after, event), meanwhile=meanwhile
                )
                event = self.backend.merge(*into, other.out, other.lse, after=(ready,))
        partial.ready = (event,)

    def result(self, partial):
        """out (sequences, queries, heads, value_dim) in the cache's dtype, and lse (sequences, heads, queries)."""
        for event in partial.ready:
            self.backend.wait(event)  # launches below do not wait for a partial that has just arrived
        if self.sinks is not None:
            self.backend.sink(partial.out, partial.lse, self.backend.contiguous(self.sinks))
        out, lse = self.results.arrays(self.q_given)
        self.backend.copy(out, partial.out.reshape(out.shape))
        self.backend.copy(lse, partial.lse.reshape(out.shape[:3]).transpose(0, 2, 1))
        return self.results.returned(self.q_given)

    @contextmanager
    def transfers(self):
        """Context for all launches and transfers of the call."""
        self.backend.begin()
        yield
        self.backend.finish()
        for array in self.cache.combiner.kept.arrays():
            self.backend.forget(array)
