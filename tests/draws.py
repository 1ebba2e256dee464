"""A sweep runs a few of its cases at a time, drawn by a seed; they are others at the next commit.

    @pytest.mark.draw(3)                     three of the test's cases, of each group of ranks where it runs on several
    @pytest.mark.draw(3, slow=1)             and one of its slow ones; draw(slow=1): all but these
    pytest.param(..., marks=turn(1, 4))      where it is this case's turn of four, in all tests alike

--most N takes at most N cases of every test, marked or not, of each group of ranks; --all runs every case.  The seed is
MPIATTN_SEED, else the number of commits before and with the checkout's; each run prints it.
"""

import os
import subprocess
from collections import defaultdict
from hashlib import sha256
from pathlib import Path

VARIABLE = "MPIATTN_SEED"


def seed():
    """The seed of this run, a positive number; in the environment too, for the runs that tests start."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = str(_of_the_commit() or 1)
    return int(os.environ[VARIABLE])


def _of_the_commit():
    """The number of the checkout's commit; None where mpiattn is installed or there is no git."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-list", "--count", "HEAD"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def drawn(items, ranks, most=None):
    """The items to run, in their order: of each sweep a few, and of each test at most `most`.

    ranks: of this run; each rank count draws others.
    """
    sweeps = defaultdict(list)
    left_out = {item for item in items if (turn := item.get_closest_marker("turn")) and not _has_turn(*turn.args)}
    for item in items:
        if item in left_out:
            continue
        counts = [most, _count(item.get_closest_marker("draw"), item)]
        if (count := min((count for count in counts if count is not None), default=None)) is not None:
            slow = bool(item.get_closest_marker("slow"))
            sweeps[item.parent, getattr(item, "originalname", item.name), _group(item), slow, count].append(item)
    for (*_, count), cases in sweeps.items():
        cases.sort(key=lambda item: sha256(f"{seed()} {ranks} {item.name}".encode()).digest())
        left_out.update(cases[count:])
    return [item for item in items if item not in left_out]


def _count(mark, item):
    """How many cases are drawn of those that are slow, or are not, as this one; None for all."""
    if mark is None:
        return None
    every = mark.args[0] if mark.args else None
    return mark.kwargs.get("slow", every) if item.get_closest_marker("slow") else every


def _has_turn(number, of):
    return seed() % of == number


def _group(item):
    """The ranks that a case of tests/mpi is for: a launch has some groups and not others."""
    return item.callspec.params.get("group") if hasattr(item, "callspec") else None
