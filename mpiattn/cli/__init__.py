"""The command line: one module per subcommand, each with `add_arguments(parser)` and `run(args)`."""

import signal

from ..console import signals


def main(argv=None):
    """Entry point of `mpiattn`: returns the exit code."""
    before = signals.handle(signals.note)  # at once: to load what follows may take a second
    try:
        from .commands import run

        return run(argv)
    finally:
        if argv is None:
            signals.handle(signal.SIG_IGN)  # the process ends now, and its exit code stands
        else:
            signals.restore(before)
