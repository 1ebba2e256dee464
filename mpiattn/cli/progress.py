"""A progress bar for long runs, on rank 0's terminal only."""

import os
import sys

from . import launch_rank, witness

LAUNCHERS = ("hydra", "pmi_proxy", "mpiexec", "mpirun", "prte", "orte", "srun")


def _parent(pid):
    """Parent of a process by Linux's /proc."""
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rsplit(")", 1)[1].split()[1])


def _terminal():
    """Where a person watches: standard error if it is a terminal.

    A launcher hands its ranks pipes even where it was itself started from a terminal, so under one on this host
    rank 0 looks where the launcher's own standard error goes.
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
                return open(target, "w")                 # closed with the process
            pid = _parent(pid)
    except (OSError, ValueError):
        pass                                             # no /proc, or not ours to read
    return None


class Progress:
    """A bar with a title and a total, or nothing where nobody watches; call it with what was just done."""

    def __init__(self, title, total, unit=""):
        self._title, self._total, self._unit, self._done, self._bar = title, total, unit, 0, None
        self(0)
        terminal = _terminal() if launch_rank() == 0 else None
        if terminal is not None:
            from tqdm import tqdm
            self._bar = tqdm(desc=title, total=total, unit=unit, file=terminal, unit_scale=True, leave=False,
                             dynamic_ncols=True)

    def __call__(self, done):
        """Advance by what was just done."""
        self._done += done
        witness.tell(doing=f"{self._title}, {self._done:g} of {self._total:g}{self._unit}")
        if self._bar is not None:
            self._bar.update(done)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self._bar is not None:
            self._bar.close()
