"""Handlers of SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGUSR1: remove unfinished files, print one message, end the job.

Python raises KeyboardInterrupt wherever the program happens to be.  Inside a weak-reference callback, of which h5py has
many, the exception is dropped and the program goes on.  So the handler cleans up itself and ends the process at once.
"""

import contextlib
import os
import signal
import sys
import threading
import time

from ..system import partial_files
from . import witness
from .message import PARTING, speak, write_story

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
ECHO = 3.0  # seconds after which a launcher has killed all ranks that it sent SIGTERM after a failure


def handled(command, makes, speaks):
    """A context that handles the signals while a command ("run", ...) works; ignored ones, as under nohup, stay so.

    makes: the argument that names the command's output file, or None.  speaks: whether this process prints the message
    while MPI does not run.  The exit code is 128 plus the signal's number: 130 for Ctrl-C.
    """

    def handler(number, frame):
        for other in NUMBERS:  # Ctrl-C may arrive twice, from the terminal and from the witness
            signal.signal(other, signal.SIG_IGN)
        silent = partial_files.gone()  # another rank has removed the file and prints the message
        unwritten = partial_files.discard_all() | ({makes} if makes else set()) - partial_files.published()
        how = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        lost = f", {' and '.join(sorted(unwritten))} was not written" if unwritten else ""
        lost += f"; {partial_files.kept()}" if partial_files.kept() else ""
        story = f"mpiattn{command and f' {command}'}: {how}{lost}\n"
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
            _end_job(mpi.COMM_WORLD, story, number, silent)
        elif speaks:
            with contextlib.suppress(OSError):
                write_story(story)
        os._exit(128 + number)

    return _with(handler)


class EndRequest:
    """SIGUSR1 as the request to end after the work at hand, during a `with` block.

    heeded: whether there is anything to go on with later; if not, SIGUSR1 ends the process as other signals do.
    """

    code = 128 + signal.SIGUSR1  # exit code

    def __init__(self, heeded):
        self._heeded, self._came, self._before = heeded, False, None

    def __enter__(self):
        if self._heeded and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGUSR1, self._note)
        return self

    def __exit__(self, *exception):
        if self._before is not None:
            signal.signal(signal.SIGUSR1, self._before)

    def _note(self, number, frame):
        self._came = True

    def of_any(self, peers):
        """Whether any rank got the signal; collective."""
        return self._heeded and bool(peers.largest([self._came])[0])


def plain():
    """A context with the default handlers, for a long call into C, which would not run Python's handlers.

    Use it only while there are no files to clean up.
    """
    return _with(signal.SIG_DFL)


@contextlib.contextmanager
def _with(handler):
    """Set the handler of the signals that are not ignored during the body."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = {number: signal.getsignal(number) for number in NUMBERS}
    for number, kept in before.items():
        if kept is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, kept in before.items():
            signal.signal(number, kept)


def _end_job(comm, story, number, silent):
    """End all ranks; print why unless another rank does."""
    if silent:
        time.sleep(PARTING)
    else:
        if number == signal.SIGTERM:
            time.sleep(ECHO)  # Open MPI sends SIGTERM after a rank has failed and printed its message
        speak(story, comm.rank, witness.launcher or os.getppid())
    comm.Abort(128 + number)
