"""Functions that torch.compile leaves as they are.

Its tracer, Dynamo, would follow a call into the library, and end it in the middle of an exchange with other ranks.
torch is optional, and Dynamo takes seconds to load: nothing here loads either.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

Function = TypeVar("Function", bound="Callable[..., Any]")
REASON = "calls of mpiattn are collective and run between compiled graphs: fullgraph=True is not possible"


def untraced(function: Function) -> Function:
    """The function, called from compiled code as from any other: a graph ends before it, another begins after it."""
    outside: Any = None

    def entry(*args: Any, **kwargs: Any) -> Any:
        nonlocal outside
        if outside is None:
            if "torch._dynamo" not in sys.modules:  # nobody compiles, so far
                return function(*args, **kwargs)
            outside = _outside(function, code)
        return outside(*args, **kwargs)

    # One for each function, because Dynamo counts how often it compiles a code object, and gives up after a few times.
    entry.__code__ = code = entry.__code__.replace(co_name=function.__name__)
    # So torch.compiler.disable marks a function: Dynamo does not look into it, and says why.
    vars(entry).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=REASON)
    return cast("Function", wraps(function)(entry))


def _outside(function: Any, code: Any) -> Any:
    """The function without Dynamo, and so all that it calls; Dynamo skips the code of its `entry` from now on."""
    skip = getattr(sys.modules["torch._dynamo"].eval_frame, "skip_code", None)
    if skip is not None:
        skip(code)
    return sys.modules["torch"].compiler.disable(function)


def keep_untraced(cls: type) -> None:
    """Make all public methods that a class itself defines `untraced`, and its `__init__`."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, classmethod):
            setattr(cls, name, classmethod(untraced(member.__func__)))
        elif isinstance(member, type(keep_untraced)):
            setattr(cls, name, untraced(member))
