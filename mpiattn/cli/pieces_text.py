"""The pieces of the ranks as text: a picture of who computes what, a list, and JSON."""

import string

from ..model.piece_map import NONE, middles, name_of, ranks_at, seen_at
from ..system.words import number

RANKS = string.digits + string.ascii_lowercase + string.ascii_uppercase  # a character for each
HIDDEN = "."
LINES, COLUMNS = 10, 20  # of the picture of a KV head: characters are twice as high as wide
MOST_HEADS = 4  # that are drawn side by side


def picture(division, problem, mask, direction):
    """The scores of the first KV heads in characters, each a rank; "" of a single one."""
    ranks, heads = len(division), problem.batch * problem.kv_heads
    if ranks == 1:
        return ""
    head = f"pieces of the {direction} pass"
    if ranks > len(RANKS):
        return f"{head}: of {number(ranks, 'rank')}; --steps lists them, --plot draws them"
    shown = min(heads, MOST_HEADS)
    queries, keys = middles(problem.seqlen, LINES), middles(problem.seqlen_k, COLUMNS)
    seen = seen_at(mask, queries, keys)
    names = [name_of(group, problem) for group in range(shown)]
    width = max(len(keys), *map(len, names))
    lines = ["  ".join(f"{name:<{width}}" for name in names)]
    matrices = [_characters(ranks_at(division, group, queries, keys), seen) for group in range(shown)]
    lines += ["  ".join(f"{row:<{width}}" for row in rows) for rows in zip(*matrices)]
    about = "queries from top to bottom x keys from left to right"
    if shown < heads:
        about += f", the first {shown} of {heads}"
    about += "; a character is a rank"
    if ranks > 10:
        about += f", {RANKS[10]} rank 10"
    if not seen.all():
        about += f", {HIDDEN} is hidden"
    return "\n".join([head, f"  {about}", *(f"  {line}".rstrip() for line in lines)])


def _characters(ranks, seen):
    """The lines of the picture of a KV head."""
    drawn = (ranks != NONE) & seen
    return ["".join(RANKS[rank] if here else HIDDEN for rank, here in zip(*row)) for row in zip(ranks, drawn)]


def listed(division, problem, direction):
    """Every piece of every rank in a line."""
    count = sum(map(len, division))
    lines = [f"{direction}: {number(count, 'piece')} of {number(len(division), 'rank')}"]
    width = len(str(len(division) - 1))
    for rank, pieces in enumerate(division):
        for piece in pieces:
            queries, keys = _span(piece.first_row, piece.last_row), _span(piece.first_key, piece.last_key)
            lines.append(f"  rank {rank:>{width}}  {name_of(piece.group, problem)}: queries {queries} x keys {keys}")
    return "\n".join(lines)


def _span(first, last):
    return f"{first} to {last - 1}"


def as_data(division, problem, direction):
    """The JSON of a division: of every rank a list of its pieces, whose ends are [first, last)."""
    ranks = []
    for pieces in division:
        of_rank = []
        for piece in pieces:
            sequence, head = divmod(piece.group, problem.kv_heads)
            queries, keys = [piece.first_row, piece.last_row], [piece.first_key, piece.last_key]
            of_rank.append({"sequence": sequence, "kv_head": head, "queries": queries, "keys": keys})
        ranks.append(of_rank)
    return {"name": "pieces", "direction": direction, "ranks": ranks}
