"""The caller's memory as arrays, without a copy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError
from ..problem.problem import dtype_name

if TYPE_CHECKING:
    from ..backends.base import Array

NAMES = {1: "float16", 2: "bfloat16", 3: "float32", 4: "float64", 5: "int32", 6: "int64"}  # as in mpiattn.h
DTYPES = {number: np.dtype(name if "int" in name else dtype_name(name)) for number, name in NAMES.items()}
MAX_AXES = 8
GPU_MEMORY = 2, 3  # of CUDA: of a device, and managed


class Described:
    """What `mpiattn_array` says of an array.  mpiattn.c keeps those of recent calls, and with them the arrays.

    memory: None if the rest describes no array.  number: of the dtype.  strides: in elements, () if contiguous.
    """

    __slots__ = ("address", "array", "axes", "memory", "number", "shape", "strides")

    def __init__(
        self, memory: memoryview | None, address: int, number: int, axes: int, shape: Any, strides: Any
    ) -> None:
        self.memory, self.address, self.number, self.axes = memory, address, number, axes
        self.shape, self.strides = shape, strides
        self.array: np.ndarray | None = None  # in host memory; made when a call needs it

    def wrong(self) -> str:
        """What is wrong about it, where it is not an array."""
        if self.number not in DTYPES:
            known = ", ".join(f"{code} ({name})" for code, name in NAMES.items())
            return f"has dtype {self.number}; it must be one of {known}"
        if not 0 <= self.axes <= MAX_AXES:
            return f"has {self.axes} axes; it must have 0 to {MAX_AXES}"
        if min(self.shape, default=0) < 0:
            return f"has shape {self.shape}; lengths must be 0 or more"
        if min(self.strides, default=0) < 0:
            return f"has strides {self.strides}; they must be 0 or more"
        if self.address:
            return f"has shape {self.shape}, more than memory can have"
        return f"has shape {self.shape} and NULL for its data"


def array_of(name: str, described: Described, on_gpu: bool = False) -> Array:
    """The caller's array.  Raises ArgumentError if the description is not one of an array.

    on_gpu: whether the memory may be that of a GPU, of which a CuPy array is then made.
    """
    if described.array is not None and not on_gpu:
        return described.array
    if described.memory is None:
        raise ArgumentError(f"{name} {described.wrong()}")
    dtype = DTYPES[described.number]
    in_bytes = [stride * dtype.itemsize for stride in described.strides] or None
    if on_gpu and described.memory.nbytes:
        array = _of_gpu(described, described.memory.nbytes, dtype, in_bytes)
        if array is not None:
            return array
    try:
        described.array = np.ndarray(described.shape, dtype, described.memory, 0, in_bytes)
    except (ValueError, OverflowError) as error:
        raise ArgumentError(f"{name} has shape {described.shape} and strides {described.strides}: {error}") from error
    return described.array


def optional(name: str, described: Described | None, on_gpu: bool = False) -> Array | None:
    """As `array_of`; None of NULL."""
    return None if described is None else array_of(name, described, on_gpu)


def needed(name: str, described: Described | None, on_gpu: bool = False) -> Array:
    """As `array_of`.  Raises ArgumentError if it is NULL."""
    if described is None:
        raise ArgumentError(f"{name} is NULL; it must be an array")
    return array_of(name, described, on_gpu)


def _of_gpu(described: Described, nbytes: int, dtype: np.dtype[Any], in_bytes: list[int] | None) -> Any:
    """A CuPy array of memory on a GPU; None if the address is one of the host."""
    cupy = import_module("cupy")
    if cupy.cuda.runtime.pointerGetAttributes(described.address).type not in GPU_MEMORY:
        return None
    memory = cupy.cuda.UnownedMemory(described.address, nbytes, None)
    return cupy.ndarray(described.shape, dtype, cupy.cuda.MemoryPointer(memory, 0), in_bytes)


def numbers(name: str, memory: memoryview | None, count: int | None = None) -> memoryview:
    """The caller's int64 numbers.  Raises ArgumentError if the memory is NULL or is not for so many."""
    if memory is None:
        raise ArgumentError(f"{name} is NULL, or its number is negative; it must be memory for int64 numbers")
    words = memory.cast("q")
    if count is not None and len(words) != count:
        raise ArgumentError(f"count is {len(words)}; {name} takes {count} numbers")
    return words


def write_numbers(name: str, values: Any, memory: memoryview | None) -> None:
    """Write as many int64 numbers as there are.  Raises ArgumentError if the memory is for more or fewer."""
    np.asarray(numbers(name, memory, len(values)))[:] = values


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
