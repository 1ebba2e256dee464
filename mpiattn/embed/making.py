"""What plans and caches have in common: how they are made and freed, and errors that all ranks share."""

from __future__ import annotations

from contextlib import contextmanager
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from ..comm import refusal
from ..comm.caller_comm import ENDED, is_running
from ..errors import ArgumentError, CallError
from . import arrays, options
from .errors import HostError
from .handles import Handles
from .host import communicator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..comm.collective_calls import Collective


@contextmanager
def shared_errors(owner: Collective, method: str, check: Any = True) -> Iterator[None]:
    """A block before a collective call, which an ArgumentError ends on every rank.

    owner: the plan or cache.  method: as its `call` names it.
    """
    try:
        yield
    except ArgumentError as error:
        refusal.of_call(method)(error, owner, check=check)


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
        word[0] = self.handles.add(made)

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
