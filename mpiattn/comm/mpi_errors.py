"""Errors that MPI reports, in words: those of a lost message are not the fault of the rank that waits for it."""

from mpi4py import MPI

# What MPI says where it says nothing: "See the MPI_ERROR field in MPI_Status", "Other MPI error", "Unknown error".
NOTHING_SAID = (MPI.ERR_IN_STATUS, MPI.ERR_OTHER, MPI.ERR_UNKNOWN, MPI.ERR_PENDING)


def in_words(error):
    """An exception as "its class: its text"; one of MPI, whose class is called Exception, as what has happened."""
    if not isinstance(error, MPI.Exception):
        return f"{type(error).__name__}: {error}"
    return f"MPI reports an error{_reason(error)}"


def happened(error, where):
    """What a rank met, and where: "raised KeyError in a call: its text"."""
    if not isinstance(error, MPI.Exception):
        return f"raised {type(error).__name__} in {where}: {error}"
    return f"met an error of MPI in {where}{_reason(error)}"


def lost(error):
    """What it means for a rank that waits for messages that MPI reports an error."""
    return f"and MPI cannot complete it{_reason(error)}"


def _reason(error):
    return "" if error.Get_error_class() in NOTHING_SAID else f" ({error.Get_error_string().splitlines()[0]})"
