"""Which rank computes which scores of a division into pieces, at some queries and keys: for drawings.  No MPI."""

import numpy as np

NONE = -1  # the rank of pairs that are in no piece


def middles(count, parts):
    """The positions in the middle of each of some equal parts of so many tokens: int64, no more than tokens."""
    parts = min(count, parts)
    return (np.arange(parts, dtype=np.int64) * 2 + 1) * count // max(2 * parts, 1)


def ranks_at(division, group, queries, keys):
    """The rank that computes each pair of some queries and keys of a group: (queries, keys), NONE in no piece."""
    ranks = np.full((len(queries), len(keys)), NONE)
    for rank, pieces in enumerate(division):
        for piece in pieces:
            if piece.group != group:
                continue
            rows = slice(*queries.searchsorted((piece.first_row, piece.last_row)))
            columns = slice(*keys.searchsorted((piece.first_key, piece.last_key)))
            ranks[rows, columns] = rank
    return ranks


def seen_at(mask, queries, keys):
    """Whether each of some queries sees each of some keys: (queries, keys)."""
    begin, end = (side[:, 0] for side in mask.key_intervals(queries))
    return ((begin[..., None] <= keys) & (keys < end[..., None])).any(axis=0)


def name_of(group, problem):
    """The name of a group: its KV head and, of several sequences, which of them."""
    sequence, head = divmod(group, problem.kv_heads)
    return f"KV head {head}" if problem.batch == 1 else f"sequence {sequence}, KV head {head}"
