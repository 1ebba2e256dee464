"""Tensors of PyTorch on the CPU as NumPy arrays, and arrays as tensors: the same memory, not a copy.

Who has a tensor has loaded torch, so it is looked for among the loaded modules and is no requirement.  NumPy and torch
know each other's dtypes but for bfloat16, which crosses as int16.
"""

import sys
from importlib import import_module

import numpy as np

from ..errors import ArgumentError
from .problem import dtype_name


def is_tensor(thing):
    """Whether something is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.Tensor)


def shared(name, tensor):
    """A tensor's memory as an array of any strides; ArgumentError where NumPy cannot share it."""
    torch, tensor = sys.modules["torch"], tensor.detach()
    try:
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(dtype_name("bfloat16"))
        return tensor.numpy()
    except (TypeError, RuntimeError) as error:         # sparse, a dtype that NumPy lacks, wrapped by a transform
        raise ArgumentError(f"{name} is a tensor of {tensor.dtype} and {tensor.layout}; it must be a dense one "
                            f"that NumPy can share ({error})") from error


def as_array(name, thing):
    """An argument's memory as an array where it is a tensor on the CPU, else the argument itself.

    Raises ArgumentError where it requires a gradient, which would be lost, unless torch records none at the moment.
    """
    if not is_tensor(thing) or thing.device.type != "cpu":
        return thing
    if thing.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ArgumentError(f"{name} requires a gradient, which would be lost here; use mpiattn.torch.attention, or "
                            "pass it detached")
    return shared(name, thing)


def as_tensor(array):
    """A NumPy array's memory as a tensor."""
    torch = import_module("torch")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_given(given, *results):
    """Results as a tuple, NumPy arrays among them as tensors where `given`, an argument of the call, is a tensor."""
    return tuple(as_tensor(result) if is_tensor(given) and isinstance(result, np.ndarray) else result
                 for result in results)
