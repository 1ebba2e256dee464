"""The mesh: a Cartesian communicator of planes x rows x columns, with its plane, row and column groups.

    tile a=4, b=2 on 8 ranks        rank = r*a + c, one plane

             c=0  c=1  c=2  c=3     row group (a ranks): shares Q, reduces O
    r=0    |  0    1    2    3      column group (b ranks): shares K and V
    r=1    |  4    5    6    7

Where consecutive ranks of the communicator are on different nodes, a plan may order them node by node, so that a row
group sits inside a node if it fits.  With several planes the ranks that share tokens, one a plane, are closest.

Each communicator that a caller passes is duplicated once; all plans on it share the duplicate and, tile by
tile, one mesh, so thousands of plans may be alive.  The last plan or cache that closes frees all.  Until then,
a few meshes that no plan uses are kept for plans to come.

A call that fails on one rank leaves messages in flight that no rank will receive.  No later call may match them, so the
whole home is then abandoned on every rank: its plans and caches raise, and a new plan on the caller's communicator
gets a new home.
"""

import os
import socket
import threading
from contextlib import contextmanager, suppress
from functools import cache

from mpi4py import MPI

from ..errors import MpiattnError, PeerFailure
from ..system.launcher import warn_of_copies
from ..system.logs import ERROR, note
from . import channel as channels
from . import endings, running
from .agreement import agreement, is_everywhere, which_ranks
from .blocking import blocking
from .caller_comm import check_comm
from .channel import Channel
from .ended import ended, ended_soon, revoke, tells
from .mpi_errors import happened, in_words
from .peers import TIMEOUT, Peers, keep_forever, translate_ranks
from .transport import Known

FIRST = "the first plan or cache on this communicator"
BEGIN = f"for the other ranks to begin {FIRST}"
LATER = "making a plan or a cache"  # the call in which ranks find out whether they share a home
# Until there is a duplicate, messages about failures pass the caller's communicator, with a tag that nobody takes.
FROM_LAST = 7  # less than the largest tag
REMEMBERED = 64  # groups of ranks
UNUSED = 2  # meshes of a home that are kept without users; an MPI has some 2000 communicators
_NODES: dict[tuple[int, ...], list[int]] = {}  # the node of every rank, by ranks of MPI_COMM_WORLD
_DROPPED: list["Home"] = []  # homes whose plans were dropped without close(), and whose owner has been freed
_ENTERING: set[int] = set()  # handles of communicators whose home a thread finds or makes
_ENTRANCE = threading.RLock()  # of a table; a signal's handler may come in the same thread


class Mesh:
    """The ranks of a communicator as the mesh of a tile.

    order: the ranks of the communicator in the order of the mesh; None: their own order.
    comm: the communicator of dims (h, b, a).  plane, row, column: those of this rank's plane, row and column.
    rank: in comm.  chunk: in plane, which is the number of the chunk that this rank computes with.
    All are Cartesian; without a topology where ranks may end (ULFM), since MPI's topologies need not survive that.
    """

    def __init__(self, comm, tile, order=None):
        self.tile = tile
        plain = tells()
        ordered = comm if order is None and not plain else comm.Split(0, order.index(comm.rank) if order else comm.rank)
        self.comm = ordered
        if not plain:
            self.comm = ordered.Create_cart((tile.h, tile.b, tile.a), periods=(True, True, True), reorder=False)
            if order is not None:
                ordered.Free()
        self.rank, self.size = self.comm.rank, self.comm.size
        self._comms = {(tile.h, tile.b, tile.a): self.comm}
        plane, place = divmod(self.rank, tile.a * tile.b)
        row, column = divmod(place, tile.a)
        self.row = self._part((1, 1, tile.a), plane * tile.b + row)
        self.column = self._part((1, tile.b, 1), plane * tile.a + column)
        self.plane = self._part((1, tile.b, tile.a), plane)
        self.chunk, self.users = self.plane.rank, 0

    def _part(self, sides, number):
        """The communicator of a part of the mesh.  Equal parts share one; that of this rank alone is MPI_COMM_SELF.

        number: of this rank's part among those alike.
        """
        if sides not in self._comms:
            if sides == (1, 1, 1):
                part = MPI.Intracomm(MPI.COMM_SELF)
            elif tells():
                part = self.comm.Split(number, self.rank)
            else:
                part = self.comm.Sub([side > 1 for side in sides])
            self._comms[sides] = part
        return self._comms[sides]

    def shared(self):
        """The communicators with other ranks."""
        return [comm for comm in self._comms.values() if comm != MPI.COMM_SELF]

    def free(self):
        """Free the communicators; collective."""
        for comm in self.shared():
            comm.Free()
        self.row = self.column = self.plane = MPI.COMM_NULL


