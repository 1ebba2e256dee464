"""Which rank holds which tokens, and whole arrays to and from them: `Distributed`, a base class of `MeshAttention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..arguments.arrays import on_host
from ..comm.collective_calls import Collective
from ..comm.refusal import of_call, refusing
from ..comm.whole_arrays import gather, scatter
from ..problem.tensors import as_array, as_given

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from ..backends.base import Array, Backend
    from ..comm.exchange import Exchange
    from ..comm.mesh import Mesh
    from ..problem.layout import Layout
    from .decision import Decision


class Distributed(Collective):
    """The distribution of a plan's tokens over its ranks."""

    q_layout: Layout
    k_layout: Layout
    _decision: Decision
    _mesh: Mesh
    _backend: Backend
    _exchange: Exchange

    @property
    def rank(self) -> int:
        """This rank in the caller's communicator."""
        return self._peers.rank

    @property
    def chunk(self) -> int:
        """Number of this rank's chunk, which is its rank in the mesh.

        It differs from the rank in the caller's communicator where that does not number ranks node by node.
        """
        return self._mesh.rank

    @property
    def positions(self) -> NDArray[np.int64]:
        """Positions in the sequence of this rank's query tokens: int64, increasing."""
        return self._decision.layouts[0].positions(self.chunk)

    @property
    def positions_k(self) -> NDArray[np.int64]:
        """Positions in the sequence of this rank's key and value tokens: int64, increasing."""
        return self._decision.layouts[1].positions(self.chunk)

    def owner(self, positions: ArrayLike, *, keys: bool = False) -> Any:
        """The rank that holds each of the given positions in the sequence; not collective.

        Parameters
        ----------
        positions : int or array of int
        keys : bool, default False
            Whether the positions are those of keys and values.

        Returns
        -------
        int or int64 array of the shape of positions

        Raises
        ------
        ArgumentError
            On this rank only.
        """
        ranks = self._layout(keys).owner(positions)
        return ranks if ranks.ndim else int(ranks)

    @refusing("scatter", of_call("scatter"))
    def scatter(self, array: Array | None, *, root: int | None = 0, axis: int = 1, keys: bool = False) -> Array:
        """This rank's chunk of a whole array whose tokens are in natural order along `axis`; collective.

        Parameters
        ----------
        array : array of numbers of any dtype
            The whole, needed on `root` only.  With root=None every rank passes it and nothing is sent.
        root : int or None, default 0
            The rank that has the whole, the same on every rank.
        axis : int, default 1
            Axis of the tokens, the same on every rank; negative ones count from the last.
        keys : bool, default False
            Whether the tokens are those of keys and values; it matters only where seqlen_k differs from seqlen.

        Returns
        -------
        chunk : array
            In `array`'s dtype and native byte order: a torch tensor if the root's array is one, else the back end's.
            With "cuda" on this rank's GPU.

        Raises
        ------
        ArgumentError
            The same on every rank: root or axis differs or is invalid, or the whole is not an array of numbers with the
            sequence's tokens along `axis`.
        CallError, PeerFailure, MpiattnError
            As in `MeshAttention`.
        """
        with self.call("scatter") as call:
            chunk = scatter(call, self._layout(keys), on_host(array), root, axis, self._exchange.max_message)
        return as_given(chunk, self._backend.give(as_array("chunk", chunk), chunk))[0]

    @refusing("gather", of_call("gather"))
    def gather(self, chunk: Array, *, root: int | None = 0, axis: int = 1, keys: bool = False) -> Array:
        """The whole array, in natural order, from the ranks' chunks; collective.

        Parameters
        ----------
        chunk : array
            This rank's tokens along `axis` (1 for out, 2 for lse), numbers of any dtype.
        root, axis, keys
            As in `scatter`; with root=None every rank gets the whole.

        Returns
        -------
        whole : array or None
            In host memory, as one GPU may lack the memory: a torch tensor if this rank's chunk is one, else a NumPy
            array.  None off `root`.

        Raises
        ------
        ArgumentError
            The same on every rank: as in `scatter`, or the chunks' dtypes or their shapes without the tokens differ.
        CallError, PeerFailure, MpiattnError
            As in `MeshAttention`.
        """
        with self.call("gather") as call:
            return gather(call, self._layout(keys), on_host(chunk), root, axis, self._exchange.max_message)

    def _layout(self, keys: bool) -> Layout:
        return self.k_layout if keys else self.q_layout

    def drain(self) -> None:
        """Wait until results are complete: with "cuda", calls return as soon as all work is launched.

        Raises
        ------
        ArgumentError, MpiattnError
            On this rank only: the plan is closed, or a call on its communicator did not end.
        """
        self._check_open()
        self._backend.drain()

    def give(self, array: np.ndarray) -> Array:
        """A NumPy array as the back end's array, for `forward` and `backward`.

        Parameters
        ----------
        array : NumPy array of any shape and dtype

        Returns
        -------
        array
            With "cuda" a CuPy array on this rank's GPU, else the array itself.

        Raises
        ------
        ArgumentError, MpiattnError
            On this rank only: the plan is closed, or a call on its communicator did not end.
        """
        self._check_open()
        return self._backend.give(array)
