"""MPIs of the machine that programs in C and Fortran are built with, beside the one that the interpreter has.

They are those of Debian, which has both, by names such as mpifort.mpich.  mpi4py must be a wheel that goes by the MPI
that it finds in the process (4.1 or newer).
"""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import launch
import mpi4py
import pytest

FAMILIES = "mpich", "openmpi"
SETTINGS = {
    "mpich": {},
    "openmpi": {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,vader",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    },
}


@cache
def require(family, compiler):
    """Skip the calling test unless the machine has this MPI with this compiler wrapper, such as "mpifort"."""
    if launch.under_launcher():
        pytest.skip("starts mpiexec itself, so it isn't run under one")
    if not list(Path(mpi4py.__file__).parent.glob(f"MPI.{family}.*.so")):
        pytest.skip(f"mpi4py is no wheel that goes by the MPI in the process, {family} among them")
    for command in (f"{compiler}.{family}", f"mpiexec.{family}"):
        if shutil.which(command) is None:
            pytest.skip(f"there is no {command}")


def compiled(words, cwd=None):
    """Run a compiler or the like; the test fails with what it says if it does."""
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, text=True, capture_output=True, timeout=launch.patience(60), check=False
    )
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, words))}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return done.stdout


def mpirun(family, n, command, folder, timeout=60, env=None, check=True):
    """Run a program on n ranks of that MPI, which start this interpreter; by `launch.limited`.

    folder: for a link to the library.
    """
    settings = {name: value for name, value in launch.environment().items() if not name.startswith(("OMPI_", "PRTE_"))}
    settings |= SETTINGS[family] | {"MPIATTN_PYTHON": sys.executable}
    if family == "mpich":  # mpi4py asks for libmpi.so.12, which Debian calls libmpich.so.12
        (folder / "libmpi.so.12").unlink(missing_ok=True)
        (folder / "libmpi.so.12").symlink_to(_library("libmpich.so.12"))
        settings["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    words = [f"mpiexec.{family}", "-n", n, *command]
    return launch.limited(words, timeout, settings | (env or {}), folder, check)


@cache
def _library(name):
    """The path of a shared library that the loader knows."""
    known = subprocess.run(["/sbin/ldconfig", "-p"], text=True, capture_output=True, timeout=60, check=True).stdout
    paths = [line.split("=> ")[1] for line in known.splitlines() if line.split()[:1] == [name]]
    return paths[0] if paths else name
