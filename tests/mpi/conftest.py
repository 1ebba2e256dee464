"""Multi-rank tests: ordinary tests on COMM_WORLD, right on any number of ranks.

Every rank runs the same tests in the same order.  Where one fails, the others may wait for it for ever: its
traceback is printed and the job ends.
"""

import sys
import time

import pytest
from mpi4py import MPI


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
