"""Start and end of a subcommand that uses MPI: all ranks together, with one message."""

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
import warnings

from ..comm.agreement import agreement
from ..errors import ArgumentError, MpiattnError, PeerFailure
from ..system import output_lock, partial_files
from ..system.launch_variables import launch_rank
from . import signals, witness
from .message import AFTER, PARTING, SILENT, as_typed, speak
from .startup import finish, start


class Job:
    """The ranks of this launch: comm, peers, the current phase, and the seconds of every phase.

    of: the part of the work that phases belong to, in words.
    timeout: seconds that a rank waits for others before it gives up; None: the library's default.
    """

    def __init__(self, comm, timeout=None):
        from ..comm.channel import Channel
        from ..comm.peers import Peers, check_timeout, time_limit

        check_timeout(timeout)
        channel = Channel(comm)
        self.comm, self.peers = comm, Peers(comm, time_limit(timeout), channel=channel)
        channel.hosts = self.peers.allgather(socket.gethostname())
        self.phase, self.seconds, self.of = "start", {}, ""
        witness.tell(f"rank {comm.rank} of {comm.size} on {socket.gethostname()}")

    def __call__(self, phase, work):
        """Run work() as a phase that all ranks begin and end together."""
        self.phase = f"{phase} of {self.of}" if self.of else phase
        witness.tell(doing=phase)
        self.peers.barrier()
        start = time.perf_counter()
        result = work()
        self.peers.barrier()
        self.seconds[phase] = time.perf_counter() - start
        return result

    def on_rank_0(self, work):
        """Run work() on rank 0; what it raises there, all ranks raise; collective."""
        with agreement(self.peers, only=0):
            if self.comm.rank == 0:
                work()

    def end(self):
        """Wait for all ranks at the end of the work: MPI_Finalize waits for them too, and knows no time limit."""
        self.phase = "end"
        self.peers.barrier()


def on_all_ranks(work, timeout=None, alone=False):
    """Start MPI, run work(job) on every rank and return the exit code.

    An error that all ranks share is printed by rank 0, and all ranks return 1.  An error of one rank would leave the
    others waiting: that rank prints the error and where it happened, and aborts the launch.
    alone: run the work even if another MPI's launcher has started every rank in a world of its own, if MPI can start.
    """
    from ..system import gpu_aware_mpi, launcher

    unfit = gpu_aware_mpi.unfit()
    if unfit:
        return _refuse("{}. Nothing was done. {}".format(*unfit))
    wrong = launcher.foreign()
    comm = None if wrong else start(timeout)
    wrong = wrong or (None if alone else launcher.copies(comm.size))
    if wrong:
        return _refuse(f"{wrong}. Nothing was done. {launcher.ADVICE}")
    if alone:  # the work's report says it
        warnings.filterwarnings("ignore", f".*{launcher.ALONE}")
    job = None
    try:
        job = Job(comm, timeout)
        code = work(job)
        job.end()
        finish(timeout)
        return code
    except BaseException as error:
        signals.handle(signal.SIG_IGN)  # one reason is enough
        wrong_timeout = job is None and isinstance(error, ArgumentError)  # the same on every rank
        if isinstance(error, MpiattnError) and (error.everywhere or wrong_timeout or comm.size == 1):
            if comm.rank == 0:
                print(f"mpiattn: {as_typed(error)}{partial_files.kept()}", file=sys.stderr, flush=True)
            _part(comm)
            finish(None if wrong_timeout else timeout)
            return 1
        if comm.size == 1:
            raise
        if isinstance(error, PeerFailure) and error.relayed:
            time.sleep(AFTER)
        parent = witness.launcher or os.getppid()  # the same for all ranks of a host
        speak(_story(comm, job.phase if job else "start", error), comm.rank, parent)
        witness.end()
        partial_files.discard_all()  # last: until the job ends, rank 0 may need its files
        output_lock.remove_all()
        comm.Abort(1)


def _refuse(text):
    """Print once why ranks that share no world, or cannot start MPI, do nothing; returns the exit code."""
    if launch_rank() == 0:
        print(f"mpiattn: {text}", file=sys.stderr, flush=True)
    else:
        time.sleep(SILENT)
    return 1


def _part(comm):
    """Wait until rank 0 has printed: launchers end all ranks when the first one fails."""
    from ..comm.peers import Peers

    with contextlib.suppress(PeerFailure):
        Peers(comm, PARTING).barrier()


def _story(comm, phase, error):
    """What happened to this rank, where, and why."""
    from ..comm.mpi_errors import in_words

    if isinstance(error, PeerFailure):
        return f"mpiattn: {error}; phase: {phase}{partial_files.kept()}\n"
    where = getattr(error, "where", "") or f"in phase {phase}"
    story = f"mpiattn: rank {comm.rank} of {comm.size} on {socket.gethostname()} failed {where}: "
    if isinstance(error, MpiattnError):
        return f"{story}{as_typed(error)}{partial_files.kept()}\n"
    trace = "".join(traceback.format_exception(error))
    return f"{story}{in_words(error)}{partial_files.kept()}\n{trace}"
