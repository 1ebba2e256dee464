"""The fold of the batch into the heads, for the executor, and back."""

from functools import partial

from ..backends.kept import Kept


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
