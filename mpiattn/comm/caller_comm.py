"""The communicator that a caller passes: whether it can be used, and if not, why and what to pass."""

from numbers import Integral

from mpi4py import MPI

from ..errors import ArgumentError

# Nothing of a communicator may be asked for without a running MPI: its answer is the end of the process.
NOT_STARTED = "MPI is not initialized in this process; call MPI.Init() first (mpi4py does so by default)"
ENDED = "MPI is finalized in this process; nothing can be sent any more"


def is_running():
    """Whether MPI runs in this process."""
    return MPI.Is_initialized() and not MPI.Is_finalized()


def check_running(what):
    """Raise ArgumentError unless MPI runs in this process.  what: begins the message."""
    if not is_running():
        raise ArgumentError(f"{what}, but {ENDED if MPI.Is_initialized() else NOT_STARTED}")


def check_comm(comm):
    """Raise ArgumentError unless `comm` is an intracommunicator of a running MPI."""
    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise ArgumentError(
            "comm is MPI.COMM_NULL; it must be an intracommunicator.  A rank gets COMM_NULL where it is no member, as "
            "of a Split with MPI.UNDEFINED, and must not call; a communicator that was freed becomes one too"
        )
    if isinstance(comm, Integral):
        raise ArgumentError(
            f"comm is {comm!r}; it must be an mpi4py intracommunicator: MPI.Comm.f2py({comm!r}) makes one of an "
            "integer handle (of Fortran, or from Comm.py2f)"
        )
    if not isinstance(comm, MPI.Intracomm):
        intercomm = "an intercommunicator" if isinstance(comm, MPI.Intercomm) else repr(comm)
        advice = ", which comm.Merge() makes of it" if isinstance(comm, MPI.Intercomm) else ""
        raise ArgumentError(f"comm is {intercomm}; it must be an mpi4py intracommunicator{advice}")
    check_running("comm is given")
