"""Calls with a keyword that the function does not have: the same error on every rank, and none is left waiting."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from ..arguments.keywords import learn, unknown
from ..errors import KeywordError
from .agreement import agreement
from .mesh import Home
from .peers import time_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Function = TypeVar("Function", bound="Callable[..., Any]")


def refusing(
    called: str, refuse: Callable[..., None], allowed: Iterable[str] | None = None
) -> Callable[[Function], Function]:
    """A decorator: the function raises KeywordError where Python raises TypeError because of an unknown keyword.

    called: the function's name for users.  refuse(error, *arguments, **keywords): raises the error on every rank; its
    arguments are those of the call, without what is unknown.  allowed: as of `mpiattn.arguments.keywords.unknown`.
    """

    def decorate(function: Function) -> Function:
        learn(function, called)

        @functools.wraps(function)
        def checked(*args: Any, **how: Any) -> Any:
            try:
                return function(*args, **how)
            except KeywordError:  # of a call inside
                raise
            except TypeError:  # Python compares the names already: what is right takes no time
                error = unknown(called, how, allowed)
                if error is None:
                    raise
            refuse(error, *args, **{name: value for name, value in how.items() if not unknown(called, [name], allowed)})

        return checked  # type: ignore[return-value]

    return decorate


def of_call(method: str, owner: Callable[..., Any] = lambda self, *args, **how: self) -> Callable[..., None]:
    """A `refuse` for a collective call of a plan or a cache.

    method: as its `call` names it.  owner(*arguments, **keywords): the plan or cache; None if the call lacks it.
    """

    def refuse(error: Exception, *args: Any, check: bool = True, **how: Any) -> None:
        called = owner(*args, **how)
        if called is None:
            raise error
        with called.call(method) as call, call.agreement(check):
            raise error

    return refuse


def of_making(error: Exception, made: Any, comm: Any = None, *args: Any, timeout: Any = None, **how: Any) -> None:
    """A `refuse` for `__init__` of a plan or a cache."""
    if comm is None:
        raise error
    limit = time_limit(timeout)
    home = Home.enter(comm, limit)
    with made.making(home), agreement(home.peers(limit), call=f"making a {made.KIND}"):
        raise error


def of_function(call: str) -> Callable[..., None]:
    """A `refuse` for a collective function of a communicator.  call: as the function's first agreement names it."""

    def refuse(error: Exception, *args: Any, comm: Any = None, timeout: Any = None, **how: Any) -> None:
        if comm is None:
            raise error
        limit = time_limit(timeout)
        home = Home.enter(comm, limit)
        try:
            with home.call(call), agreement(home.peers(limit), call=call):
                raise error
        finally:
            home.leave()

    return refuse
