"""Where the kernel sources are: inside the package when installed, beside it in a checkout."""

from pathlib import Path

from .errors import FileError


def kernel_dir():
    """The folder of kernel sources, with a folder for each kind of device."""
    package = Path(__file__).resolve().parent
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "README.md").is_file():
            return folder
    raise FileError(f"no kernel sources beside {package}; the installation is incomplete")
