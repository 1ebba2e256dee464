"""The mesh: a Cartesian communicator of heads x rows x columns with its row and column groups.

    tile a=4, b=2 on 8 ranks        rank = r*a + c

             c=0  c=1  c=2  c=3     row group (a ranks): shares Q, reduces O
    r=0    |  0    1    2    3      column group (b ranks): shares K and V
    r=1    |  4    5    6    7

Each communicator that a caller passes is duplicated once; all plans on it share the duplicate and, tile by
tile, one mesh, so thousands of plans may be alive.  Both are freed with their last user.
"""

from mpi4py import MPI

from .errors import ArgumentError

_KEY = None                       # MPI attribute under which a caller's communicator keeps its Home


class Mesh:
    """Ranks in b rows x a columns of a communicator whose size is a * b.

    cart: the communicator of dims (1, b, a).  row, column: this rank's groups; r, c: its place, which is
    its rank in `column` and `row`.
    """

    def __init__(self, comm, a, b):
        self.a, self.b = a, b
        self.cart = comm.Create_cart((1, b, a), periods=(True, True, True), reorder=False)
        self.row = self.cart.Sub((False, False, True))
        self.column = self.cart.Sub((False, True, False))
        self.rank, self.size = self.cart.rank, self.cart.size
        self.r, self.c = self.column.rank, self.row.rank
        self.users = 0

    def free(self):
        """Free the communicators; collective."""
        for comm in (self.row, self.column, self.cart):
            comm.Free()


class Home:
    """What mpiattn keeps with one communicator of the caller's: a duplicate, and the meshes in use."""

    def __init__(self, comm):
        self.owner = comm
        self.comm = comm.Dup()
        self.users = 0
        self.meshes = {}

    @classmethod
    def enter(cls, comm):
        """The home of a communicator, made if need be, with one user more; collective."""
        global _KEY
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ArgumentError(f"comm is {comm!r}; it must be an mpi4py intracommunicator")
        if _KEY is None:
            _KEY = MPI.Comm.Create_keyval()
        home = comm.Get_attr(_KEY)
        if home is None:
            home = cls(comm)
            comm.Set_attr(_KEY, home)
        home.users += 1
        return home

    def mesh(self, a, b):
        """The mesh of a tile, made if need be, with one user more; collective."""
        if (a, b) not in self.meshes:
            self.meshes[a, b] = Mesh(self.comm, a, b)
        self.meshes[a, b].users += 1
        return self.meshes[a, b]

    def leave(self, mesh=None):
        """Give up a use of the home and, where given, of a mesh; collective."""
        if MPI.Is_finalized():
            return
        if mesh is not None:
            mesh.users -= 1
            if not mesh.users:
                del self.meshes[mesh.a, mesh.b]
                mesh.free()
        self.users -= 1
        if not self.users:
            self.comm.Free()
            if self.owner != MPI.COMM_NULL:       # else the caller freed it, and the attribute with it
                self.owner.Delete_attr(_KEY)
