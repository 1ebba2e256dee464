"""Multi-rank tests: ordinary tests on COMM_WORLD, right on any number of ranks.

Every rank runs the same tests in the same order.  Where one fails, the others may wait for it for ever: its
traceback is printed and the job ends.
"""

import os
import sys
import time

import pytest
from mpi4py import MPI
from runs import settle, subcomm


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    comm = MPI.COMM_WORLD
    if report.failed and comm.size > 1:
        sections = "".join(f"\n--- {title}\n{text}" for title, text in report.sections)
        print(f"\n=== {item.nodeid}, {report.when}: failed on rank {comm.rank} of {comm.size}\n"
              f"{report.longreprtext}{sections}", file=sys.stderr, flush=True)
        time.sleep(0.5)                        # a launcher that ends the job may drop what it has not yet passed on
        comm.Abort(1)
    return report


@pytest.fixture(scope="session")
def comm():
    return MPI.COMM_WORLD


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
