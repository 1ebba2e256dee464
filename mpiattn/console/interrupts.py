"""What SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGUSR1 do: remove unfinished files, print one message, end the job.

Python raises KeyboardInterrupt wherever the program happens to be.  Inside a weak-reference callback, of which h5py has
many, the exception is dropped and the program goes on.  So the handler cleans up itself and ends the process at once.

A rank that ended before MPI runs would leave the others waiting in MPI's start.  So until then a rank only notes that a
signal has come.
"""

import contextlib
import os
import signal
import threading
import time

from ..system import output_lock, partial_files
from . import signals, witness
from .absent import all_there
from .message import PARTING, forwards, speak, speak_past, write_story

ECHO = 3.0  # seconds after which a launcher has killed all ranks that it sent SIGTERM after a failure

_world = None  # MPI.COMM_WORLD, once MPI runs


@contextlib.contextmanager
def handled(command, makes, speaks, waits):
    """A context that handles the signals while a command ("run", ...) works; ignored ones, as under nohup, stay so.

    makes: the argument that names the command's output file, or None.  speaks: whether this is rank 0, or has no ranks
    beside it.  waits: whether this is a rank of a launch, where signals wait until MPI runs.
    The exit code is 128 plus the signal's number: 130 for Ctrl-C.
    """

    def handler(number, frame):
        if waits and _world is None:
            signals.note(number, frame)
            return
        signals.handle(signal.SIG_IGN)  # Ctrl-C may arrive twice, from the terminal and from the witness
        unwritten = partial_files.unfinished() | ({makes} if makes else set()) - partial_files.published()
        lost = f", {' and '.join(sorted(unwritten))} was not written" if unwritten else ""
        name = f"mpiattn {command}".strip()
        story = f"{name}: {signals.in_words(number)}{lost}{partial_files.kept()}\n"
        if speaks:
            partial_files.discard_all()
        if waits:
            _tell(_world, story, number)
        elif speaks:
            write_story(story)
        # last: until the job ends, rank 0 goes on, and would fail for another reason without its files
        partial_files.discard_all()
        output_lock.remove_all()
        if waits:
            _world.Abort(128 + number)
        os._exit(128 + number)

    before = signals.handle(handler)
    if not waits:
        _act()
    try:
        yield
    finally:
        signals.restore(before)


def mpi_runs(world):
    """Act upon signals from now on, and upon those that have come; world: MPI.COMM_WORLD."""
    global _world
    _world = world
    signals.set_again()
    _act()


def _act():
    if signals.came:
        signal.raise_signal(signals.came.pop(0))


class EndRequest:
    """SIGUSR1 as the request to end after the work at hand, during a `with` block.

    heeded: whether there is anything to go on with later; if not, SIGUSR1 ends the process as other signals do.
    A request that was granted is granted once: SIGUSR1 is ignored from then on.
    """

    code = 128 + signal.SIGUSR1  # exit code

    def __init__(self, heeded):
        self._heeded, self._came, self._before = heeded, False, None
        self._granted = False

    def __enter__(self):
        if self._heeded and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGUSR1, self._note)
        return self

    def __exit__(self, *exception):
        if self._before is None:
            return
        # The signal of a launcher reaches the ranks one after the other.  The first one ends the work of all, and the
        # others would abort ranks that are about to end in order.
        after = signal.SIG_IGN if self._granted else self._before
        signal.signal(signal.SIGUSR1, after)

    def _note(self, number, frame):
        self._came = True

    def of_any(self, peers):
        """Whether any rank got the signal; collective."""
        if not self._heeded:
            return False
        self._granted = bool(peers.largest([self._came])[0])
        return self._granted


def _tell(world, story, number):
    """Print why the job ends, unless another rank does."""
    launcher = witness.launcher or os.getppid()
    if forwards(number):
        if number == signal.SIGTERM and not all_there(launcher):
            time.sleep(ECHO)  # Open MPI sends SIGTERM after a rank has failed and printed its message
        speak(story, world.rank, launcher)
    elif not speak_past(story, launcher):
        time.sleep(PARTING)
