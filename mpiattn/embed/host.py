"""The host program: its MPI, which must be that of mpi4py, its communicators, and where it wants Python's output."""

from __future__ import annotations

import ctypes
import io
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mpi4py

from .errors import HostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpi4py import MPI

OPEN_MPI = b"libmpi.so.40\0", b"libmpi.so.20\0"  # what a library that was linked with Open MPI names
REBUILD = (
    "install mpi4py for the host program's MPI: MPICC=mpicc python -m pip install --force-reinstall --no-cache-dir "
    "--no-binary mpi4py mpi4py"
)


def check_mpi(version: str | None, library: str | None) -> None:
    """Load mpi4py.  Raises HostError unless the host program's MPI runs, and mpi4py has the same.

    version, library: what MPI_Get_library_version says that the process has found, and the file that has it; None if
        the process shows none.
    """
    if "mpi4py.MPI" not in sys.modules:
        if version is None:
            raise HostError(
                "no MPI can be seen in this process; the host program must be linked with a shared library of MPI, "
                "and loaded so that others see its functions (RTLD_GLOBAL)"
            )
        # The host program starts and ends MPI, and its error handlers stay as it has set them.
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        mpi4py.rc.errors = "default"
        _check_family(library)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise HostError(f"mpi4py cannot be loaded beside the MPI of {library}: {error}; {REBUILD}") from error
    of_mpi4py = MPI.Get_library_version()
    if version is not None and _plain(version) != _plain(of_mpi4py):
        raise HostError(
            f"the host program's MPI is {_first_line(version)!r} ({library}), that of mpi4py is "
            f"{_first_line(of_mpi4py)!r}; they must be the same: {REBUILD}"
        )
    if not MPI.Is_initialized():
        raise HostError("MPI is not initialized in this process, as mpi4py sees it; call MPI_Init first")
    if MPI.Is_finalized():
        raise HostError("MPI is finalized in this process; nothing can be sent any more")


def _check_family(library: str | None) -> None:
    """Raise HostError if mpi4py was built for Open MPI and the process has another MPI, or the other way round.

    Such a module must not even be loaded: its functions would be those of an MPI that has other handles.
    """
    spec = find_spec("mpi4py.MPI")  # which mpi4py's wheels choose by the MPI in the process
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return
    content = Path(spec.origin).read_bytes()
    built_for = any(name in content for name in OPEN_MPI)
    if built_for != hasattr(ctypes.CDLL(None), "ompi_mpi_comm_world"):
        kinds = "Open MPI", "another MPI than Open MPI"
        raise HostError(
            f"mpi4py ({spec.origin}) is for {kinds[not built_for]}, the host program has {kinds[built_for]} "
            f"({library}); {REBUILD}"
        )


def _plain(version: str) -> str:
    return " ".join(version.replace("\0", " ").split())


def _first_line(version: str) -> str:
    return version.strip().splitlines()[0] if version.strip() else version


@contextmanager
def returning_errors(*comms: MPI.Comm) -> Iterator[None]:
    """A block in which errors of MPI on communicators become exceptions: the host program's handlers may end it."""
    from mpi4py import MPI

    handlers = [comm.Get_errhandler() for comm in comms]
    for comm in comms:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    try:
        yield
    finally:
        for comm, handler in zip(comms, handlers):
            comm.Set_errhandler(handler)
            if handler not in (MPI.ERRORS_ARE_FATAL, MPI.ERRORS_RETURN):
                handler.Free()


# MPICH and its relatives have the kind of an object and where it lies in its handle; 0x44000000 is MPI_COMM_WORLD.
# Intel MPI trusts it, and would read memory that is not there.
MPICH_WORLD, KIND, PLACE, BUILT_IN, DIRECT = 0x44000000, 0x3C000000, 0xC0000000, 0x40000000, 0x80000000
INDEX, PREALLOCATED = 0x03FFFFFF, 8  # MPICH ends the process where there is no such one


def _may_be_communicator(handle: int) -> bool:
    """Whether a number looks like a handle of a communicator, where that can be told."""
    from mpi4py import MPI

    if MPI.COMM_WORLD.py2f() != MPICH_WORLD:
        return True
    if not handle & PLACE or handle & PLACE == BUILT_IN:
        return handle in (MPI.COMM_WORLD.py2f(), MPI.COMM_SELF.py2f(), MPI.COMM_NULL.py2f())
    if handle & PLACE == DIRECT and handle & INDEX >= PREALLOCATED and "MPICH Version" in MPI.Get_library_version():
        return False
    return handle & KIND == MPICH_WORLD & KIND


@contextmanager
def communicator(handle: int) -> Iterator[Any]:
    """The communicator of an integer handle.  In the block its errors become exceptions, as they do in its duplicate.

    Raises HostError if there is none.
    """
    from mpi4py import MPI

    with returning_errors(MPI.COMM_WORLD, MPI.COMM_SELF):  # which MPI asks about handles that are none
        try:
            if not _may_be_communicator(handle):
                raise MPI.Exception(MPI.ERR_COMM)
            comm = MPI.Comm.f2py(handle)
            if comm != MPI.COMM_NULL:
                comm.Get_size()
        except MPI.Exception as error:
            raise HostError(
                f"comm is {handle}, no communicator; it must be MPI_Comm_c2f(comm), in Fortran comm or comm%MPI_VAL "
                f"({error.Get_error_string().splitlines()[0]})"
            ) from error
    if comm == MPI.COMM_NULL:
        yield comm
        return
    with returning_errors(comm):
        yield comm


class Stream(io.TextIOBase):
    """A text stream that hands all on at once to a function of (text, is_error)."""

    def __init__(self, write: Callable[[str, int], object], is_error: bool) -> None:
        self._write, self._is_error = write, int(is_error)

    def write(self, text: str) -> int:
        """Hand text on.  Zeros in it would end it for C."""
        if text:
            self._write(text.replace("\0", "").encode(errors="backslashreplace").decode(), self._is_error)
        return len(text)

    def writable(self) -> bool:
        """Whether text can be written: yes."""
        return True


class Output:
    """Where Python's output goes.

    write: function of (text, is_error) that hands text to the host program.
    """

    def __init__(self, write: Callable[[str, int], object]) -> None:
        self._streams = Stream(write, False), Stream(write, True)
        self._before: tuple[Any, Any] | None = None
        for stream in (sys.stdout, sys.stderr):  # the interpreter never ends, so that nothing else would flush them
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)

    def choose(self, of_host: bool) -> None:
        """Take the host program's function, or again the streams that there were before."""
        if of_host and self._before is None:
            self._before = sys.stdout, sys.stderr
            sys.stdout, sys.stderr = self._streams
        elif not of_host and self._before is not None:
            (sys.stdout, sys.stderr), self._before = self._before, None
