"""The signals that end a command, and those that have come before it could act upon them.

This is the first module that a command loads, so it needs little else.
"""

import contextlib
import signal

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

came: list[int] = []  # numbers of signals to act upon later


def note(number, frame):
    """Leave a signal for later, as a handler."""
    came.append(number)


def handle(handler):
    """Set the handler of the signals, but for those that are ignored, as under nohup; returns what `restore` takes.

    Does nothing outside of the main thread, which alone may set handlers.
    """
    before = {number: signal.getsignal(number) for number in NUMBERS}
    before = {number: kept for number, kept in before.items() if kept not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, handler)
    except ValueError:  # another thread
        return {}
    return before


def restore(before):
    """Set the handlers that `handle` has replaced, but for signals that the command ignores since then."""
    for number, handler in before.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def set_again():
    """Set the handlers that Python knows of: MPI's start may replace them, as MPICH's does that of SIGUSR1.

    Does nothing outside of the main thread, as `handle`.
    """
    known = {number: signal.getsignal(number) for number in NUMBERS}
    with contextlib.suppress(ValueError):
        for number, handler in known.items():
            if handler is not None:
                signal.signal(number, handler)


def in_words(number):
    """How a signal has ended a command."""
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
