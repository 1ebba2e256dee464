"""The back ends by name: a description of each, its class, and whether it can run here.

Only this module knows their names.  An entry holds what is needed before a back end is created; its class says which
dtypes and dims it supports.  A back end is imported when it is requested.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..system.closest import of_choices

if TYPE_CHECKING:
    from .base import Array, Backend


@dataclass(frozen=True)
class Entry:
    """A back end that users may select by name.

    home: "module:class", the module below this package.
    about: a few words for --help.
    device: the kind of memory of its arrays, in torch's terms.
    tests: whether it is for tests only, so that its timings do not describe this machine.
    parameters: the syntax that follows the name, "" for none, in brackets if it may be left out.
    """

    name: str
    home: str
    about: str
    device: str = "cpu"
    tests: bool = True
    parameters: str = ""

    @property
    def usage(self) -> str:
        """The name with the syntax of its parameters, as a user gives it."""
        return self.name + self.parameters

    @property
    def on_gpu(self) -> bool:
        """Whether its arrays are in GPU memory.  Such a back end has a transport, and each rank needs a GPU."""
        return self.device != "cpu"

    def load(self) -> Any:
        """Import and return its class."""
        module, name = self.home.split(":")
        return getattr(import_module(f".{module}", __package__), name)

    def missing(self) -> str:
        """Why it cannot run in this process and what to install; "" if it can run.  Never raises."""
        try:
            return self.load().missing()
        except Exception as error:  # a broken installation may raise anything; other ranks must not hang on it
            return f"{type(error).__name__}: {error}"


REGISTRY = {
    entry.name: entry
    for entry in (
        Entry("numpy", "numpy.backend:NumpyBackend", "NumPy and its BLAS", tests=False),
        Entry("cpu", "cpu.backend:CpuBackend", "compiled kernels", tests=False, parameters="[:THREADS]"),
        Entry("cuda", "cuda.backend:CudaBackend", "one GPU for each rank", device="cuda", tests=False),
        Entry(
            "cuda+cudnn",
            "cuda.cudnn_backend:CudnnBackend",
            "cuda, with cuDNN for the blocks that it can take",
            device="cuda",
            tests=False,
        ),
        Entry("deferred", "testing.deferred:DeferredBackend", "launches and copies are late on purpose"),
        Entry("emulated", "testing.emulated:EmulatedBackend", "the CUDA kernels on the CPU"),
        Entry("deferred-emulated", "testing.emulated:DeferredEmulatedBackend", "the CUDA kernels on the CPU, late"),
        Entry(
            "paced",
            "testing.paced:PacedBackend",
            "sleeps to emulate slower compute, and calls MPI every MS milliseconds (2 by default)",
            parameters=":GFLOPS[:MS]",
        ),
    )
}
# The back ends that "auto" tries, best first.
AUTO = ("cpu", "numpy")


def usages(**properties: object) -> list[str]:
    """`usage` of every back end whose attributes have these values."""
    return [
        entry.usage
        for entry in REGISTRY.values()
        if all(getattr(entry, name) == value for name, value in properties.items())
    ]


def missing() -> dict[str, str]:
    """Why each back end cannot run in this process, by its usage; "" if it can."""
    return {entry.usage: entry.missing() for entry in REGISTRY.values()}


def find(name: str) -> Entry:
    """The `Entry` of a back end's name, which includes its parameters if it takes any.

    Raises ArgumentError if there is no such back end.
    """
    base, colon, _ = name.partition(":") if isinstance(name, str) else ("", "", "")
    entry = REGISTRY.get(base)
    if entry is None or not (entry.parameters if colon else entry.parameters[:1] in ("", "[")):
        meant = "; did you mean cuda?" if base == "gpu" else of_choices(str(name), ("auto", *REGISTRY))
        raise ArgumentError(f"backend is {name!r}; it may be auto, {', '.join(usages())}{meant}")
    if colon:
        entry.load().parse(name)
    return entry


def candidates(name: str) -> tuple[str, ...]:
    """The names that a name stands for: all for "auto", best first, else itself.  Raises ArgumentError as `find`."""
    if isinstance(name, str) and name == "auto":
        return AUTO
    find(name)
    return (name,)


def for_array(array: Array) -> str:
    """The name of the back end for the caller's array: the one for the GPU that holds it, else "auto"."""
    from .cuda.arrays import device_of

    device = device_of(array)
    return next((entry.name for entry in REGISTRY.values() if entry.on_gpu and entry.device == device), "auto")


def get(name: str = "auto", transport: str = "auto", local_rank: int = 0) -> Backend:
    """A new back end.  For "auto", the first candidate that can run here.

    transport, local_rank: for back ends on a GPU, see `mpiattn.backends.cuda.backend.CudaBackend`.  These have, besides
    the protocol, what `mpiattn.comm.transport` needs: device, by_mpi, slots, opened, connect and near.

    Raises ArgumentError if there is no such back end or it cannot run here.
    """
    names = candidates(name)
    missing = {candidate: find(candidate).missing() for candidate in names}
    chosen = next((candidate for candidate in names if not missing[candidate]), None)
    if chosen is None:
        raise ArgumentError(f"backend is {name!r}, which cannot run on {socket.gethostname()}: {missing[names[0]]}")
    entry = find(chosen)
    arguments = [chosen] if entry.parameters else [transport, local_rank] if entry.on_gpu else []
    return entry.load()(*arguments)
