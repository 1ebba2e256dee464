"""Judges how the ranks were started: how many, from which installation, with which MPI.

Here as in every `judge_*`, `ranks` are the facts of every rank (`mpiattn.check.rank_facts`); nothing is looked up.
"""

from ..system.installation import THREAD_LEVELS as LEVELS
from ..system.launcher import ADVICE
from .report_item import FAIL, PASS, WARN, Item, by_node, count, ranks_text, span

LEVEL = "FUNNELED"         # one thread of a rank calls MPI, beside those of the BLAS
LARGEST_TAG = 32767        # what MPI promises at least, and more than is used
# What differs in these cannot work together; in the others it may.
GRAVE = ("MPI", "mpiattn", "mpi4py")


def size(ranks):
    """As many ranks as the launcher started, on how many nodes."""
    launched, here = ranks[0]["launched"], len(ranks)
    if here == 1 and launched not in (None, 1):        # parts of a job may be launched with numbers of their own
        library = ranks[0]["mpi"]["library"]
        return Item("ranks", FAIL, f"the launcher started {launched} ranks, this MPI sees {here} ({library})", ADVICE)
    nodes = by_node(ranks)
    return Item("ranks", PASS, f"{count(here, 'rank')} on {count(len(nodes), 'node')}, "
                               f"{span([len(node) for node in nodes])} a node")


def versions(ranks):
    """The same versions on all ranks."""
    names, told = [], []
    for name in ("MPI", *ranks[0]["versions"]):
        found = {}
        for rank in ranks:
            version = rank["mpi"]["library"] if name == "MPI" else rank["versions"][name]
            found.setdefault(version, []).append(rank)
        if len(found) > 1:
            names.append(name)
            told.append(f"{name} is " + ", ".join(
                f"{version or 'not installed'} on {ranks_text([rank['rank'] for rank in some])} ({some[0]['host']})"
                for version, some in found.items()))
    if not names:
        shown = ", ".join(f"{name} {ranks[0]['versions'][name]}" for name in ("mpiattn", "Python", "NumPy", "mpi4py"))
        return Item("versions", PASS, f"{shown}; the same on every rank")
    return Item("versions", FAIL if set(names) & set(GRAVE) else WARN, "; ".join(told),
                f"let every node use one installation: put it on a file system that all share, or install the same "
                f"{' and '.join(names)} on each; and see that PATH and PYTHONPATH reach the other nodes")


def mpi(ranks):
    """An MPI that can do what is needed."""
    facts = ranks[0]["mpi"]
    level = min((rank["mpi"]["thread_level"] for rank in ranks), key=LEVELS.index)
    tag = min(rank["mpi"]["largest_tag"] for rank in ranks)
    text = f"{facts['library']}, standard {facts['standard']}, thread level {level}, tags up to {tag}"
    if LEVELS.index(level) < LEVELS.index(LEVEL):
        return Item("MPI", WARN, text, f"thread level {LEVEL} is needed, for a rank's BLAS has threads: do not set "
                                       "MPI4PY_RC_THREAD_LEVEL or mpi4py.rc.thread_level, and look into how this MPI "
                                       "was built")
    if tag < LARGEST_TAG:
        return Item("MPI", WARN, text, f"MPI promises tags up to {LARGEST_TAG} at least: use another build of it")
    return Item("MPI", PASS, text)
