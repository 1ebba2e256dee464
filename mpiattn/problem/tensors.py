"""PyTorch CPU tensors as NumPy arrays and back, sharing memory without a copy.

torch is optional.  A caller with a tensor has imported it already, so it is taken from sys.modules.  bfloat16 is passed
as int16, because NumPy and torch do not know each other's bfloat16.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np

from ..errors import ArgumentError
from .problem import dtype_name


def is_tensor(argument: object) -> bool:
    """Whether an object is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(argument, torch.Tensor)


def shared(name: str, tensor: Any) -> np.ndarray:
    """A tensor's memory as an array of any strides.  Raises ArgumentError if NumPy cannot share it."""
    torch, tensor = sys.modules["torch"], tensor.detach()
    try:
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(dtype_name("bfloat16"))
        return tensor.numpy()
    except (TypeError, RuntimeError) as error:  # sparse, unknown to NumPy, or wrapped by a transform
        raise ArgumentError(
            f"{name} is a tensor of {tensor.dtype} and {tensor.layout}; it must be a dense one "
            f"that NumPy can share ({error})"
        ) from error


def as_array(name: str, argument: Any) -> Any:
    """The memory of a CPU tensor as an array; any other argument is returned as it is.

    Raises ArgumentError if the tensor requires a gradient while torch records gradients, since it would be lost.
    """
    if type(argument) is np.ndarray or not is_tensor(argument) or argument.device.type != "cpu":
        return argument
    if argument.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ArgumentError(
            f"{name} requires a gradient, which would be lost here; use mpiattn.torch.attention, or pass it detached"
        )
    return shared(name, argument)


def as_tensor(array: np.ndarray) -> Any:
    """A NumPy array's memory as a tensor."""
    torch = import_module("torch")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_given(given: object, *results: Any) -> tuple[Any, ...]:
    """The results as a tuple; NumPy arrays become tensors if `given`, an argument of the call, is a tensor."""
    if type(given) is np.ndarray or not is_tensor(given):
        return results
    return tuple(as_tensor(result) if isinstance(result, np.ndarray) else result for result in results)
