"""Arrays of any library in GPU memory, as CuPy arrays: the same memory, without a copy."""

import numpy as np

from ...errors import ArgumentError

DLPACK_CUDA = 2  # kDLCUDA, DLPack's device type of CUDA memory
EXTRAS = ("cuda12", "cuda13")  # this package's extras that install CuPy


def missing():
    """Why CuPy cannot be used in this process and what to install; "" if it can be used."""
    try:
        import cupy
    except ImportError as error:
        return f"it needs CuPy ({error}): " + " or ".join(f"pip install 'mpiattn[{extra}]'" for extra in EXTRAS)
    runtime = cupy.cuda.runtime
    try:
        return "" if runtime.getDeviceCount() else "CuPy counts 0 GPUs"
    except runtime.CUDARuntimeError as error:
        return f"CuPy finds no GPU: {error}"


def device_of(array):
    """The kind of memory that holds an array: "cuda" or "cpu"."""
    if hasattr(array, "__dlpack_device__"):  # first: torch's other attribute raises if a gradient is required
        on_gpu = array.__dlpack_device__()[0] == DLPACK_CUDA
    else:
        on_gpu = hasattr(array, "__cuda_array_interface__")
    return "cuda" if on_gpu else "cpu"


def as_cupy(cupy, name, argument):
    """An array on a GPU as a CuPy array, ordered after its library's launches; a NumPy array is returned unchanged.

    name: the argument's name for errors.  Raises ArgumentError for anything else.
    """
    if isinstance(argument, cupy.ndarray) or (
        isinstance(argument, np.ndarray) and not isinstance(argument, np.ma.MaskedArray)
    ):
        return argument
    if isinstance(argument, np.ndarray) or device_of(argument) == "cpu":
        raise ArgumentError(
            f"{name} is a {type(argument).__name__}; it must be a CuPy array, another library's array "
            "on the GPU, or a NumPy array"
        )
    try:
        return cupy.from_dlpack(argument) if hasattr(argument, "__dlpack__") else cupy.asarray(argument)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise ArgumentError(f"{name} is a {type(argument).__name__} that CuPy cannot share: {error}") from error
