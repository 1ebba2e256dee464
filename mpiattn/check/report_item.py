"""One item of the report of `mpiattn check`, and its texts."""

from itertools import groupby
from typing import NamedTuple

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"


class Item(NamedTuple):
    """name: what was checked.  status: PASS, WARN or FAIL.  text: the result.  advice: what to do about it."""

    name: str
    status: str
    text: str
    advice: str = ""


def ranks_text(ranks):
    """Rank numbers as text: "rank 3", "ranks 0-2, 5"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def by_node(ranks):
    """The facts of ranks grouped by node, nodes in order of their first ranks."""
    nodes = {}
    for rank in ranks:
        nodes.setdefault(rank["node"], []).append(rank)
    return list(nodes.values())
