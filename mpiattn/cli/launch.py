"""How a subcommand that uses MPI runs and ends: all ranks together, with one message."""

import contextlib
import os
import socket
import sys
import time
import traceback

from ..errors import MpiattnError, PeerFailure
from . import witness
from .threads import local_ranks

PARTING = 10.0             # seconds that ranks which end together wait for each other
FLUSH = 0.5                # seconds that a launcher needs to pass a message on, which it drops when the job is aborted
STAGGER, LATEST = 1.0, 5.0       # seconds between hosts whose ranks fail together, so that one ends the job; at most


class Job:
    """The ranks of this launch: comm, peers, and the phase they are in, whose seconds are kept.

    timeout: seconds that a rank waits for others before it gives up; None for the library's.
    """

    def __init__(self, comm, timeout=None):
        from ..channel import Channel
        from ..peers import Peers, check_timeout, time_limit
        check_timeout(timeout)
        limit = time_limit(timeout)
        hosts = Peers(comm, limit).allgather(socket.gethostname())
        self.comm, self.peers = comm, Peers(comm, limit, channel=Channel(comm, hosts))
        self.phase, self.seconds = "start", {}
        witness.tell(f"rank {comm.rank} of {comm.size} on {socket.gethostname()}")

    def __call__(self, phase, work):
        """Run work() as a phase, which the ranks begin and end together."""
        self.phase = phase
        witness.tell(doing=phase)
        self.peers.barrier()
        start = time.perf_counter()
        result = work()
        self.peers.barrier()
        self.seconds[phase] = time.perf_counter() - start
        return result


def on_all_ranks(work, timeout=None):
    """Run work(job) on every rank and return the exit code.

    An error that the ranks agreed on is said once, by rank 0, and ends all of them with code 1.  An error that
    only one rank knows of would leave the others waiting: that rank says what it is and where, and aborts the launch.
    """
    from mpi4py import MPI
    comm, job = MPI.COMM_WORLD, None
    try:
        job = Job(comm, timeout)
        return work(job)
    except BaseException as error:
        if job is None or (isinstance(error, MpiattnError) and (error.everywhere or comm.size == 1)):
            if comm.rank == 0:
                print(f"mpiattn: {error}", file=sys.stderr, flush=True)
            _part(comm)
            return 1
        if comm.size == 1:
            raise
        if not isinstance(error, KeyboardInterrupt):
            _speak(comm, _story(comm, job, error))
        elif comm.rank:
            time.sleep(FLUSH)                          # rank 0 may have files to clear away
        comm.Abort(1)


def _speak(comm, story):
    """Say why this rank is about to end the job, unless another that fails with it has said why it is."""
    launcher = witness.launcher or os.getppid()        # one for all ranks on a host
    if sys.platform.startswith("linux"):
        claim = socket.socket(socket.AF_UNIX)          # held until this process ends
        try:
            claim.bind(f"\0mpiattn-{launcher}")
        except OSError:
            time.sleep(PARTING)
            return
    time.sleep(min(STAGGER * (comm.rank // local_ranks()), LATEST))
    sys.stderr.write(story)                            # in one piece
    sys.stderr.flush()
    time.sleep(FLUSH)


def _part(comm):
    """Wait until rank 0 has spoken: a launcher ends all ranks with the first that fails."""
    from ..peers import Peers
    with contextlib.suppress(PeerFailure):
        Peers(comm, PARTING).barrier()


def _story(comm, job, error):
    """What happened to this rank, where, and why."""
    if isinstance(error, PeerFailure):
        return f"mpiattn: {error}; phase: {job.phase}\n"
    where = getattr(error, "where", "") or f"in phase {job.phase}"
    story = f"mpiattn: rank {comm.rank} of {comm.size} on {socket.gethostname()} failed {where}: "
    if isinstance(error, MpiattnError):
        return f"{story}{error}\n"
    trace = "".join(traceback.format_exception(error))
    return f"{story}{type(error).__name__}: {error}\n{trace}"
