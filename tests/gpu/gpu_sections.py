"""How run_all.py runs a section: commands with a log and a time limit; standard library only."""

import ctypes
import os
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
prctl = ctypes.CDLL(None).prctl
LEAST = 3.0  # seconds; a section that has less left is not begun
stopped = []  # the signal that has asked for an end; only what runs knows what has to be ended with it


class Skip(Exception):
    """Why a section cannot be done here."""


def command(log, words, seconds, environment, cwd):
    """Run a command that writes into a log: (what it has written, why it has failed or "").

    log: a file open for reading and writing, with what is written so far in it.  It fails after `seconds` too.
    """
    words = list(map(str, words))
    log.write(f"$ {' '.join(words)}\n".encode())
    log.flush()
    start = log.tell()
    if seconds < LEAST:
        return "", f"no time is left: {max(seconds, 0):.0f} s"
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=cwd,
        start_new_session=True,
        preexec_fn=_end_with_me,
    )
    end = time.monotonic() + seconds
    try:
        while process.poll() is None and time.monotonic() < end and not stopped:
            time.sleep(0.05)
    finally:
        late = process.poll() is None
        if late:
            _end(process)
    if stopped:
        sys.exit(143)
    log.seek(start)
    text = log.read().decode(errors="replace")
    if late:
        return text, f"no end after {seconds:.0f} s"
    last = " | ".join(text.strip().splitlines()[-3:])[-400:]
    return text, f"exit code {process.returncode}: {last}" if process.returncode else ""


def _end_with_me():
    """In the child: end with this process, even if that is killed, although it is a session of its own."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(process):
    """A launcher ends its ranks, which are in process groups of their own, so it is asked first."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_section(section, log_path, deadline, environment, cwd):
    """Do a section: {"status": "passed", "failed" or "skipped", "why", "seconds", "record"}.

    section: a function of `run` and of a dict for what it finds, which is kept whatever happens.  `run(words, seconds,
    read, **of the environment)` raises RuntimeError if the command fails, once `read` has had its output, and else
    returns that.  deadline: on time.monotonic's clock.
    """
    start, record, why = time.monotonic(), {}, ""
    with log_path.open("w+b") as log:

        def run(words, seconds, read=None, **options):
            text, failure = command(log, words, min(seconds, deadline - time.monotonic()), environment(**options), cwd)
            if read:
                read(text)
            if failure:
                raise RuntimeError(failure)
            return text

        try:
            section(run, record)
            status = "passed"
        except Skip as skip:
            status, why = "skipped", str(skip)
        except Exception as error:  # of whatever kind: the other sections go on
            kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
            status, why = "failed", " ".join(f"{kind}{error}".split())[:600]
        log.seek(0, os.SEEK_END)
        log.write(f"{status} {why}\n".encode())
    return {
        "status": status,
        "why": why,
        "seconds": round(time.monotonic() - start, 1),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "record": record,
    }
