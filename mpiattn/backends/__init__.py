"""Back ends by name; the heavy imports are inside."""

from ..errors import ArgumentError

NAMES = ("numpy", "deferred", "emulated", "paced:GFLOPS[:MS]")
NAP = 2.0               # milliseconds between two looks of a paced rank at its messages


def pace(name):
    """Of a back end "paced:GFLOPS[:MS]" its billions of operations a second and milliseconds of a nap, else None.

    Raises ArgumentError.
    """
    if not isinstance(name, str) or not name.startswith("paced:"):
        return None
    try:
        gflops, nap = ([float(number) for number in name.split(":")[1:]] + [NAP])[:2]
    except ValueError:
        gflops = nap = 0.0
    if not (0 < gflops < float("inf") and 0 < nap < float("inf") and name.count(":") <= 2):
        raise ArgumentError(f"backend is {name!r}; after paced: it must have a positive number of Gflop/s and may have "
                            "another : and milliseconds")
    return gflops, nap


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
    paced = pace(name)
    if paced:
        from .paced import PacedBackend
        return PacedBackend(name, *paced)
    raise ArgumentError(f"backend is {name!r}; it may be auto, {', '.join(NAMES)}")
