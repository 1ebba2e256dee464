"""Progress of long phases: a bar on rank 0's terminal, or a line in its log now and then."""

import os
import sys
import time

from ..system.launch_variables import launch_rank
from . import witness
from .absent import parent
from .table import duration

LAUNCHERS = ("hydra", "pmi_proxy", "mpiexec", "mpirun", "prte", "orte", "srun")
LOOK = 0.1  # seconds between updates, which take longer than a small piece of work
APART = 10.0  # seconds before the first line, and at least between two lines
SHARE, SILENCE = 0.1, 60.0  # a line is due when this share more is done, or after this many seconds


def _terminal():
    """Standard error if it is a terminal; under a launcher on this host, the launcher's; else None.

    A launcher gives its ranks pipes even if it was itself started from a terminal.
    """
    if sys.stderr is None:
        return None
    if sys.stderr.isatty():
        return sys.stderr
    pid = witness.launcher or os.getppid()
    try:
        while any(name in os.path.basename(os.readlink(f"/proc/{pid}/exe")) for name in LAUNCHERS):
            target = os.readlink(f"/proc/{pid}/fd/2")
            if target.startswith(("/dev/pts/", "/dev/tty")):
                return open(target, "w")  # closed with the process
            pid = parent(pid)
    except (OSError, ValueError):
        pass  # no /proc, or not ours to read
    return None


class Progress:
    """Progress of a phase with a title and a total; call it with the amount just done.

    Rank 0 shows a bar on a terminal, else lines on standard error: "forward 40 %, 12 of 30 blocks, 14 s, about
    21 s to go".  Short phases print no line.
    """

    def __init__(self, title, total, unit=""):
        self._title, self._total, self._unit, self._done, self._bar, self._at = title, total, unit, 0, None, ""
        self._began = self._line_at = self._looked = time.monotonic()
        self._line_done, self._lines = 0, False
        self._tell_witness()
        if launch_rank() == 0:
            terminal = _terminal()
            if terminal is None:
                self._lines = sys.stderr is not None
                return
            from tqdm import tqdm

            self._bar = tqdm(
                desc=title, total=total, unit=unit, file=terminal, unit_scale=True, leave=False, dynamic_ncols=True
            )

    def __call__(self, done):
        """Advance by the amount just done."""
        self._done += done
        if self._bar is not None:
            self._bar.update(done)
        now = time.monotonic()
        if now - self._looked >= LOOK:
            self._looked = now
            self._tell_witness()
            if self._lines and self._due(now):
                self._line(now)

    def at(self, where):
        """Say at which part of the work the phase is."""
        self._at = where
        self._tell_witness()
        if self._bar is not None:
            self._bar.set_postfix_str(where)

    def _due(self, now):
        silence = now - self._line_at
        much = silence >= SILENCE or self._done - self._line_done >= SHARE * self._total
        return self._done < self._total and silence >= APART and much

    def _line(self, now):
        self._line_done, self._line_at = self._done, now
        seconds, share = now - self._began, self._done / self._total if self._total else 1
        rest = f", about {duration(seconds / share - seconds)} to go" if 0 < share < 1 else ""
        print(
            f"{self._title} {int(100 * share)} %, {_amount(self._done)} of {_amount(self._total)}{self._unit}, "
            f"{duration(seconds)}{rest}{self._at and f'; at {self._at}'}",
            file=sys.stderr,
            flush=True,
        )

    def _tell_witness(self):
        done = f"{self._title}, {_amount(self._done)} of {_amount(self._total)}{self._unit}"
        witness.tell(doing=f"{done}, at {self._at}" if self._at else done)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self._bar is not None:
            self._bar.close()


class Whole(Progress):
    """Progress of several pieces of work, each in phases, in one bar or in lines about all of them."""

    def phases(self, where, shares):
        """What makes the `Progress` of a phase of a piece of work, as `Progress` does.

        where: the piece, in words.  shares: by the phase's title, what it adds to the whole when it is over.
        """
        return lambda title, total, unit="": _Phase(self, f"{where}, {title}", total, shares.get(title, 0))


class _Phase:
    """A `Progress` that is shown as a part of a whole one."""

    def __init__(self, whole, where, total, share):
        self._whole, self._per_unit = whole, share / total if total else 0
        whole.at(where)

    def __call__(self, done):
        """Advance by the amount just done."""
        self._whole(done * self._per_unit)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


def _amount(number):
    """A number as text, with one decimal below 100 unless it is 0."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}".removesuffix(".0")
