"""The base of plans and caches: collective calls on a home; the ranks agree which call they are in."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from ..arguments.untraced import keep_untraced
from ..errors import ArgumentError, CallError, CopyError, MpiattnError, PeerFailure
from ..system.logs import DEBUG, LOGGER, note
from ..system.values import truth
from .agreement import agreement
from .caller_comm import check_running, is_running
from .transport import in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType

    from typing_extensions import Self

    from ..backends.base import Backend
    from .mesh import Home, Mesh
    from .peers import Peers


class Call:
    """A collective call of a plan or cache, the context in which it runs.

    name: in words, the same on all ranks that make the same call.
    peers: the ranks.
    buffers: objects besides the plan or cache that hold buffers of the call's transfers.
    begun: called when no other call is running any more.
    """

    def __init__(self, owner: Collective, method: str, begun: Callable[[], object]) -> None:
        self._owner, self._home, self._begun = owner, owner._check_open(), begun
        self.name, self.peers = f"call {owner._calls + 1} of {owner._name}, {method}", owner._peers
        self.buffers: list[object] = []

    def __enter__(self) -> Call:
        try:
            self._home.begin(self.name, self)
            self._begun()
        except BaseException:
            self._home.withdraw(self.name, self)
            raise
        if LOGGER.isEnabledFor(DEBUG):  # asked here, as it takes less time than a call
            note(DEBUG, self.peers.rank, "%s", self.name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._owner._calls += 1
        self._home.end(self.name, error, lambda: (vars(self._owner).copy(), self.buffers))

    def agreement(self, check: bool = True) -> AbstractContextManager[dict[str, Any]]:
        """As `mpiattn.comm.agreement.agreement`, which also compares the call; without check only run the body.

        Raises ArgumentError on every rank if check is neither True nor False.
        """
        agreed = agreement(self.peers, call=self.name, hashes=self._owner._hashes)
        try:
            return agreed if truth("check", check) else nullcontext({})
        except ArgumentError:
            with agreed:
                raise


class Collective(ABC):
    """Base of objects that are made on a home and that all its ranks then call in the same order.

    KIND: the kind of object, in words.  The ranks number the objects of a home and the calls of each, so that they
    notice when ranks call different objects or methods, or the same method a different number of times.
    """

    KIND = ""
    _home: Home | None = None
    _hashes: dict[tuple[str, ...], tuple[dict[str, Any], int]]  # as for `agreement`
    _peers: Peers
    _backend: Backend
    _mesh: Mesh | None = None
    _raising = False
    _before_close: tuple[Callable[[], object], ...] = ()

    @contextmanager
    def making(self, home: Home) -> Iterator[None]:
        """Make this for a user that has entered a home, who leaves it if that fails."""
        try:
            with home.call(f"making a {self.KIND}", lambda: vars(self).copy()):
                yield
        except BaseException:
            home.leave(self._mesh)
            raise

    def _join(self, home: Home, peers: Peers) -> None:
        """Become a member of a home; the ranks have agreed before that all make it."""
        home.members += 1
        self._home, self._peers, self._calls, self._hashes = home, peers, 0, {}
        self._name = f"{self.KIND} {home.members}"
        self._unclosed = weakref.finalize(self, home.drop)
        self._unclosed.atexit = False

    @property
    def transport(self) -> str:
        """How arrays on a GPU reach other ranks, and why so: "staged: ...", "ipc: ..." or "device: ..."; else ""."""
        return in_words(self._backend)

    def call(self, method: str) -> Call:
        """The context of a collective call; for the modules of this package."""
        return Call(self, method, self._backend.new_call)

    def before_close(self, wait: Callable[[], object]) -> None:
        """Call `wait` when this is closed, unless by an exception; for the modules of this package."""
        if wait not in self._before_close:
            self._before_close += (wait,)

    def drop(self) -> None:
        """Release what is this object's own, without the other ranks; for the modules of this package."""
        self._home = None
        self._unclosed()

    def _check_open(self) -> Home:
        if self._home is None:
            raise ArgumentError(f"the {self.KIND} is closed; make a new one")
        check_running(f"the {self.KIND} is open")
        if self._home.abandoned:  # raised on this rank only: communicating here could match stale messages
            raise MpiattnError(
                f"a call on the communicator of this {self.KIND} did not end ({self._home.abandoned}); "
                f"close the {self.KIND} and make a new one"
            )
        return self._home

    @contextmanager
    def _leaving(self, home: Home, mesh: Mesh | None = None) -> Iterator[None]:
        """Run the body, which releases what this object holds, then leave its home; collective.

        The ranks agree on this call too, unless this rank closes because of an exception: it must not wait for others.
        """
        for wait in () if self._raising else self._before_close:
            wait()
        call = f"closing {self._name}"
        with home.call(call, lambda: vars(self).copy()):
            if not self._raising and not home.abandoned and is_running():
                self._meet(call)
            yield
            self._unclosed.detach()
            home.leave(mesh)
            self._home = None

    def _meet(self, call: str) -> None:
        try:
            with agreement(self._peers, call=call):
                pass
        except PeerFailure as failure:
            if not failure.relayed:  # if relayed, a call has failed before: only clean up
                raise

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            f"a {type(self).__name__} cannot be copied or pickled: it holds communicators and buffers of "
            "this process; make a new one, on every rank"
        )

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        keep_untraced(cls)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._raising = error is not None
        try:
            self.close()
        except CallError:  # the other ranks raise it too, and leave their blocks by it
            self._raising = True
            self.close()
            raise

    @abstractmethod
    def close(self) -> None:
        """Release what this object holds, with `_leaving`; collective."""
