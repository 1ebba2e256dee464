"""One message where ranks fail together: which of them speaks, and how long it takes until that is out."""

import os
import socket
import sys
import time

from .threads import local_ranks

PARTING = 10.0             # seconds that ranks which end together wait for each other
SILENT = 5.0               # seconds in which rank 0 speaks, before a launcher ends it because another rank has ended
FLUSH = 0.5                # seconds that a launcher needs to pass a message on, which it drops when the job is aborted
STAGGER, LATEST = 1.0, 5.0       # seconds between hosts whose ranks fail together, so that one ends the job; at most
AFTER = LATEST + 2 * FLUSH # seconds in which the rank that has failed speaks, before those that it has told

_claims = []               # held until this process ends


def claim(launcher):
    """Whether no other rank under this launcher has spoken; then none will."""
    if not sys.platform.startswith("linux"):
        return True
    claimed = socket.socket(socket.AF_UNIX)
    try:
        claimed.bind(f"\0mpiattn-{launcher}")
    except OSError:
        return False
    _claims.append(claimed)
    return True


def speak(story, rank, launcher):
    """Write a story, why this rank is about to end the job, unless another that fails with it has said why it is.

    launcher: the number of the process that has started the ranks of this host.
    """
    if not claim(launcher):
        time.sleep(PARTING)
        return
    time.sleep(min(STAGGER * (rank // local_ranks()), LATEST))
    os.write(2, story.encode())                        # in one piece
    time.sleep(FLUSH)