def _forget_owner(comm, key, home):
    """Called by MPI when the caller frees the communicator, through any handle, or `leave` deletes the attribute."""
    home.owner = None
    home.drop_plans()
    home.reap()


@cache
def _key():
    """The key of the MPI attribute in which a caller's communicator keeps its Home."""
    return MPI.Comm.Create_keyval(delete_fn=_forget_owner)


@contextmanager
def _entering(comm):
    """Run the body in one thread at a time for a communicator.  Raises MpiattnError in a second one."""
    running.check_thread(LATER)
    handle = comm.py2f()
    with _ENTRANCE:
        if handle in _ENTERING:
            raise MpiattnError(f"{LATER} is refused: another thread makes one on this communicator")
        _ENTERING.add(handle)
        _key()  # made by the first thread that comes, then only looked up
    try:
        yield
    finally:
        _ENTERING.discard(handle)


def nodes_of(peers):
    """The node number of every rank; nodes are numbered from 0 in order of their lowest ranks; collective."""
    ranks = tuple(translate_ranks(peers.comm, range(peers.size), MPI.COMM_WORLD))
    known = _NODES.get(ranks)  # now: another thread may forget it while this one waits
    if all(peers.allgather(known is not None)):
        return known
    node = blocking(peers, lambda: peers.comm.Split_type(MPI.COMM_TYPE_SHARED))
    lowest = min(translate_ranks(node, range(node.size), peers.comm))
    node.Free()
    everywhere = peers.allgather(lowest)
    number = {lowest: i for i, lowest in enumerate(sorted(set(everywhere)))}
    nodes = [number[lowest] for lowest in everywhere]
    if MPI.UNDEFINED not in ranks:  # of processes that were started later only this communicator knows
        if len(_NODES) >= REMEMBERED:
            _NODES.clear()
        _NODES[ranks] = nodes
    return nodes


def by_node(peers, value):
    """The values that the ranks give, a list for every node in order of the nodes' lowest ranks; collective."""
    nodes, values = nodes_of(peers), peers.allgather(value)
    return [[given for given, on in zip(values, nodes) if on == node] for node in range(max(nodes) + 1)]


class _Turn:
    """The context of `Home.call`; a class, since every call passes here: generators take longer."""

    __slots__ = ("buffers", "call", "home")

    def __init__(self, home, call, buffers):
        self.home, self.call, self.buffers = home, call, buffers

    def __enter__(self):
        try:
            self.home.begin(self.call, self)
        except BaseException:
            self.home.withdraw(self.call, self)
            raise

    def __exit__(self, kind, error, trace):
        self.home.end(self.call, error, self.buffers)


