"""Arrays that travel as a plan's chunks do: through a back end's buffers and an `Exchange`."""

from ..comm.exchange import Exchange

TAG = 1
ITEMSIZE = 4


class Wire:
    """An array of about `nbytes` to send and one to receive, of the back end; and the exchange that moves them.

    Transfers are between this rank and others of `peers`; the other end must do its part.
    """

    def __init__(self, peers, backend, nbytes):
        self.peers, self.backend, self.exchange = peers, backend, Exchange(peers)
        self.given, self.taken = (backend.empty((max(1, nbytes // ITEMSIZE),), "float32") for _ in range(2))
        self.nbytes = self.given.nbytes
        backend.wait(backend.zero((self.given, self.taken)))         # their memory is there before time is taken

    def receive(self, source):
        """Post a receive; returns what was posted."""
        return self.exchange.receive(self.peers.comm, self.backend.incoming(self.taken), source, TAG)

    def send(self, dest):
        """Post a send; returns what was posted."""
        return self.exchange.send(self.peers.comm, self.backend.outgoing(self.given), dest, TAG)

    def complete(self, posted):
        """Wait until what was posted has left and come."""
        self.exchange.wait(posted)
        self.backend.sent(self.given)
        self.backend.wait(self.backend.arrived(self.taken))

    def swap(self, ends):
        """Send and receive once; ends: (dest, source)."""
        dest, source = ends
        self.complete(self.receive(source) + self.send(dest))
