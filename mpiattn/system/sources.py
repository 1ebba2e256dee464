"""Folders of kernel sources, tests and Slurm scripts: inside the package when installed, beside it in a checkout."""

from pathlib import Path

from ..errors import FileError


def kernel_dir():
    """The folder of kernel sources, with one subfolder per kind of device."""
    return _folder("kernels", "README.md", "kernel sources")


def test_dir():
    """The folder of mpiattn's own tests."""
    return _folder("tests", "conftest.py", "tests")


def slurm_dir():
    """The folder of scripts for Slurm."""
    return _folder("slurm", "launch.sh", "scripts for Slurm")


def _folder(name, marker, contents):
    package = Path(__file__).resolve().parents[1]
    for folder in (package / name, package.parent / name):
        if (folder / marker).is_file():
            return folder
    raise FileError(f"no {contents} beside {package}; the installation is incomplete")
