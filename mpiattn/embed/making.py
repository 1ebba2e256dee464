"""What plans and caches have in common: how they are made and freed, and errors that all ranks share."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from .. import backends
from ..comm import refusal
from ..comm.caller_comm import ENDED, is_running
from ..errors import ArgumentError, CallError
from . import arrays, options
from .errors import HandleError, HostError
from .handles import Handles
from .host import communicator

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..comm.collective_calls import Collective


class shared_errors:  # a class, since every call passes here: generators take longer
    """A block before a collective call, of which every rank raises the error of any.

    owner: the plan or cache.  method: as its `call` names it.  check: as of the call.
    """

    __slots__ = ("_check", "_method", "_owner")

    def __init__(self, owner: Collective, method: str, check: Any = True) -> None:
        self._owner, self._method, self._check = owner, method, check

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            refusal.of_call(self._method)(_shared(error), self._owner, check=self._check is not False)


def _shared(error: Exception) -> Exception:
    """The error as other ranks can have it: options without a handle are an argument that is wrong."""
    return ArgumentError(str(error)) if isinstance(error, HandleError) else error


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

    def make(self, comm: int, given: Callable[[], dict[str, Any]], handle: memoryview | None) -> None:
        """Make an object and write its handle; every rank raises the error of any.

        given: returns its options.
        """
        with communicator(comm) as of_host:
            try:
                word = arrays.numbers(self.handles.kind, handle)
                arguments = options.of_making(given(), of_host, self.needed, self.kind.__name__)
            except Exception as error:
                refusal.of_making(_shared(error), object.__new__(self.kind), of_host)
            made = self.kind(of_host, **arguments)
        word[0] = self.add(made)

    def load(self, comm: int, path: str | None, given: Callable[[], dict[str, Any]], handle: memoryview | None) -> None:
        """As `make`, from a file."""
        with communicator(comm) as of_host:
            try:
                word = arrays.numbers(self.handles.kind, handle)
                arguments = options.of_making(given(), of_host)
                options.refuse_twice(("comm", "path"), arguments)
                if path is None:
                    raise ArgumentError("path is NULL; it must be that of a file")
            except Exception as error:
                refusal.of_function("loading a cache")(_shared(error), comm=of_host)
            made = self.kind.load(of_host, path, **arguments)
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
