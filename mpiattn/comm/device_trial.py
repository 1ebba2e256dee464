"""Whether MPI carries device memory between the ranks, tried by the ranks themselves.

The probe in a child process (`mpiattn.system.gpu_probe`) comes first, because a crash there harms nobody.  But a child
cannot always be run: a GPU may be reserved for one process, and some MPIs start only under their launcher.  Then the
ranks try, if their MPI says that it takes device memory.  A crash would end the job, so a message goes before, which
says what is tried and how to do without.
"""

import sys

import numpy as np

from ..system.gpu_probe import SIZES
from .agreement import agreement
from .exchange import Exchange

TAG = 0  # for messages on the communicator's duplicate, where no call is running


def succeeds(peers, backend, why):
    """Whether every rank gets from the one before it what that has sent; collective.

    backend: passes device memory to MPI.  why: why that may work, and why it is tried, for the message.
    """
    if peers.rank == 0:
        print(
            f"mpiattn: ranks now send each other device memory ({why}). If the job ends here, MPI cannot do it: take "
            "transport 'staged' (--transport staged)",
            file=sys.stderr,
            flush=True,
        )
    after, before = (peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size
    exchange, wrong = Exchange(peers), False
    for size in SIZES:
        with agreement(peers):
            sent = backend.contiguous(_bytes(peers.rank, size))
            taken = backend.empty((size,), "uint8")
            backend.zero((taken,))
        backend.begin()
        posted = exchange.receive(peers.comm, backend.incoming(taken), before, TAG)
        posted += exchange.send(peers.comm, backend.outgoing(sent), after, TAG)
        exchange.wait(posted, "trying MPI on device memory")
        backend.sent(sent)
        backend.wait(backend.arrived(taken))
        wrong |= not np.array_equal(taken.get(), _bytes(before, size))
    return not peers.largest([wrong])[0]


def _bytes(rank, size):
    return (np.arange(size) + rank).astype(np.uint8)
