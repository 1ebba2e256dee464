"""Four ranks on one GPU: the cases of tests/mpi on the CUDA back end, staged through host memory or by CUDA IPC."""

import sys

import pytest
from launch import ROOT, TESTS, mpirun
from rank_cases import CASES


@pytest.mark.parametrize("file", CASES)
@pytest.mark.parametrize("transport", ["staged", "ipc"])
def test_cases(transport, file):
    outcome = mpirun(
        4,
        [
            sys.executable,
            *"-m pytest -q --color=no -p no:cacheprovider".split(),
            TESTS / "mpi" / file,
            "-k",
            CASES[file],
        ],
        timeout=300,
        cwd=ROOT,
        env={"MPIATTN_BACKENDS": "cuda", "MPIATTN_TRANSPORT": transport},
    )
    assert " passed" in outcome.stdout, outcome.stdout
