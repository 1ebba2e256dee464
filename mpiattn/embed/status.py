"""Errors as the status codes of mpiattn.h and a text."""

from __future__ import annotations

import sys
from array import array
from pathlib import Path
from traceback import extract_tb

from ..errors import ArgumentError, CallError, FileError, MemoryShortage, MpiattnError, PeerFailure, VerificationError
from .errors import HandleError, HostError

ARGUMENT, HANDLE, CALL, PEER, OF_MPI, FILE, VERIFY, MEMORY, PYTHON, OTHER, INTERRUPT = range(1, 12)  # as in mpiattn.h
# The first that an exception is one of counts.
OF_ERRORS = {
    MemoryShortage: MEMORY,
    HandleError: HANDLE,
    HostError: OF_MPI,
    ArgumentError: ARGUMENT,
    CallError: CALL,
    PeerFailure: PEER,
    FileError: FILE,
    VerificationError: VERIFY,
    MpiattnError: CALL,  # another call on the communicator is running, or one before did not end
    MemoryError: MEMORY,
    KeyboardInterrupt: INTERRUPT,
}


def describe(error: BaseException) -> tuple[int, str, bytes]:
    """(status, text, ranks) of an exception.  The text of an unexpected one says where in the code it was raised.

    ranks: those that failed, of a PeerFailure, as 64-bit integers.
    """
    status, text = _described(error)
    ranks = array("q", error.ranks if isinstance(error, PeerFailure) else ())
    return status, text.encode(errors="backslashreplace").decode(), ranks.tobytes()  # C gets UTF-8


def _described(error: BaseException) -> tuple[int, str]:
    status = next((status for kind, status in OF_ERRORS.items() if isinstance(error, kind)), OTHER)
    if isinstance(error, MpiattnError):
        # A program can so tell that it ended MPI too early from a wrong argument.
        return OF_MPI if status == ARGUMENT and _ended() else status, str(error)
    if status == MEMORY:
        return status, f"not enough memory: {error}".removesuffix(": ")
    if status == INTERRUPT:
        return status, "the call was interrupted"
    if _of_mpi(error):
        from ..comm.mpi_errors import in_words

        return OF_MPI, in_words(error)
    frame = (extract_tb(error.__traceback__) or [None])[-1]
    where = f" (in {frame.name}, {Path(frame.filename).name}:{frame.lineno})" if frame else ""
    return status, f"{type(error).__name__}: {error}{where}"


def _of_mpi(error: BaseException) -> bool:
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI is not None and isinstance(error, MPI.Exception)


def _ended() -> bool:
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI is not None and MPI.Is_finalized()
