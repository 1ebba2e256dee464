"""Compares decoded results with float64 attention of keys and values that are read again, piece by piece."""

import numpy as np

from ..problem.layout import even_part
from .compare import WORK_LIMIT, Errors, Source, conclude


def choose(problems, rank, ranks, limit=WORK_LIMIT):
    """The rows that a rank checks, pairs (sequence, query), and the size of its share of all rows.

    It checks its whole share or, if that is too much work, a sample of it.
    """
    queries = problems[0].seqlen
    share = even_part(len(problems) * queries, ranks, rank)
    most = max(problem.flops_per_pair * problem.seqlen_k for problem in problems)
    rows = np.array(share, np.int64)
    if len(rows) * most > limit:
        count = min(len(rows), max(1, int(limit // most)))
        rows = np.sort(np.random.default_rng([0, rank]).choice(rows, count, replace=False))
    return [divmod(row, queries) for row in rows.tolist()], len(share)


def verify_decode(peers, problems, q, out, lse, read, limit=WORK_LIMIT, progress=None):
    """Compare what `tree_decode` gave every rank with float64 attention of the source; collective.

    problems: one per sequence.  q, out, lse: of all sequences, as given to and returned by `tree_decode`.
    read(sequence, name, start, stop): returns tokens of "k" or "v", (1, tokens, kv_heads, dim); it must not
    communicate.  progress: called with the number of rows just checked.  Returns a `mpiattn.verify.compare.Report`, the
    same on every rank.
    """
    chosen, share = choose(problems, peers.rank, peers.size, limit)
    outs, lses, empty = Errors(), Errors(), np.zeros(2, np.int64)
    for sequence, problem in enumerate(problems):
        rows = np.array([query for of, query in chosen if of == sequence], np.int64)
        if not len(rows):
            continue
        source = Source(problem, lambda name, start, stop, sequence=sequence: read(sequence, name, start, stop))
        expected_out, expected_lse = source.attention(rows, q[sequence : sequence + 1, rows])
        outs.add(out[sequence : sequence + 1, rows], expected_out)
        lses.add(lse[sequence : sequence + 1, :, rows], expected_lse)
        empty += source.empty(rows)
        if progress:
            progress(len(rows))
    return conclude(peers, problems[0], outs, lses, len(chosen), share, empty)
