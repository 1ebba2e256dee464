"""A program that mypy checks and nobody runs: right uses of mpiattn pass, wrong ones are noticed.

An error that is ignored here has to be one (`warn_unused_ignores`).
"""

import mpiattn
from mpiattn import backends
from mpiattn.backends.base import Backend
from mpiattn.backends.cuda.backend import CudaBackend
from mpiattn.backends.numpy.backend import NumpyBackend
from mpiattn.backends.testing.deferred import DeferredBackend
from mpiattn.backends.testing.emulated import DeferredEmulatedBackend, EmulatedBackend
from mpiattn.backends.testing.paced import PacedBackend

# Every back end has all that the protocol names, with the same arguments.
numpy: type[Backend] = NumpyBackend
cuda: type[Backend] = CudaBackend
deferred: type[Backend] = DeferredBackend
emulated: type[Backend] = EmulatedBackend
deferred_emulated: type[Backend] = DeferredEmulatedBackend
paced: type[Backend] = PacedBackend


def layouts() -> tuple[int, ...]:
    layout = mpiattn.Layout("contiguous", 8, 3, sizes=(5, 0, 3))
    mpiattn.Layout("zigzag", "8", 3)                # type: ignore[arg-type]
    owner: int = layout.owner([1, 2])               # type: ignore[assignment]
    return (owner, *layout.lengths)


def tiles() -> int:
    mpiattn.Tile(2, 3)                              # type: ignore[call-arg]
    return mpiattn.Tile(1, 2, 3).ranks


def names() -> str:
    from mpiattn import flash  # type: ignore[attr-defined]  # noqa: F401
    return backends.get("numpy").name + mpiattn.__version__
