"""Four ranks on one GPU: the cases of tests/mpi on the CUDA back end, staged through host memory."""

import sys

import pytest
from launch import ROOT, TESTS, mpirun

CASES = {"test_kernels.py": "", "test_decode.py": "case_17 or case_18 or case_28 or masks_dtypes",
         "test_cases.py": "case_1_even or case_3 or case_5 or case_6 or case_9 or case_10 or case_12 or case_14 or "
                          "sinks or wire_dtype"}


@pytest.mark.parametrize("file", CASES)
def test_cases(file):
    outcome = mpirun(4, [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider",
                         TESTS / "mpi" / file, "-k", CASES[file]], timeout=300, cwd=ROOT,
                     env={"MPIATTN_BACKENDS": "cuda", "MPIATTN_TRANSPORT": "staged"})
    assert " passed" in outcome.stdout, outcome.stdout
