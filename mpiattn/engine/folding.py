"""The arrays of a call: checks of the caller's arrays, and the fold of the batch into the heads for the executor."""

from functools import partial
from typing import NamedTuple

from ..backends.kept import Kept
from ..errors import ArgumentError
from ..problem.tensors import as_array, is_tensor


def on_host(array):
    """An array of any back end as a NumPy array: itself if on the host, else a copy from the device.

    A tensor as a tensor in host memory.
    """
    if is_tensor(array):
        return array.cpu()
    return array.get() if hasattr(array, "__cuda_array_interface__") and hasattr(array, "get") else array


class Axes(NamedTuple):
    """What the axes of an argument are, for errors.

    names: of the axes.  tokens: which property of the plan has the positions of its tokens, "" without a plan.
    """

    names: tuple
    tokens: str = ""


def checked(backend, name, argument, shape, dtype, axes=None, writable=False):
    """An argument, array or tensor, as an array of a back end.  Raises ArgumentError if shape or dtype differ.

    shape: the required shape, with None for an axis of any length.  axes: its `Axes`, for errors.
    writable: True if a result will be written into it.
    """
    array = (backend.writable if writable else backend.array)(name, as_array(name, argument))
    if array.shape != shape and (
        len(array.shape) != len(shape)
        or array.shape != tuple([m if n is None else n for m, n in zip(array.shape, shape)])  # quicker than any()
    ):
        raise ArgumentError(f"{name} has shape {array.shape}; {_wanted(array.shape, shape, axes)}")
    if array.dtype != dtype:  # another byte order is another dtype
        raise ArgumentError(f"{name} has dtype {array.dtype}; it must be {dtype}")
    return array


def _in_brackets(words):
    """Words as a tuple is written."""
    first, *others = words
    return f"({', '.join([first, *others])})" if others else f"({first},)"


def _wanted(given, shape, axes):
    """The shape that an argument must have, in words; if it has its tokens and heads in turn, that too."""
    sizes = _in_brackets("any" if n is None else str(n) for n in shape)
    where, names = "it" if None in shape else "on this rank it", axes and _in_brackets(axes.names)
    text = f"{where} must be {f'{names} = {sizes}' if names else sizes}"
    if axes and axes.tokens:
        text += f", with the tokens of plan.{axes.tokens}"
    if len(given) == len(shape) > 2:
        swapped = given[0], given[2], given[1], *given[3:]
        if all(n in (None, m) for m, n in zip(swapped, shape)):
            text += "; axes 1 and 2 are swapped"
    return text


def check_values(shared_kv, v, name="v"):
    """Raise ArgumentError unless v is given where it is an array of its own, and None where keys hold the values.

    name: "v", or "dv", which may be None in either case.
    """
    if shared_kv and v is not None:
        given = f"of shape {tuple(v.shape)}" if hasattr(v, "shape") else f"a {type(v).__name__}"
        raise ArgumentError(
            f"{name} is {given}; with shared_kv it is the first columns of {name.replace('v', 'k')}, and must be None"
        )
    if not shared_kv and v is None and name == "v":
        raise ArgumentError(
            "v is None; it must be an array.  Only with shared_kv=True are values the first columns of the keys, "
            "and v None"
        )


def stays(backend, tile, kind):
    """Whether launches take the arrays of a kind where the caller has them, because no other rank needs them."""
    return backend.strided and tile.extent(kind) == 1


class Folding:
    """Converts the caller's arrays (batch, tokens, heads, ...) to (tokens, batch * heads, ...) and back.

    The attribute `copies` holds their memory by name of the argument.
    """

    def __init__(self, backend, batch):
        self.backend, self.batch, self.copies = backend, batch, Kept(backend.empty)

    def view(self, array):
        """View an array (batch, tokens, heads, dim) as launches take it where it lies; None if they do not.

        It is (tokens, heads, dim) or, with a batch above 1, (tokens, batch, heads, dim).
        """
        if not self.backend.strided or array.strides[-1] != array.itemsize:
            return None
        return array[0] if self.batch == 1 else array.swapaxes(0, 1)

    def fold(self, name, array):
        """Convert (batch, tokens, heads, ...) to (tokens, batch * heads, ...), contiguous; copied only if needed.

        A copy is valid until the next call with the same name.
        """
        if self.batch == 1:
            return self.backend.contiguous(array[0], empty=partial(self.copies, name))
        batch, tokens, heads, *dim = array.shape
        whole = self.backend.contiguous(array.swapaxes(0, 1), empty=partial(self.copies, name))
        return whole.reshape(tokens, batch * heads, *dim)

    @property
    def unplanned_bytes(self):
        """Bytes of copies that `mpiattn.model.memory` does not count: those of strided inputs with a batch of 1."""
        return self.copies.nbytes(("q", "k", "v", "dout", "out")) if self.batch == 1 else 0

    def by_batch(self, array):
        """View (tokens, batch * heads, ...) as (tokens, batch, heads, ...)."""
        tokens, heads, *dim = array.shape
        return array.reshape(tokens, self.batch, heads // self.batch, *dim)

    def unfold(self, dst, src):
        """Copy a folded partial into an array (batch, tokens, heads, dim), cast to its dtype; returns the event.

        The array may also be (1, tokens, sequences, heads, dim), where sequences lie one after another.
        """
        if dst.ndim == 5:
            dst, src = dst[0].swapaxes(0, 1), src.reshape(dst.shape[1:]).swapaxes(0, 1)
            return self.backend.copy(dst, src)
        return self.backend.copy(dst, self.by_batch(src).swapaxes(0, 1))
