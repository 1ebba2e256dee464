"""Arrays of any library in GPU memory, as CuPy arrays: the same memory, without a copy."""

import sys

import numpy as np
from numpy.lib import NumpyVersion

from ...errors import ArgumentError
from ...problem.tensors import is_tensor, what_is

DLPACK_CUDA = 2  # kDLCUDA, DLPack's device type of CUDA memory
WITH_BFLOAT16 = "2.1.2"  # the oldest NumPy with which CuPy knows it
EXTRAS = ("cuda12", "cuda13")  # this package's extras that install CuPy


def missing():
    """Why CuPy cannot be used in this process and what to install; "" if it can be used."""
    try:
        import cupy
    except ImportError as error:
        return f"it needs CuPy ({error}): " + " or ".join(f"pip install 'mpiattn[{extra}]'" for extra in EXTRAS)
    runtime = cupy.cuda.runtime
    if getattr(runtime, "is_hip", False):
        return "this CuPy is for AMD GPUs (ROCm), for which mpiattn has no kernels"
    try:
        return "" if runtime.getDeviceCount() else "CuPy counts 0 GPUs"
    except runtime.CUDARuntimeError as error:
        return f"CuPy finds no GPU: {error}"


def check_bfloat16(what, dtype):
    """Raise ArgumentError for bfloat16 if NumPy is too old for it on a GPU.  what: begins the message: "dtype is"."""
    if "bfloat16" in str(dtype) and NumpyVersion(np.__version__) < WITH_BFLOAT16:
        raise ArgumentError(
            f"{what} {str(dtype)!r}, which on a GPU needs NumPy {WITH_BFLOAT16} or newer, and NumPy here is "
            f"{np.__version__}: pip install 'numpy>={WITH_BFLOAT16}'"
        )


def device_of(array):
    """The kind of memory that holds an array: "cuda" or "cpu"."""
    if hasattr(array, "__dlpack_device__"):  # first: torch's other attribute raises if a gradient is required
        on_gpu = array.__dlpack_device__()[0] == DLPACK_CUDA
    else:
        on_gpu = hasattr(array, "__cuda_array_interface__")
    return "cuda" if on_gpu else "cpu"


class _Stream:
    """A stream, in the protocol by which CuPy accepts those of other libraries.  pointer: its address."""

    def __init__(self, pointer):
        self.pointer = pointer

    def __cuda_stream__(self):
        return 0, self.pointer


def torch_stream(cupy, device):
    """Torch's current stream of a GPU, as CuPy's."""
    pointer = sys.modules["torch"].cuda.current_stream(device).cuda_stream
    return cupy.cuda.Stream.from_external(_Stream(pointer)) if pointer else cupy.cuda.Stream.null


def as_cupy(cupy, name, argument):
    """An array on a GPU as a CuPy array; a NumPy array is returned unchanged.

    CuPy's current stream is ordered after the launches of the array's library so far.  For torch it is not: what uses
    the array must be ordered after torch's current stream.

    name: the argument's name for errors.  Raises ArgumentError for anything else.
    """
    if isinstance(argument, cupy.ndarray) or (
        isinstance(argument, np.ndarray) and not isinstance(argument, np.ma.MaskedArray)
    ):
        return argument
    if isinstance(argument, np.ndarray) or device_of(argument) == "cpu":
        raise ArgumentError(
            f"{name} is a {type(argument).__name__}; it must be a CuPy array, another library's array "
            f"on the GPU, or a NumPy array{what_is(argument)}"
        )
    try:
        if is_tensor(argument):  # on torch's own stream, so that nobody waits for anybody
            with cupy.cuda.Device(argument.device.index), torch_stream(cupy, argument.device.index):
                return cupy.from_dlpack(argument)
        return cupy.from_dlpack(argument) if hasattr(argument, "__dlpack__") else cupy.asarray(argument)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        check_bfloat16(f"{name} has dtype", getattr(argument, "dtype", ""))
        raise ArgumentError(f"{name} is a {type(argument).__name__} that CuPy cannot share: {error}") from error
