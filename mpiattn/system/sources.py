"""Where kernel sources, tests and Slurm's scripts are: inside the package when installed, beside it in a checkout."""

from pathlib import Path

from ..errors import FileError


def kernel_dir():
    """The folder of kernel sources, with a folder for each kind of device."""
    return _folder("kernels", "README.md", "kernel sources")


def test_dir():
    """The folder of mpiattn's own tests."""
    return _folder("tests", "conftest.py", "tests")


def slurm_dir():
    """The folder of scripts for Slurm."""
    return _folder("slurm", "launch.sh", "scripts for Slurm")


def _folder(name, holds, what):
    package = Path(__file__).resolve().parents[1]
    for folder in (package / name, package.parent / name):
        if (folder / holds).is_file():
            return folder
    raise FileError(f"no {what} beside {package}; the installation is incomplete")
