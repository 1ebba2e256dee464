"""Input files as nobody would write them: clear errors or right numbers.  fuzzed_files.py makes more of them by hand."""

import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import draws
import fuzzed_files
import h5py
import launch
import numpy as np
import pytest
from files import write_input
from fuzzed_promises import judge
from mpi4py import MPI

from mpiattn.comm.peers import Peers
from mpiattn.errors import FileError
from mpiattn.files import hdf5
from mpiattn.files.io import Input

pytest.importorskip("hypothesis")
from hypothesis import given, seed, settings
from hypothesis import strategies as st

EXAMPLES = [100, pytest.param(2000, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def time_limit():
    """Opening a pipe may wait for ever."""

    def late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(fuzzed_files.SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_odd_files(examples, tmp_path_factory):
    @seed(draws.seed())
    @settings(max_examples=examples, deadline=None, database=None)
    @given(rng=st.randoms(use_true_random=False))
    def check(rng):
        with time_limit():
            judge(fuzzed_files.make(rng, tmp_path_factory.mktemp("odd")))

    check()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_files(examples):
    """HDF5 itself may crash, so in child processes."""
    command = [sys.executable, fuzzed_files.__file__, "--damaged", f"--examples={examples}"]
    outcome = subprocess.run(
        [*command, f"--seed={draws.seed() * 10_000}"],
        env=launch.environment(),
        text=True,
        capture_output=True,
        timeout=launch.patience(examples),
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
