"""Arrays in the memory of a GPU, of whatever library, as CuPy's: the same memory, not a copy."""

import numpy as np

from ...errors import ArgumentError

DLPACK_CUDA = 2            # the number of CUDA memory in DLPack
EXTRAS = ("cuda12", "cuda13")               # of this package, which bring CuPy


def missing():
    """Why CuPy cannot be used in this process and what to install, "" where it can be used."""
    try:
        import cupy
    except ImportError as error:
        return f"it needs CuPy ({error}): " + " or ".join(f"pip install 'mpiattn[{extra}]'" for extra in EXTRAS)
    runtime = cupy.cuda.runtime
    try:
        return "" if runtime.getDeviceCount() else "CuPy counts 0 GPUs"
    except runtime.CUDARuntimeError as error:
        return f"CuPy finds no GPU: {error}"


def device_of(thing):
    """The kind of memory that an array is in: "cuda" or "cpu"."""
    if hasattr(thing, "__dlpack_device__"):        # first, as torch's other attribute raises where gradients are wanted
        on_gpu = thing.__dlpack_device__()[0] == DLPACK_CUDA
    else:
        on_gpu = hasattr(thing, "__cuda_array_interface__")
    return "cuda" if on_gpu else "cpu"


def as_cupy(cupy, name, thing):
    """An array on a GPU as a CuPy array, after what its library has launched; a NumPy array as it is.

    name: of the argument.  Raises ArgumentError for anything else.
    """
    if isinstance(thing, cupy.ndarray) or (
            isinstance(thing, np.ndarray) and not isinstance(thing, np.ma.MaskedArray)):
        return thing
    if isinstance(thing, np.ndarray) or device_of(thing) == "cpu":
        raise ArgumentError(f"{name} is a {type(thing).__name__}; it must be a CuPy array, another library's array on "
                            "the GPU, or a NumPy array")
    try:
        return cupy.from_dlpack(thing) if hasattr(thing, "__dlpack__") else cupy.asarray(thing)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise ArgumentError(f"{name} is a {type(thing).__name__} that CuPy cannot share: {error}") from error
