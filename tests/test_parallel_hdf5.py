"""`mpiattn run` with an h5py that has MPI: all ranks read and write one file collectively.

PyPI's h5py has no MPI, so these tests use another interpreter where there is one: Debian's, with python3-h5py-mpi,
python3-mpi4py, python3-tqdm, python3-threadpoolctl and openmpi-bin, or that of MPIATTN_H5PY_MPI="python mpiexec".
"""

import os
import subprocess

import launch
import numpy as np
import pytest
from files import assert_right, datasets, write_input, write_problems

PYTHON, MPIEXEC = os.environ.get("MPIATTN_H5PY_MPI", "/usr/bin/python3 mpiexec.openmpi").split()
OPEN_MPI_4 = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PYTHONPATH": str(launch.ROOT),
}


def mpirun(n, *command):
    launch.require_launch()
    return launch.limited([MPIEXEC, "-n", n, PYTHON, *command], 60, launch.environment(OPEN_MPI_4), check=False)


@pytest.fixture(scope="module", autouse=True)
def parallel_h5py():
    try:
        outcome = mpirun(
            1, "-c", "import mpi4py.MPI, tqdm, threadpoolctl, h5py\nprint('has MPI:', h5py.get_config().mpi)"
        )
    except FileNotFoundError as error:
        pytest.skip(f"no interpreter with an h5py that has MPI: {error}")
    if "has MPI: True" not in outcome.stdout:
        pytest.skip(f"{PYTHON} has no h5py with MPI: {outcome.stderr.strip().splitlines()[-1:]}")


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    "n, shape",
    [(1, {}), (3, {"batch": 2, "seqlen_k": 101}), (4, {"seqlen": 3}), (4, {"seqlen": 1001, "dtype": "float16"})],
)
def test_right(tmp_path, n, shape):
    """Slabs of even and uneven length, and ranks whose slab is empty: they take part in every collective."""
    source = write_input(tmp_path / "in.h5", **shape)
    code = (
        "import mpiattn.comm.rounds as r; r.PIECE_BYTES = 20_000; "
        "import sys; from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    outcome = mpirun(n, "-c", code, "run", source, tmp_path / "out.h5", "--causal", "--verify")
    assert outcome.returncode == 0, outcome.stderr
    assert_right(source, tmp_path / "out.h5", causal=True, tolerance=2e-3 if "dtype" in shape else 1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.h5", "out.h5"]


def test_many_problems_in_two_runs(tmp_path):
    """All ranks write each group together, and what the first run has finished is that of an undisturbed one."""
    shapes = {"a": {"seqlen": 61}, "b/1": {"seqlen": 40}, "b/2": {"seqlen": 61}}
    source, out = write_problems(tmp_path / "in.h5", shapes), tmp_path / "out.h5"
    assert mpirun(3, "-m", "mpiattn", "run", source, tmp_path / "whole.h5").returncode == 0
    code = (
        "import os, signal, sys, mpiattn.files.unfinished as u; add = u.Unfinished.add\n"
        "def then(self, *given): add(self, *given), os.kill(os.getpid(), signal.SIGUSR1)\n"
        "u.Unfinished.add = then\n"
        "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    first = mpirun(3, "-c", code, "run", source, out, "--resume")
    assert first.stderr.count("ended by SIGUSR1") == 1 and "1 of 3 problems are in" in first.stderr, first.stderr
    second = mpirun(3, "-m", "mpiattn", "run", source, out, "--resume")
    assert second.returncode == 0 and "1 of them finished before" in second.stdout, second.stderr
    assert datasets(out) == datasets(tmp_path / "whole.h5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.h5", "out.h5", "whole.h5"]


def test_gradients_and_documents(tmp_path):
    """More datasets, read and written likewise; documents are read by rank 0 alone."""
    cuts = [0, 400, 1001]
    source = write_input(tmp_path / "in.h5", seqlen=1001, backward=True, cuts=np.array(cuts))
    outcome = mpirun(
        3,
        "-m",
        "mpiattn",
        "run",
        source,
        tmp_path / "out.h5",
        "--documents",
        "cuts",
        "--causal",
        "--backward",
        "--verify",
    )
    assert outcome.returncode == 0, outcome.stderr
    assert_right(source, tmp_path / "out.h5", causal=True, backward=True, cu_seqlens=cuts)


def test_bfloat16_without_its_package(tmp_path):
    """It is told from the file without ml_dtypes, and refused by name where that is missing."""
    if subprocess.run([PYTHON, "-c", "import ml_dtypes"], capture_output=True).returncode == 0:
        pytest.skip(f"{PYTHON} has ml_dtypes")
    outcome = mpirun(2, "-m", "mpiattn", "run", write_input(tmp_path / "in.h5", dtype="bfloat16"), tmp_path / "out.h5")
    assert outcome.returncode == 1
    assert outcome.stderr.count("dtype is 'bfloat16'; it needs the package ml_dtypes") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.h5"]


def test_no_out_where_it_cannot_be_written(tmp_path):
    source = write_input(tmp_path / "in.h5")
    outcome = mpirun(3, "-m", "mpiattn", "run", source, tmp_path / "none" / "out.h5")
    assert outcome.returncode == 1
    assert outcome.stderr.count("mpiattn: OUT is") == 1


def test_check(tmp_path):
    outcome = mpirun(3, "-m", "mpiattn", "check", "--folder", tmp_path)
    assert outcome.returncode == 0, outcome
    text = " ".join(outcome.stdout.split())
    assert "PASS files all ranks wrote a file in" in text and "(h5py has MPI), all read it" in text
    assert not list(tmp_path.iterdir())
