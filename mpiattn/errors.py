"""What mpiattn raises: every user error derives from `MpiattnError`."""


class MpiattnError(Exception):
    """Base of every error that mpiattn raises on purpose.

    `everywhere` is True once the ranks of a communicator have agreed on the error, so that each of them raises the same
    one and none is left waiting.  `among` is MPI's number of that communicator in this process, None for no agreement.
    """

    everywhere = False
    among = None


class ArgumentError(MpiattnError, ValueError):
    """An argument is not what it may be; the message names it, what it was and what it may be."""


class FileError(MpiattnError, OSError):
    """A file cannot be read or written as asked."""


class PeerFailure(MpiattnError):
    """Another rank has failed or did not come in time; what this rank was doing with it cannot be finished.

    `relayed` is True on ranks that were told so by another rank, which raises an error of its own.
    """

    relayed = False


class CallError(MpiattnError):
    """The ranks of a communicator made different calls, or the same calls in another order."""


class CopyError(MpiattnError, TypeError):
    """A plan or a cache cannot be copied or pickled."""


class ScheduleError(MpiattnError):
    """A schedule breaks one of its own rules (see `mpiattn.schedule.validate`)."""


class VerificationError(MpiattnError):
    """A result differs from the float64 reference by more than its tolerance."""
