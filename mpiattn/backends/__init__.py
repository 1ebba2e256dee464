"""Back ends by name; the heavy imports are inside."""

from ..errors import ArgumentError

NAMES = ("numpy", "cuda", "deferred", "emulated", "deferred-emulated", "paced:GFLOPS[:MS]")
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


def resolved(name):
    """The name of the back end that "auto" stands for, or the name itself."""
    return "numpy" if name == "auto" else name


def check_name(name):
    """Raise ArgumentError unless there is a back end of that name."""
    if not (isinstance(name, str) and (resolved(name) in NAMES[:-1] or pace(name))):
        raise ArgumentError(f"backend is {name!r}; it may be auto, {', '.join(NAMES)}")


def get(name="auto", transport="auto", local_rank=0):
    """A new back end: "numpy", which is "auto"; "cuda", on a GPU; for tests the others of NAMES.

    transport, local_rank: of "cuda" alone, see `mpiattn.backends.cuda.backend.CudaBackend`.
    """
    check_name(name)
    if resolved(name) == "numpy":
        from .numpy.backend import NumpyBackend
        return NumpyBackend()
    if name == "cuda":
        from .cuda.backend import CudaBackend
        return CudaBackend(transport, local_rank)
    if name == "deferred":
        from .testing.deferred import DeferredBackend
        return DeferredBackend()
    if name == "emulated":
        from .testing.emulated import EmulatedBackend
        return EmulatedBackend()
    if name == "deferred-emulated":
        from .testing.emulated import DeferredEmulatedBackend
        return DeferredEmulatedBackend()
    from .testing.paced import PacedBackend
    return PacedBackend(name, *pace(name))
