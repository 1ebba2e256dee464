"""Multi-rank tests: ordinary tests on COMM_WORLD, right on any number of ranks.

Every rank runs the same tests in the same order.  Where one fails, the others may wait for it for ever: its
traceback is printed and the job ends.

The cases that any version must pass, forward and backward, on both back ends where `runs.check` runs them; `-k case_7_`
finds the seventh.  Those of a given number of ranks run on as many of the launch's.

     1 even, ranks 1 to 8            13 large scores, NaN             23 scatter, gather, positions
     2 ring-flash-attention's        14 half types are kept           24 any memory layout, read-only
     3 fewer tokens than ranks       15 half types: error by tile     25 plans interleaved, sub-communicators
     4 10,000 tokens, 3 and 7 ranks  16 merge (tests/test_backend)    26 one rank is wrong: all raise the same
     5 grouped query heads           17 decode, ranks without keys    27 finite differences
     6 value_dim is not head_dim     18 decode step by step           28 decode, same bits on 1 to 9 ranks
     7 packed documents              19 thirty repeats, same bits     29 deferred as numpy, same bits
     8 windows                       20 overlap, same bits            30 split messages, same bits
     9 the masks mixed               21 every tile and schedule       31 3,000 plans
    10 softcap, scale                22 bytes and messages: the formula    34 NaN in padding, sinks
    11 other number of keys                                                35 a cache grown in turns
    12 rows that see nothing         37 prefix-LM, block-causal, a kind by document

test_sweep.py draws most of these at random.
"""

import os
import sys
import time
from functools import cache
from hashlib import sha256

import draws
import pytest
from mpi4py import MPI

if MPI.COMM_WORLD.size > len(os.sched_getaffinity(0)):
    # Ranks that wait leave the cores to those that work; before mpiattn takes the function that it waits by.
    os.sched_yield = lambda: time.sleep(5e-5)

from runs import settle, subcomm

MOST_NEEDED = 3  # ranks that any test asks of `at_least`
TRANSPORT = os.environ.get("MPIATTN_TRANSPORT")
if os.environ.get("MPIATTN_CUPY") == "fake":  # a GPU that is none; given "device", an MPI that can use its memory
    import fake_cudnn
    import fake_cupy

    from mpiattn.backends.cuda import row_runs, staging
    from mpiattn.system import gpu_aware_mpi, gpu_probe

    sys.modules["cupy"], sys.modules["cudnn"], staging.PIECE, row_runs.LEAST = fake_cupy, fake_cudnn, 1000, 2
    if TRANSPORT == "device":
        gpu_aware_mpi.gpu_aware = lambda: (True, "a test says so")
        gpu_probe.probe = lambda: {"answer": "yes", "text": "and that it works"}
if TRANSPORT == "ipc":  # messages of several pieces, and more of them than slots, on a GPU too
    from mpiattn.backends.cuda import slots

    slots.BYTES, slots.NUMBER = 600, 3
if TRANSPORT in ("staged", "device"):  # what "auto" takes, although ranks of a node can read each other's memory
    from mpiattn.comm import transport

    transport.connect = lambda *arguments: (None, "a test says so")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    comm = MPI.COMM_WORLD
    if report.failed and comm.size > 1:
        sections = "".join(f"\n--- {title}\n{text}" for title, text in report.sections)
        print(
            f"\n=== {item.nodeid}, {report.when}: failed on rank {comm.rank} of {comm.size}\n"
            f"{report.longreprtext}{sections}",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(0.5)  # a launcher that ends the job may drop what it has not yet passed on
        comm.Abort(1)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("drawn_ranks", False):
        items[:] = [item for item in items if _ranks_of(item) <= MPI.COMM_WORLD.size]


def _ranks_of(item):
    """On how many ranks a test runs with --drawn-ranks: as many as it is for, or a number that the seed draws."""
    if "group" in item.fixturenames:
        return item.callspec.params["group"]
    if item.get_closest_marker("whole"):
        return MPI.COMM_WORLD.size
    numbers = range(1, MPI.COMM_WORLD.size + 1)
    if "at_least" in item.fixturenames:
        numbers = [n for n in numbers if n >= MOST_NEEDED] or numbers[-1:]
    drawn = sha256(f"{draws.seed()} {item.nodeid}".encode()).digest()
    return numbers[int.from_bytes(drawn[:4], "big") % len(numbers)]


@cache
def _first_ranks(n):
    """A communicator of the first n ranks, None on the others; collective."""
    world = MPI.COMM_WORLD
    if n == world.size:
        return world
    made = world.Split(0 if world.rank < n else MPI.UNDEFINED)
    return made if world.rank < n else None


@pytest.fixture(autouse=True)
def comm(request):
    """The launch's communicator; with --drawn-ranks one of so many ranks, for which the others wait asleep."""
    if not request.config.getoption("drawn_ranks", False):
        return MPI.COMM_WORLD
    settle(MPI.COMM_WORLD)
    drawn = _first_ranks(_ranks_of(request.node))
    if drawn is None:
        pytest.skip("runs on fewer ranks")
    return drawn


@pytest.fixture
def c(comm):
    """The library for C programs, built by one rank."""
    import embedded

    path = comm.bcast(str(embedded.installed().library) if comm.rank == 0 else None)
    return _library(path)


@cache
def _library(path):
    import embedded

    return embedded.Library(path)


@pytest.fixture
def at_least(comm):
    """at_least(n) skips the test, on every rank alike, where there are fewer ranks."""

    def require(ranks):
        if comm.size < ranks:
            pytest.skip(f"needs {ranks} ranks")

    return require


@pytest.fixture
def group(request, comm):
    """A communicator of the first ranks, as many as `runs.on` says; the other ranks skip the test.

    Of the launches of test_launch.py only the smallest with enough ranks runs it.
    """
    ranks = request.param
    launches = [int(n) for n in os.environ.get("MPIATTN_LAUNCHES", str(comm.size)).split(",")]
    if comm.size != min((n for n in launches if n >= ranks), default=None):
        pytest.skip(f"runs on {ranks} ranks, in the smallest launch that has them")
    with subcomm(comm, ranks) as sub:
        if sub is not None:
            yield sub
        settle(comm)
    if sub is None:
        pytest.skip(f"runs on {ranks} ranks, in the smallest launch that has them")
