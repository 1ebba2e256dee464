"""What a check says: one item of the report."""

from itertools import groupby
from typing import NamedTuple

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"


class Item(NamedTuple):
    """name: what was checked.  status: PASS, WARN or FAIL.  text: what was found.  advice: what to do about it."""

    name: str
    status: str
    text: str
    advice: str = ""


def ranks_text(ranks):
    """Rank numbers as people write them: "rank 3", "ranks 0-2, 5"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def count(number, thing):
    """A number of things: "1 host", "3 hosts"."""
    return f"{number} {thing}{'s' * (number != 1)}"


def span(values):
    """The least and the largest: "2" or "2 to 5"."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def by_node(ranks):
    """The facts of every node's ranks, as lists in order of the nodes' first ranks."""
    nodes = {}
    for rank in ranks:
        nodes.setdefault(rank["node"], []).append(rank)
    return list(nodes.values())
