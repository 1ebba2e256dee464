"""The mesh: a Cartesian communicator of heads x rows x columns with its row and column groups.

    tile a=4, b=2 on 8 ranks        rank = r*a + c

             c=0  c=1  c=2  c=3     row group (a ranks): shares Q, reduces O
    r=0    |  0    1    2    3      column group (b ranks): shares K and V
    r=1    |  4    5    6    7

Where consecutive ranks of the communicator are on different nodes, a plan may order them node by node, so that a row
group sits inside a node if it fits.

Each communicator that a caller passes is duplicated once; all plans on it share the duplicate and, tile by
tile, one mesh, so thousands of plans may be alive.  Both are freed with their last user.
"""

from mpi4py import MPI

from .errors import ArgumentError
from .peers import TIMEOUT, Peers, translate_ranks

_KEY = None                       # MPI attribute under which a caller's communicator keeps its Home
_WRECKS = []                      # with messages under way that nobody waits for


class Mesh:
    """Ranks in b rows x a columns of a communicator whose size is a * b.

    order: the ranks of the communicator in the order of the mesh, None for their own.
    cart: the communicator of dims (1, b, a).  row, column: this rank's groups; r, c: its place, which is
    its rank in `column` and `row`.  comm: all ranks in the communicator's own order.
    """

    def __init__(self, comm, a, b, order=None):
        self.a, self.b = a, b
        ordered = comm if order is None else comm.Split(0, order.index(comm.rank))
        self.cart = ordered.Create_cart((1, b, a), periods=(True, True, True), reorder=False)
        self.comm = self.cart if order is None else comm.Dup()
        if order is not None:
            ordered.Free()
        self.row = self.cart.Sub((False, False, True))
        self.column = self.cart.Sub((False, True, False))
        self.rank, self.size = self.cart.rank, self.cart.size
        self.r, self.c = self.column.rank, self.row.rank
        self.users = 0
        self.wreck = []

    def abandon(self, what):
        """After something that did not end: messages may still be under way here, into the buffers of `what`.

        The mesh is never used for another plan, nor freed, and `what` is kept for good.
        """
        self.wreck.append(what)
        _WRECKS.append(self)

    def free(self):
        """Free the communicators; collective."""
        if self.wreck:
            return
        for comm in (self.row, self.column, self.cart, *([] if self.comm is self.cart else [self.comm])):
            comm.Free()


def _forget_owner(comm, key, home):
    """MPI calls it when the caller frees the communicator, through whatever handle, or `leave` lets go of it."""
    home.owner = None


def nodes_of(peers):
    """The node of every rank, numbered from 0 on in order of their lowest ranks; collective."""
    node = peers.comm.Split_type(MPI.COMM_TYPE_SHARED)
    lowest = min(translate_ranks(node, range(node.size), peers.comm))
    node.Free()
    everywhere = peers.allgather(lowest)
    number = {lowest: i for i, lowest in enumerate(sorted(set(everywhere)))}
    return [number[lowest] for lowest in everywhere]


class Home:
    """What mpiattn keeps with one communicator of the caller's: a duplicate, and the meshes in use.

    nodes: of every rank, see `nodes_of`.
    """

    def __init__(self, comm, timeout):
        self.owner = comm
        self.comm, request = comm.Idup()
        Peers(comm, timeout).wait([request])
        self.nodes = nodes_of(Peers(self.comm, timeout))
        self.users = 0
        self.meshes = {}
        self.wreck = []

    @classmethod
    def enter(cls, comm, timeout=TIMEOUT):
        """The home of a communicator, made if need be, with one user more; collective.

        timeout: seconds that the other ranks are waited for.
        """
        global _KEY
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ArgumentError(f"comm is {comm!r}; it must be an mpi4py intracommunicator")
        if _KEY is None:
            _KEY = MPI.Comm.Create_keyval(delete_fn=_forget_owner)
        home = comm.Get_attr(_KEY)
        if home is None:
            home = cls(comm, timeout)
            comm.Set_attr(_KEY, home)
        home.users += 1
        return home

    def peers(self, timeout):
        """The ranks of the communicator."""
        return Peers(self.comm, timeout, self._abandon)

    @property
    def order(self):
        """The ranks node by node, None where they are so already: then consecutive ones share a node."""
        order = sorted(range(len(self.nodes)), key=lambda rank: (self.nodes[rank], rank))
        return None if order == list(range(len(order))) else tuple(order)

    def _abandon(self, what):
        """As of a mesh; whoever enters the caller's communicator again gets a new home."""
        if self.owner is not None:
            self.owner.Delete_attr(_KEY)
        self.wreck.append(what)
        _WRECKS.append(self)

    def mesh(self, a, b, timeout=TIMEOUT, order=None):
        """The mesh of a tile, made if need be, with one user more; collective.

        order: the ranks in the order of the mesh, None for their own.
        """
        mesh = self.meshes.get((a, b, order))
        # a pass may have ended on some ranks only, so they agree on whether they need a new mesh
        if self.peers(timeout).largest([mesh is None or bool(mesh.wreck)])[0]:
            mesh = self.meshes[a, b, order] = Mesh(self.comm, a, b, order)
        mesh.users += 1
        return mesh

    def leave(self, mesh=None):
        """Give up a use of the home and, where given, of a mesh; collective."""
        if MPI.Is_finalized() or self.wreck:
            return
        if mesh is not None:
            mesh.users -= 1
            if not mesh.users:
                self.meshes = {key: other for key, other in self.meshes.items() if other is not mesh}
                mesh.free()
        self.users -= 1
        if not self.users:
            self.comm.Free()
            if self.owner is not None:
                self.owner.Delete_attr(_KEY)
