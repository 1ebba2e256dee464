"""What mpiattn.c calls: `start` once, then functions by name, which are those of `plans`, `caches` and `options`.

Every function returns nothing: results are written into the program's memory.  Errors are raised; `describe` puts them
into a status and a text.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ..version import __version__
from . import arrays, host
from .arrays import Described as Described
from .errors import HostError
from .status import describe as describe

if TYPE_CHECKING:
    from collections.abc import Callable

_output: host.Output | None = None


ABI = 2  # MPIATTN_ABI of mpiattn.h


def start(abi: int, write: Callable[[str, int], object], version: str | None, library: str | None) -> None:
    """Prepare for calls.  Raises HostError.

    abi: of the interface that the library has.  write: gets what Python prints.
    version, library: as of `host.check_mpi`.
    """
    global _output
    if abi != ABI:
        raise HostError(
            f"the library has version {abi} of the interface, the Python package mpiattn {__version__} version {ABI}; "
            "run mpiattn-config --build, and compile the program again"
        )
    host.check_mpi(version, library)
    if _output is None:
        _output = host.Output(write)
    for name in ("option_calls", "plans", "caches"):  # which need mpi4py
        functions = import_module(f".{name}", __package__)
        globals().update({each: getattr(functions, each) for each in functions.CALLS})


def nothing() -> None:
    """Do nothing: Python has started."""


def version(memory: memoryview) -> None:
    """Write the package's version."""
    arrays.write_text(__version__, memory)


def set_output(of_host: int) -> None:
    """Hand Python's output to the host program's function, or no longer."""
    if _output is not None:
        _output.choose(bool(of_host))
