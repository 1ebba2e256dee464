"""What plans and caches have in common: how they are made and freed, and errors that all ranks share."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from .. import backends
from ..comm import refusal
from ..comm.caller_comm import ENDED, is_running
from ..errors import ArgumentError, CallError
from . import arrays, options
from .errors import HostError
from .handles import Handles
from .host import communicator

if TYPE_CHECKING:
    from ..comm.collective_calls import Collective


class shared_errors:  # a class, since every call passes here: generators take longer
    """A block before a collective call, whose ArgumentError is raised on every rank.

    owner: the plan or cache.  method: as its `call` names it.  check: as of the call.
    """

    __slots__ = ("_check", "_method", "_owner")

    def __init__(self, owner: Collective, method: str, check: Any = True) -> None:
        self._owner, self._method, self._check = owner, method, check

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ArgumentError):
            refusal.of_call(self._method)(error, self._owner, check=self._check)


class Maker:
    """Makes and frees the objects of a kind.

    kind: class of plans or caches.  handles: of them.
    """

    def __init__(self, kind: type[Any], handles: Handles) -> None:
        self.kind, self.handles = kind, handles
        self.needed = tuple(
            name
            for name, parameter in signature(kind.__init__).parameters.items()
            if parameter.kind is Parameter.KEYWORD_ONLY and parameter.default is Parameter.empty
        )

    def make(self, comm: int, given: Any, handle: memoryview | None, load: Any = None) -> None:
        """Make an object and write its handle; an ArgumentError of a rank is raised on all.

        given: function that returns options, which may raise ArgumentError.  load: function of (comm, options) that
            makes it; None: the class.
        """
        with communicator(comm) as of_host:
            try:
                word = arrays.numbers(self.handles.kind, handle)
                needed = self.needed if load is None else ()
                arguments = options.of_making(given(), of_host, needed)
            except ArgumentError as error:
                refusal.of_making(error, object.__new__(self.kind), of_host)
            made = (load or self.kind)(of_host, **arguments)
        word[0] = self.add(made)

    def add(self, made: Any) -> int:
        """The number of a new object."""
        return self.handles.add(made, backends.find(made.backend).on_gpu)

    def free(self, number: int) -> None:
        """Close an object.  Raises HostError if MPI has ended; the process's memory is freed all the same."""
        made = self.handles[number]
        if not is_running():
            self.handles.pop(number)
            made.drop()
            raise HostError(f"{self.handles.kind} is freed, but {ENDED}; free it before MPI_Finalize")
        try:
            made.close()
        except CallError:
            raise
        except BaseException:
            self.handles.pop(number)
            raise
        self.handles.pop(number)
