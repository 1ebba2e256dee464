"""The caller's memory as arrays, without a copy, from the descriptions `mpiattn_array` of mpiattn.h."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError
from ..problem.problem import dtype_name

if TYPE_CHECKING:
    from ..backends.base import Array

# (memory or None, address, number of the dtype, number of axes, shape, strides in elements or ()).
Described = tuple[memoryview | None, int, int, int, tuple[int, ...], tuple[int, ...]]

NAMES = {1: "float16", 2: "bfloat16", 3: "float32", 4: "float64", 5: "int32", 6: "int64"}  # as in mpiattn.h
DTYPES = {number: np.dtype(name if "int" in name else dtype_name(name)) for number, name in NAMES.items()}
MAX_AXES = 8
GPU_MEMORY = 2, 3  # of CUDA: of a device, and managed


def array_of(name: str, described: Described, on_gpu: bool = False) -> Array:
    """The caller's array.  Raises ArgumentError if the description is not one of an array.

    on_gpu: whether the memory may be that of a GPU, of which a CuPy array is then made.
    """
    memory, address, number, axes, shape, strides = described
    dtype = DTYPES.get(number)
    if memory is None or dtype is None:
        raise ArgumentError(f"{name} {_wrong(described)}")
    if on_gpu and address and memory.nbytes:
        array = _of_gpu(memory.nbytes, address, dtype, shape, strides)
        if array is not None:
            return array
    if strides:
        return np.ndarray(shape, dtype, memory, 0, [stride * dtype.itemsize for stride in strides])
    return np.ndarray(shape, dtype, memory)


def optional(name: str, described: Described | None, on_gpu: bool = False) -> Array | None:
    """As `array_of`; None of NULL."""
    return None if described is None else array_of(name, described, on_gpu)


def needed(name: str, described: Described | None, on_gpu: bool = False) -> Array:
    """As `array_of`.  Raises ArgumentError if it is NULL."""
    if described is None:
        raise ArgumentError(f"{name} is NULL; it must be an array")
    return array_of(name, described, on_gpu)


def _wrong(described: Described) -> str:
    """What is wrong about a description."""
    _, address, number, axes, shape, strides = described
    if number not in DTYPES:
        known = ", ".join(f"{code} ({name})" for code, name in NAMES.items())
        return f"has dtype {number}; it must be one of {known}"
    if not 0 <= axes <= MAX_AXES:
        return f"has {axes} axes; it must have 0 to {MAX_AXES}"
    if min(shape, default=0) < 0:
        return f"has shape {shape}; lengths must be 0 or more"
    if min(strides, default=0) < 0:
        return f"has strides {strides}; they must be 0 or more"
    return f"has shape {shape}, more than memory can have" if address else f"has shape {shape} and NULL for its data"


def _of_gpu(nbytes: int, address: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """A CuPy array of memory on a GPU; None if the address is one of the host."""
    cupy = import_module("cupy")
    if cupy.cuda.runtime.pointerGetAttributes(address).type not in GPU_MEMORY:
        return None
    memory = cupy.cuda.UnownedMemory(address, nbytes, None)
    in_bytes = [stride * dtype.itemsize for stride in strides] or None
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), in_bytes)


def numbers(name: str, memory: memoryview | None, count: int | None = None) -> memoryview:
    """The caller's int64 numbers.  Raises ArgumentError if the memory is NULL or is not for so many."""
    if memory is None:
        raise ArgumentError(f"{name} is NULL, or its number is negative; it must be memory for int64 numbers")
    words = memory.cast("q")
    if count is not None and len(words) != count:
        raise ArgumentError(f"count is {len(words)}; {name} takes {count} numbers")
    return words


def write_text(text: str, memory: memoryview | None) -> None:
    """Write a text and a zero.  Raises ArgumentError if there is no room."""
    written = text.encode() + b"\0"
    if memory is None or memory.nbytes < len(written):
        room = "text is NULL" if memory is None else f"size is {memory.nbytes}"
        raise ArgumentError(f"{room}; the text takes {len(written)} bytes, with the zero at its end")
    memory[: len(written)] = written


def finish() -> None:
    """Wait until results on the GPU are complete."""
    import_module("cupy").cuda.get_current_stream().synchronize()
