"""Back ends by name; the heavy imports are inside."""

from ..errors import ArgumentError

NAMES = ("numpy", "deferred")


def get(name="auto"):
    """A new back end: "numpy", "deferred" (for tests), or "auto", the fastest that this machine can run."""
    if name in ("auto", "numpy"):
        from .numpy import NumpyBackend
        return NumpyBackend()
    if name == "deferred":
        from .deferred import DeferredBackend
        return DeferredBackend()
    raise ArgumentError(f"backend is {name!r}; it may be auto, {', '.join(NAMES)}")
