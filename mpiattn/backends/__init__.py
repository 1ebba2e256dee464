"""Back ends by name; the heavy imports are inside."""

from ..errors import ArgumentError

NAMES = ("numpy", "deferred", "emulated", "deferred-emulated", "paced:GFLOPS")


def pace(name):
    """Billions of operations a second of a back end "paced:GFLOPS"; None of any other.  Raises ArgumentError."""
    if not isinstance(name, str) or not name.startswith("paced:"):
        return None
    try:
        gflops = float(name.removeprefix("paced:"))
    except ValueError:
        gflops = 0.0
    if not 0 < gflops < float("inf"):
        raise ArgumentError(f"backend is {name!r}; after paced: it must have a positive number of Gflop/s")
    return gflops


def get(name="auto"):
    """A new back end: "numpy", or "auto", the fastest that can run here; for tests the others of NAMES."""
    if name in ("auto", "numpy"):
        from .numpy import NumpyBackend
        return NumpyBackend()
    if name == "deferred":
        from .deferred import DeferredBackend
        return DeferredBackend()
    if name == "emulated":
        from .emulated import EmulatedBackend
        return EmulatedBackend()
    if name == "deferred-emulated":
        from .emulated import DeferredEmulatedBackend
        return DeferredEmulatedBackend()
    gflops = pace(name)
    if gflops:
        from .paced import PacedBackend
        return PacedBackend(gflops)
    raise ArgumentError(f"backend is {name!r}; it may be auto, {', '.join(NAMES)}")
