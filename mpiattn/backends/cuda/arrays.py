"""Arrays in the memory of a GPU, of whatever library, as CuPy's: the same memory, not a copy."""

import numpy as np

from ...errors import ArgumentError

DLPACK_CUDA = 2            # the number of CUDA memory in DLPack


def load_cupy():
    """CuPy, once it has found a GPU; ArgumentError where there is none."""
    try:
        import cupy
    except ImportError as error:
        raise ArgumentError(f"backend is 'cuda', which needs CuPy ({error}); the extras cuda12 and cuda13 have it: "
                            "pip install 'mpiattn[cuda12]'") from error
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise ArgumentError(f"backend is 'cuda', but CuPy finds no GPU: {error}") from error
    if not count:
        raise ArgumentError("backend is 'cuda', but CuPy counts 0 GPUs")
    return cupy


def on_device(thing):
    """Whether something is an array in the memory of a GPU."""
    if hasattr(thing, "__dlpack_device__"):        # first, as torch's other attribute raises where gradients are wanted
        return thing.__dlpack_device__()[0] == DLPACK_CUDA
    return hasattr(thing, "__cuda_array_interface__")


def as_cupy(cupy, name, thing):
    """An array on a GPU as a CuPy array, after what its library has launched; a NumPy array as it is.

    name: of the argument.  Raises ArgumentError for anything else.
    """
    if isinstance(thing, cupy.ndarray) or (
            isinstance(thing, np.ndarray) and not isinstance(thing, np.ma.MaskedArray)):
        return thing
    if isinstance(thing, np.ndarray) or not on_device(thing):
        raise ArgumentError(f"{name} is a {type(thing).__name__}; it must be a CuPy array, another library's array on "
                            "the GPU, or a NumPy array")
    try:
        return cupy.from_dlpack(thing) if hasattr(thing, "__dlpack__") else cupy.asarray(thing)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise ArgumentError(f"{name} is a {type(thing).__name__} that CuPy cannot share: {error}") from error
