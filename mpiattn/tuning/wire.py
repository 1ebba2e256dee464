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

    def complete(self, posted):
        """Wait until the posted transfers are complete."""
        self.exchange.wait(posted)
        self.backend.sent(self.given)
        self.backend.wait(self.backend.arrived(self.taken))

    def swap(self, ends):
        """Send and receive once; ends: (dest, source)."""
        dest, source = ends
        self.complete(self.receive(source) + self.send(dest))
