"""One decoding call: its checked arguments, and attention over this rank's keys before results are combined."""

from contextlib import contextmanager
from functools import partial as bind

import numpy as np

from ..engine.folding import checked, on_host
from ..engine.results import Results
from ..errors import ArgumentError
from ..problem.problem import Problem
from .arguments import sequence_numbers
from .combine import Partial, partial_bytes


class Call:
    """One decoding call with a cache; arguments as of `mpiattn.tree_decode`.

    turn: the collective call in progress, a `mpiattn.comm.collective_calls.Call`.
    ways: values of `way` allowed besides "auto".
    A row is one query of one sequence; there are `queries` rows per sequence.
    """

    def __init__(
        self,
        turn,
        cache,
        q,
        sequences=None,
        causal=True,
        window=None,
        softcap=None,
        scale=None,
        sinks=None,
        way=None,
        ways=(),
        root=None,
        out=None,
        lse=None,
        check=True,
    ):
        self.cache, self.backend, self.given = cache, cache.combiner.backend, q
        turn.kept.append(self)
        with turn.agreement(check) as same:
            self.sequences = sequence_numbers(sequences, cache.sequences)
            q = checked(self.backend, "q", q, (len(self.sequences), None, None, cache.head_dim), cache.dtype)
            if root is not None and root not in range(cache.ranks):
                raise ArgumentError(f"root is {root!r}; it must be None or a rank from 0 to {cache.ranks - 1}")
            if way is not None and way not in ("auto", *ways):
                raise ArgumentError(f"way is {way!r}; it may be auto, {', '.join(ways)}")
            lengths = [cache.storage.ledgers[sequence].seqlen for sequence in self.sequences]
            self.problems = [
                Problem(
                    seqlen=q.shape[1],
                    heads=q.shape[2],
                    head_dim=cache.head_dim,
                    seqlen_k=length,
                    kv_heads=cache.kv_heads,
                    value_dim=cache.value_dim,
                    dtype=cache.dtype,
                    causal=causal,
                    scale=scale,
                    window=window,
                    softcap=softcap,
                )
                for length in lengths
            ]
            self.queries, self.heads = q.shape[1:3]
            if sinks is not None:
                sinks = on_host(checked(self.backend, "sinks", sinks, (self.heads,), cache.partial_dtype))
            self.rows = len(self.sequences) * self.queries
            shape = len(self.sequences), self.queries, self.heads
            self.results = Results(
                self.backend,
                {
                    "out": (out, (*shape, cache.value_dim), cache.dtype),
                    "lse": (lse, (shape[0], shape[2], shape[1]), cache.partial_dtype),
                },
                {"q": q, "sinks": sinks},
            )
            whole = self.backend.contiguous(q, empty=bind(cache.combiner.kept, "q"))
            self.q = whole.reshape(self.rows, self.heads, cache.head_dim)
            same |= {
                "q's number of queries and heads": q.shape[1:3],
                "sequences": self.sequences,
                "root": root,
                "way": way,
                "sinks": None if sinks is None else sinks.tolist(),
            }
            for problem in self.problems[:1]:  # as checked: equal masks may be written in several ways
                same |= {name: getattr(problem, name) for name in ("causal", "window", "softcap", "scale")}
        self.sinks = sinks
        positions = np.arange(self.queries)
        self._seen = [problem.mask.key_interval(positions) for problem in self.problems]  # (1, queries) each

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
            name and bind(self.cache.combiner.kept, name),
        )

    def seen(self, i, rank):
        """The range of a rank's keys that each query of the i-th sequence sees: begin and end, int32 (queries,)."""
        ledger = self.cache.storage.ledgers[self.sequences[i]]
        return tuple(ledger.below(rank, bound[0]).astype(np.int32) for bound in self._seen[i])

    def attend(self, partial, q=None, rows=None, after=()):
        """Launch attention over this rank's keys; the result goes into a partial.

        q, rows: some of the rows, and their range, if the partial holds only these; None for all.
        after: events to wait for before reading q.
        """
        cache = self.cache
        keys = [(*cache.storage.pools, cache.storage.table(sequence), cache.page_size) for sequence in self.sequences]
        q, rows = (self.q, range(self.rows)) if rows is None else (q, rows)
        self.attend_to(keys, cache.rank, partial, q, rows, after)

    def attend_to(self, keys, rank, partial, q, rows, after=(), meanwhile=None):
        """Launch attention of rows over the keys of a rank.

        keys: for each sequence (keys, values, pages, page size).  q, rows, after: as of `attend`.
        meanwhile: as of `mpiattn.backends.base`.
        """
        if rows == range(self.rows) and len(keys) > 1 and all(of[0] is keys[0][0] for of in keys):
            bounds = [np.concatenate(bound) for bound in zip(*(self.seen(i, rank) for i in range(len(keys))))]
            pools, tables, page_size = keys[0][:2], [of[2] for of in keys], keys[0][3]
            problem = self.problems[0]
            event = self.backend.attend_pages(
                q,
                *pools,
                tables,
                page_size,
                *bounds,
                partial.out,
                partial.lse,
                problem.scale,
                problem.softcap,
                after=after,
                meanwhile=meanwhile,
            )
            partial.ready = (event,)
            return
        event = None
        for i, problem in enumerate(self.problems):
            first = i * self.queries
            start, stop = (min(max(bound, first), first + self.queries) for bound in (rows.start, rows.stop))
            if start == stop:
                continue
            part, queries = slice(start - rows.start, stop - rows.start), slice(start - first, stop - first)
            begin, end = (bound[queries] for bound in self.seen(i, rank))
            if (begin < end).any():
                event = self.backend.attend_pages(
                    q[part],
                    *keys[i],
                    begin,
                    end,
                    partial.out[part],
                    partial.lse[part],
                    problem.scale,
                    problem.softcap,
                    after=after,
                    meanwhile=meanwhile,
                )
            else:
                event = self.backend.clear(partial.out[part], partial.lse[part])
        partial.ready = (event,)

    def result(self, partial):
        """out (sequences, queries, heads, value_dim) in the cache's dtype, and lse (sequences, heads, queries)."""
        for event in partial.ready:
            self.backend.wait(event)  # launches below do not wait for a partial that has just arrived
        if self.sinks is not None:
            self.backend.sink(partial.out, partial.lse, self.backend.contiguous(self.sinks))
        out, lse = self.results.arrays()
        self.backend.copy(out, partial.out.reshape(out.shape))
        self.backend.copy(lse, partial.lse.reshape(out.shape[:3]).transpose(0, 2, 1))
        return self.results.returned(self.given)

    @contextmanager
    def transfers(self):
        """Context for all launches and transfers of the call."""
        self.backend.begin()
        yield
        self.backend.finish()
        for array in self.cache.combiner.kept.arrays():
            self.backend.forget(array)
