"""Judges the launch: the number of ranks, their installation, their MPI.

In every `judge_*`, `ranks` are the facts of all ranks (`mpiattn.check.rank_facts`); the functions look up nothing else.
"""

from ..system.installation import THREAD_LEVELS as LEVELS
from ..system.launcher import ADVICE
from ..system.words import number, span
from .report_item import FAIL, PASS, WARN, Item, by_node, ranks_text

LEVEL = "FUNNELED"  # one thread of a rank calls MPI, beside the BLAS threads
LARGEST_TAG = 32767  # the least that MPI guarantees, and more than mpiattn uses
# Ranks with different versions of these cannot work together; with others they may.
GRAVE = ("MPI", "mpiattn", "mpi4py")


def size(ranks):
    """MPI sees as many ranks as the launcher started."""
    launched, here = ranks[0]["launched"], len(ranks)
    if here == 1 and launched not in (None, 1):  # other counts are legal: parts of a job may be launched apart
        library = ranks[0]["mpi"]["library"]
        return Item("ranks", FAIL, f"the launcher started {launched} ranks, this MPI sees {here} ({library})", ADVICE)
    nodes = by_node(ranks)
    return Item(
        "ranks",
        PASS,
        f"{number(here, 'rank')} on {number(len(nodes), 'node')}, {span([len(node) for node in nodes])} a node",
    )


def versions(ranks):
    """All ranks have the same versions."""
    names, differences = [], []
    for name in ("MPI", *ranks[0]["versions"]):
        by_version = {}
        for rank in ranks:
            version = rank["mpi"]["library"] if name == "MPI" else rank["versions"][name]
            by_version.setdefault(version, []).append(rank)
        if len(by_version) > 1:
            names.append(name)
            differences.append(
                f"{name} is "
                + ", ".join(
                    f"{version or 'not installed'} on {ranks_text([rank['rank'] for rank in having])} "
                    f"({having[0]['host']})"
                    for version, having in by_version.items()
                )
            )
    if not names:
        shown = ", ".join(f"{name} {ranks[0]['versions'][name]}" for name in ("mpiattn", "Python", "NumPy", "mpi4py"))
        return Item("versions", PASS, f"{shown}; the same on every rank")
    return Item(
        "versions",
        FAIL if set(names) & set(GRAVE) else WARN,
        "; ".join(differences),
        f"let every node use one installation: put it on a file system that all share, or install the same "
        f"{' and '.join(names)} on each; and see that PATH and PYTHONPATH reach the other nodes",
    )


def mpi(ranks):
    """MPI has the thread level and the tags that mpiattn needs."""
    facts = ranks[0]["mpi"]
    level = min((rank["mpi"]["thread_level"] for rank in ranks), key=LEVELS.index)
    tag = min(rank["mpi"]["largest_tag"] for rank in ranks)
    text = f"{facts['library']}, standard {facts['standard']}, thread level {level}, tags up to {tag}"
    if LEVELS.index(level) < LEVELS.index(LEVEL):
        return Item(
            "MPI",
            WARN,
            text,
            f"thread level {LEVEL} is needed, because a rank's BLAS has threads: do not set "
            "MPI4PY_RC_THREAD_LEVEL or mpi4py.rc.thread_level, and check how this MPI was "
            "built",
        )
    if tag < LARGEST_TAG:
        return Item("MPI", WARN, text, f"the MPI standard requires tags up to {LARGEST_TAG}: use another build of MPI")
    return Item("MPI", PASS, text)
