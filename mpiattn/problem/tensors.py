"""PyTorch CPU tensors, and other libraries' arrays, as NumPy arrays and back, sharing memory; results like arguments.

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

DLPACK_CPU = 1  # kDLCPU, DLPack's device type of host memory


def is_tensor(argument: object) -> bool:
    """Whether an object is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(argument, torch.Tensor)


def check_transforms(name: str, tensor: Any) -> None:
    """Raise ArgumentError where torch follows a tensor in a way of which results would know nothing.

    These are the transforms of torch.func, batches of gradients, forward-mode differentiation, and torch.jit.trace.
    """
    torch, forward_ad = sys.modules["torch"], sys.modules.get("torch.autograd.forward_ad")
    transforms = getattr(getattr(torch, "_C", None), "_are_functorch_transforms_active", bool)
    if transforms():
        raise ArgumentError(
            f"{name} is used inside a transform of torch.func (grad, vjp, jvp, vmap, ...); these do not work with "
            "mpiattn: call it outside of them, and take gradients by backward() or torch.autograd.grad"
        )
    of_many = getattr(getattr(getattr(torch, "_C", None), "_functorch", None), "is_legacy_batchedtensor", None)
    if of_many is not None and of_many(tensor):
        raise ArgumentError(
            f"{name} is a batch of gradients, as is_grads_batched=True and vectorize=True make it; a backward pass "
            "takes the gradients of a single loss: call it once for each"
        )
    if forward_ad is not None and forward_ad.unpack_dual(tensor).tangent is not None:
        raise ArgumentError(f"{name} has a tangent, of forward-mode differentiation; only backward() is possible")
    if hasattr(torch, "jit") and torch.jit.is_tracing():
        raise ArgumentError(f"{name} is used inside torch.jit.trace, which would record results as constants")


def shared(name: str, tensor: Any) -> np.ndarray:
    """A tensor's memory as an array of any strides.  Raises ArgumentError if NumPy cannot share it."""
    torch, tensor = sys.modules["torch"], tensor.detach()
    try:
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(dtype_name("bfloat16"))
        return tensor.numpy()
    except (TypeError, RuntimeError) as error:  # sparse, unknown to NumPy, or wrapped by a transform
        raise ArgumentError(
            f"{name} is a {type(tensor).__name__} of {tensor.dtype} and {tensor.layout}; it must be a dense one "
            f"that NumPy can share ({error})"
        ) from error


def as_array(name: str, argument: Any) -> Any:
    """The memory of a CPU tensor, or of another library's array on the CPU, as an array; all else as it is.

    A tensor on a GPU is returned without its history.  Raises ArgumentError if the tensor requires a gradient while
    torch records gradients, since it would be lost, or if NumPy cannot take an array.
    """
    if type(argument) is np.ndarray:
        return argument
    if not is_tensor(argument):
        return _on_cpu(name, argument)
    check_transforms(name, argument)
    if argument.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ArgumentError(
            f"{name} requires a gradient, which would be lost here; use mpiattn.torch.attention, or pass it detached"
        )
    return shared(name, argument) if argument.device.type == "cpu" else argument.detach()


def detached(argument: Any) -> Any:
    """A tensor without its history, for a call that gives no result that depends on it; all else as it is."""
    return argument.detach() if is_tensor(argument) else argument


def _on_cpu(name: str, argument: Any) -> Any:
    """An object with NumPy's or DLPack's interface to memory of the CPU as an array; all else as it is."""
    if isinstance(argument, np.ndarray | np.generic) or hasattr(argument, "__cuda_array_interface__"):
        return argument
    try:
        if hasattr(argument, "__array_interface__"):
            return np.asarray(argument)
        if hasattr(argument, "__dlpack__") and argument.__dlpack_device__()[0] == DLPACK_CPU:
            return np.from_dlpack(argument)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{name} is a {type(argument).__name__}, whose memory NumPy cannot take as it is ({error}); "
            f"np.asarray({name}) may copy it"
        ) from error
    return argument


def what_is(argument: Any) -> str:
    """Text to append to an error about an argument that is no array: how to make one of it, if that is known."""
    if isinstance(argument, np.ma.MaskedArray):
        return "; its mask would be lost"
    if hasattr(argument, "__cuda_array_interface__"):
        return "; it is on a GPU, which the back end 'cuda' is for"
    if isinstance(argument, list | tuple) or hasattr(argument, "__array__"):
        return ", which np.asarray makes of it"
    return ""


def as_tensor(array: np.ndarray) -> Any:
    """A NumPy array's memory as a tensor."""
    torch = import_module("torch")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_given(given: object, *results: Any) -> tuple[Any, ...]:
    """The results as a tuple, of the library of `given`, an argument of the call, where that takes other's arrays.

    NumPy arrays become tensors if `given` is a tensor.  Arrays on a GPU become those of a library whose arrays know its
    namespace, as the array API has it.
    """
    if isinstance(given, np.ndarray):
        return results
    if is_tensor(given):
        return tuple(as_tensor(result) if isinstance(result, np.ndarray) else result for result in results)
    return tuple(_taken_over(given, result) for result in results)


def _taken_over(given: object, result: Any) -> Any:
    """A result on a GPU as an array of the library of `given`, if that can take it."""
    if type(result) is type(given) or not hasattr(result, "__cuda_array_interface__"):
        return result
    namespace: Any = given.__array_namespace__() if hasattr(given, "__array_namespace__") else None
    return namespace.from_dlpack(result) if hasattr(namespace, "from_dlpack") else result
