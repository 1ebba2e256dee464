"""Exceptions of mpiattn: every user error derives from `MpiattnError`."""


class MpiattnError(Exception):
    """Base class of the errors that mpiattn raises on purpose.

    `everywhere` is True once the ranks of a communicator have agreed on the error: all of them raise it, none is
    left waiting.  `among` is MPI's number of that communicator in this process, None without agreement.  So many
    ranks as `raised_by` raise it; on one of them `tells` is True, the rank that prints the error if nobody catches it.
    """

    everywhere = False
    among = None
    raised_by = 1
    tells = True


class ArgumentError(MpiattnError, ValueError):
    """An argument is invalid; the message names the argument, its value and the values allowed."""


class KeywordError(ArgumentError, TypeError):
    """A function has no argument of that name; the message says what was probably meant."""


class MemoryShortage(ArgumentError, MemoryError):
    """What is asked for needs more memory than there is; the message says what would fit.  Nothing was allocated."""


class FileError(MpiattnError, OSError):
    """A file cannot be read or written as asked."""


class PeerFailure(MpiattnError):
    """Another rank failed or timed out, so this rank's call cannot be completed.

    `ranks` are the ranks that failed, by their numbers in the communicator of the plan or cache: those that have ended,
    do not answer, or raised an error; () where all answer, or where it is not known.
    `relayed` is True if another rank, which raises its own error, reported the failure to this rank.
    """

    relayed = False

    def __init__(self, message: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class CallError(MpiattnError):
    """The ranks of a communicator made different calls, or the same calls in another order."""


class CopyError(MpiattnError, TypeError):
    """A plan or a cache cannot be copied or pickled."""


class ScheduleError(MpiattnError):
    """A schedule violates one of its invariants (see `mpiattn.schedule.validate`)."""


class VerificationError(MpiattnError):
    """A result differs from the float64 reference by more than its tolerance.

    `verification` is the `Verification` of `MeshAttention.verify`, None from a command.
    """

    verification = None