class Home:
    """What mpiattn keeps for one communicator of the caller: a duplicate of it, and meshes.

    nodes: of every rank, see `nodes_of`.  hosts: the host name of every rank.  channel: for messages about failures.
    plans: that `attention` keeps for its next call, by what they were made for, the oldest first.
    known: what the ranks have found out about back ends.
    abandoned: why this home cannot be used any more; "" if it can.
    """

    def __init__(self, comm, timeout):
        self.owner, self.abandoned, self._in_use = comm, "", []
        self.meshes, self.plans, self.known = {}, {}, Known()  # before what may fail: `abandon` takes them
        first = Channel(comm, tag=MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) - FROM_LAST)
        callers = Peers(comm, timeout, channel=first)
        with running.during(FIRST, first):
            if tells():  # Open MPI 5.0 does not survive a nonblocking duplication that fails
                callers.wait([comm.Ibarrier()], lambda: BEGIN)
                self.comm = blocking(callers, comm.Dup)
            else:
                self.comm, request = comm.Idup()
                callers.wait([request], lambda: BEGIN)
            peers = Peers(self.comm, timeout, channel=first)
            self.hosts, marks = zip(*peers.allgather((socket.gethostname(), os.urandom(8))))
            self.channel = Channel(self.comm, self.hosts, marks[0])
            first.close()  # if a rank has failed it stays open, and answers others
        with running.during(FIRST, self.channel):
            self.nodes = nodes_of(self.peers(timeout))
        self.users = self.dropped = self.members = 0
        self._turn, self._holder, self._running = threading.Lock(), None, ""

    @classmethod
    def enter(cls, comm, timeout=TIMEOUT):
        """The home of a communicator, made if needed, with one more user; collective.

        timeout: seconds to wait for the other ranks.
        """
        check_comm(comm)
        with _entering(comm):
            with suppress(IndexError):  # another thread may take the last one
                while _DROPPED:
                    _DROPPED.pop()._free()
            home = comm.Get_attr(_key())
            if home is None and comm != MPI.COMM_SELF:  # on which a program means to be alone
                warn_of_copies(MPI.COMM_WORLD.size)
            if home is None or not home._shared(timeout):
                home = cls._made(comm, timeout)
                comm.Set_attr(_key(), home)
        home.users += 1
        return home

    @classmethod
    def _made(cls, comm, timeout):
        """A new home; PeerFailure says what could not be made."""
        try:
            return cls(comm, timeout)
        except (PeerFailure, MPI.Exception) as error:  # MPI_Finalize would wait for the rank that does not come
            endings.abort_if_uncaught()
            if isinstance(error, PeerFailure) or not (ranks := ended_soon(comm)):
                raise
            raise PeerFailure(f"{FIRST} cannot be made, as {which_ranks(ranks)} ended", ranks) from error

    def _shared(self, timeout):
        """Whether no rank has abandoned this home; ranks that do not know yet learn it here."""
        with self.call(LATER):
            channels.listen()
            if self.channel.failure is not None:
                self.abandon([])
                return False
            try:
                with agreement(self.peers(timeout), call=LATER):
                    pass
            except PeerFailure:
                # A rank does not come, as this rank has noticed, or another that waits here too.  A failure in any
                # other call is an earlier one, of which this rank had not heard: it had all it needed.
                if self.channel.failure is None or self.channel.failed_in == LATER:
                    raise
        return not self.abandoned

    def peers(self, timeout):
        """The ranks of the communicator."""
        return Peers(self.comm, timeout, self.abandon, channel=self.channel)

    @property
    def order(self):
        """The ranks sorted by node; None if they already are, so that consecutive ranks share a node."""
        order = sorted(range(len(self.nodes)), key=lambda rank: (self.nodes[rank], rank))
        return None if order == list(range(len(order))) else tuple(order)

    def call(self, name, buffers=list):
        """A context: run a collective call.  If it fails on this rank only, tell the others and abandon the home.

        name: in words.  buffers: called on failure; returns the objects with the buffers that MPI may still use.
        Raises MpiattnError, on this rank only, inside another call or beside it in another thread.
        """
        return _Turn(self, name, buffers)

    def begin(self, call, holder):
        """Allow only one collective call at a time on a communicator: messages of two calls could match each other.

        holder: the context of the call, which calls `withdraw` if this raises, and else `end`.
        """
        with self._turn:
            refused = self._holder is not None
            if not refused:
                self._holder = holder
        if refused:
            raise MpiattnError(
                f"{call} is refused: {self._running} is running on this communicator; it must end, on "
                "every rank, before another begins (not from its progress callback, not from another "
                "thread)"
            )
        self._running = call
        running.begin(call, self.channel)

    def withdraw(self, call, holder):
        """A call has not begun: it was refused, or a signal's handler has raised an exception in `begin`."""
        if self._holder is holder:
            running.end(call, self.channel)
            self._holder = None

    def end(self, call, error, buffers):
        """The end of a call that has begun.  error: the exception that ends it, or None.  buffers: as for `call`.

        Raises PeerFailure in its place if it is an error of MPI that comes of another rank's end.
        """
        try:
            if error is not None and self.comm.size > 1 and not is_everywhere(error, self.comm):
                self._fail(error, buffers())
        finally:
            running.end(call, self.channel)
            self._holder = None

    def _fail(self, error, buffers):
        own, where = self.comm.rank, ", ".join(filter(None, [self._running, getattr(error, "where", "")]))
        name, ranks = self.channel.name(own), ended_soon(self.comm) if isinstance(error, MPI.Exception) else ()
        if ranks:
            failure = PeerFailure(f"{name} cannot go on in {where}; {self.channel.names(ranks)} ended", ranks)
            self.abandon(buffers, str(failure))
            raise failure from error
        self.channel.alarm(f"{name} {happened(error, where)}", (own,))
        self.abandon(buffers, in_words(error))

    def abandon(self, buffers, why=""):
        """Never use this home again; the next `enter` on the caller's communicator makes a new one."""
        self._in_use.append(buffers)
        if self.abandoned:
            return
        ranks = ended(self.comm)
        who = f"{self.channel.names(ranks)} ended" if ranks else "a rank did not come"
        self.abandoned = why or self.channel.failure or who
        if self.owner is not None and self.owner.Get_attr(_key()) is self:  # not yet set if making the home failed
            self.owner.Delete_attr(_key())
        note(ERROR, self.comm.rank, "no plan or cache on this communicator can be used any more: %s", self.abandoned)
        if ranks:
            revoke([self.comm, *(comm for mesh in self.meshes.values() for comm in mesh.shared())])
        self.known.failed()
        keep_forever(self)  # MPI may still use its buffers
        endings.abort_if_uncaught()

    def mesh(self, peers, tile, order=None):
        """The mesh of a tile, made if needed, with one more user; collective.

        peers: all ranks, from `peers`.  order: the ranks in the order of the mesh; None: their own order.
        """
        mesh = self.unused_mesh(peers, tile, order)
        mesh.users += 1
        return mesh

    def unused_mesh(self, peers, tile, order=None):
        """As `mesh`, without one more user: `share` counts that; collective."""
        mesh = self.meshes.pop((tile, order), None) or blocking(peers, lambda: Mesh(self.comm, tile, order))
        self.meshes[tile, order] = mesh  # behind those that were wanted before
        return mesh

    def share(self, mesh):
        """Count one more user of the home, which has some, and of a mesh."""
        self.users += 1
        mesh.users += 1

    def leave(self, mesh=None):
        """Count one user less of the home and, if given, of a mesh; free a home without users; collective."""
        if MPI.Is_finalized() or self.abandoned:
            return
        if mesh is not None:
            mesh.users -= 1
            self._free_meshes()
        self.users -= 1
        if not self.users:
            if self.owner is not None:
                self.owner.Delete_attr(_key())
            self._free()
        self.reap()

    def _free_meshes(self):
        """Free meshes without users but those wanted last: the next plan most often has a tile of one before."""
        unused = [key for key, mesh in self.meshes.items() if not mesh.users]
        for key in unused[:-UNUSED]:
            self.meshes.pop(key).free()

    def drop_plans(self):
        """Drop the plans that are kept, without `leave`: the caller has freed the communicator."""
        while self.plans:
            self.plans.popitem()[1].drop()

    def drop(self):
        """A user was dropped without `leave`: what it used stays until the caller frees the communicator."""
        self.dropped += 1
        self.reap()

    def reap(self):
        """Mark the home to be freed if only dropped users are left and the caller's communicator is gone.

        The next `enter` frees it: here the caller may be MPI or the garbage collector.
        """
        if self.owner is None and self.users and self.users == self.dropped and not self.abandoned:
            self.users = 0
            _DROPPED.append(self)

    def _free(self):
        if not MPI.Is_finalized():
            self.channel.close()
            for mesh in self.meshes.values():
                mesh.free()
            self.comm.Free()
            self.meshes = {}
