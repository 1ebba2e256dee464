"""What ranks find out about device memory by sending each other some: whether MPI carries it, and how fast it travels.

The probe in a child process (`mpiattn.system.gpu_probe`) comes first, because a crash there harms nobody.  But a child
cannot always be run: a GPU may be reserved for one process, and some MPIs start only under their launcher.  Then the
ranks try, if their MPI says that it takes device memory.  A crash would end the job, so a message goes before, which
says what is tried and how to do without.

An MPI that takes device memory may still send it through the host (UCX without its CUDA transports does).  So where
GPUs can copy from each other too, both ways are timed.
"""

import sys
from time import perf_counter as clock

import numpy as np
from mpi4py import MPI

from ..system.gpu_probe import SIZES
from .agreement import agreement
from .exchange import Exchange
from .peers import translate_ranks

TAG = 0  # for messages on the communicator's duplicate, where no call is running
NBYTES = 16 * 2**20  # bytes that every rank sends while it is timed
TIMES = 4  # the first makes connections, the fastest counts
_SECONDS: dict[tuple[int, ...], tuple[float, float]] = {}  # by the ranks of COMM_WORLD and the GPU of each


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
    ring, exchange, wrong = range(peers.size), Exchange(peers), False
    for size in SIZES:
        with agreement(peers):
            sent = backend.contiguous(_bytes(peers.rank, size))
            taken = backend.empty((size,), "uint8")
            backend.zero((taken,))
        before = _pass_on(exchange, ring, backend, sent, taken)
        wrong |= not np.array_equal(taken.get(), _bytes(before, size))
    return not peers.largest([wrong])[0]


def compared(peers, nodes, backend, connected):
    """`seconds` of a back end, and of one like it whose GPUs copy from each other; collective.

    connected: makes that one.  The same ranks on the same GPUs are timed once.
    """
    ranks = translate_ranks(peers.comm, range(peers.size), MPI.COMM_WORLD)
    key = *ranks, *peers.allgather(backend.device)
    timed = peers.allgather(_SECONDS.get(key))
    if None not in timed:
        return timed[0]  # of one rank: another thread may time the same ranks meanwhile
    with agreement(peers):
        other = connected()
    took = seconds(peers, nodes, backend), seconds(peers, nodes, other)
    other.close()
    if MPI.UNDEFINED not in ranks:  # of processes that were started later only this communicator knows
        _SECONDS[key] = took
    return took


def seconds(peers, nodes, backend):
    """Seconds in which all ranks together pass `NBYTES` bytes on to the next rank of their node; collective.

    nodes: the node of every rank.
    """
    ring, exchange = [rank for rank in range(peers.size) if nodes[rank] == nodes[peers.rank]], Exchange(peers)
    with agreement(peers):
        sent, taken = (backend.empty((NBYTES,), "uint8") for _ in range(2))
        backend.zero((sent, taken))
    took, idle, peers.idle = [], peers.idle, backend.idle  # ranks wait as in the calls of a plan
    for _ in range(TIMES):
        peers.barrier()
        start = clock()
        if len(ring) > 1:
            _pass_on(exchange, ring, backend, sent, taken)
        took.append(peers.largest([1e9 * (clock() - start)])[0])
    peers.idle = idle
    return max(1, min(took)) / 1e9


def _pass_on(exchange, ring, backend, sent, taken):
    """Send an array to the next of the ranks in `ring`, and wait for that of the one before, which is returned."""
    peers = exchange.peers
    place = ring.index(peers.rank)
    before, after = ring[place - 1], ring[(place + 1) % len(ring)]
    backend.begin()
    posted = exchange.receive(peers.comm, backend.incoming(taken), before, TAG)
    posted += exchange.send(peers.comm, backend.outgoing(sent), after, TAG)
    exchange.wait(posted, "trying device memory")
    backend.sent(sent)
    backend.wait(backend.arrived(taken))
    return before


def _bytes(rank, size):
    return (np.arange(size) + rank).astype(np.uint8)
