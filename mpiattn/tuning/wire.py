"""Sends arrays as a plan sends chunks: through a back end's buffers and an `Exchange`."""

from ..comm.exchange import Exchange

TAG = 1
ITEMSIZE = 4


class Wire:
    """Two arrays of the back end of about `nbytes`, one to send and one to receive, and the exchange that moves them.

    Transfers are between this rank and others of `peers`; the other rank must post the matching one.
    """

    def __init__(self, peers, backend, nbytes):
        self.peers, self.backend, self.exchange = peers, backend, Exchange(peers)
        self.given, self.taken = (backend.empty((max(1, nbytes // ITEMSIZE),), "float32") for _ in range(2))
        self.nbytes = self.given.nbytes
        backend.wait(backend.zero((self.given, self.taken)))  # touches the memory before anything is timed

    def receive(self, source):
        """Post a receive; returns what was posted."""
        return self.exchange.receive(self.peers.comm, self.backend.incoming(self.taken), source, TAG)

    def send(self, dest):
        """Post a send; returns what was posted."""
        return self.exchange.send(self.peers.comm, self.backend.outgoing(self.given), dest, TAG)

    def complete(self, posted, given=(), taken=()):
        """Wait until the posted transfers are complete.

        given, taken: the arrays that they send and receive; by default those of this object.
        """
        self.exchange.wait(posted)
        for array in given or [self.given]:
            self.backend.sent(array)
        for event in [self.backend.arrived(array) for array in taken or [self.taken]]:
            self.backend.wait(event)

    def swap(self, ends):
        """Send and receive once; ends: (dest, source)."""
        dest, source = ends
        self.complete(self.receive(source) + self.send(dest))
