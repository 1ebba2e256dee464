"""Which part of a bias belongs to which rank, and whole ones to and from there: `Tiled`, a base of `MeshAttention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments.arrays import on_host
from ..comm import whole_tiles
from ..comm.agreement import agreement
from ..comm.refusal import of_call, refusing
from ..comm.rounds import native
from ..comm.whole_arrays import check_numbers, check_root
from ..errors import ArgumentError
from ..problem.tensors import as_array, as_given, as_tensor, detached, is_tensor
from ..system.values import AsGiven
from .distribution import Distributed
from .share import whole_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..backends.base import Array
    from ..problem.problem import Problem
    from ..schedule.tile import Tile
    from .share import Share


class Tiled(Distributed):
    """The tiles of a plan's ranks."""

    problem: Problem
    _share: Share

    if TYPE_CHECKING:

        @property
        def tile(self) -> Tile:
            """Of `Described`."""
            ...

    def _check_tiles(self, what: str) -> None:
        """Raise ArgumentError, which begins with `what`, unless the ranks of this plan have tiles of a bias."""
        if self.tile.divided:
            raise ArgumentError(
                f"{what}, but the tile of this plan is {str(self.tile)!r}: its ranks compute pieces of the scores, and "
                "none has a tile of a bias; make the plan with tile='mesh', or with a tile AxB or HxAxB"
            )

    @property
    def bias_positions(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions in the sequence of the rows and of the columns of this rank's tile of a bias: int64.

        Chunk after chunk: the rows are the tokens of the query chunks that this rank computes with, the columns those
        of its KV chunks.  With the tile "bands", whose ranks have no tile of a bias, it raises ArgumentError, as do
        `bias_sequences`, `bias_heads`, `scatter_bias` and `gather_bias`.
        """
        self._check_tiles("bias_positions is asked for")
        return self._share.positions()

    @property
    def bias_sequences(self) -> slice:
        """The batch entries of this rank's tile of a bias: all of them but in a mesh of several planes."""
        self._check_tiles("bias_sequences is asked for")
        return self._share.sequences

    @property
    def bias_heads(self) -> slice:
        """The heads of this rank's tile of a bias: all of them but in a mesh of several planes."""
        self._check_tiles("bias_heads is asked for")
        return self._share.heads

    @refusing("scatter_bias", of_call("scatter_bias"))
    def scatter_bias(self, bias: Array | None, *, root: int | None = 0) -> Array:
        """This rank's tile of a whole bias whose tokens are in natural order; collective.

        Parameters
        ----------
        bias : array, (batch or 1, heads or 1, seqlen, seqlen_k)
            The whole, of numbers of any dtype, needed on `root` only.  With root=None every rank passes it and nothing
            is sent.
        root : int or None, default 0
            The rank that has the whole, the same on every rank.

        Returns
        -------
        tile : array, (sequences or 1, heads or 1, rows, columns)
            `bias[plan.bias_sequences, plan.bias_heads][:, :, rows[:, None], columns]` with rows, columns =
            `plan.bias_positions`; an axis of length 1 stays so.  In `bias`'s dtype and native byte order: a torch
            tensor if the root's array is one, else the back end's.

        Raises
        ------
        ArgumentError
            The same on every rank: root differs or is invalid, or the whole has another shape.
        CallError, PeerFailure, MpiattnError
            As in `MeshAttention`.
        """
        p = self.problem
        with self.call("scatter_bias") as call:
            peers, whole = call.peers, None
            about: Any = None  # shape, dtype, and whether it is a tensor
            with call.agreement() as same:
                self._check_tiles("scatter_bias is called")
                check_root(root, peers.size)
                same["root"] = AsGiven(root, "every rank" if root is None else root)
                if root in (None, peers.rank):
                    whole = as_array("bias", on_host(detached(bias)))
                    _check_whole(whole, p)
                    about = whole.shape, native(whole.dtype), is_tensor(bias)
            shape, dtype, tensor = about if root is None else peers.allgather(about)[root]
            with agreement(peers):
                leading = [1 if n == 1 else own for n, own in zip(shape[:2], self._share.shape)]
                tile = np.empty((*leading, *self._share.tokens), dtype)
                given = as_tensor(tile) if tensor else tile
            tiles = self._tiles_of(shape)
            whole_tiles.scatter(peers, tiles, whole, tile, shape, root, self._exchange.max_message)
        return given if tensor else self._backend.give(tile)

    @refusing("gather_bias", of_call("gather_bias"))
    def gather_bias(self, tile: Array, *, root: int = 0, bias_shared: Sequence[str] | None = None) -> Array | None:
        """The whole bias, or gradient of one, in natural order, from the ranks' tiles; collective.

        Parameters
        ----------
        tile : array, (sequences or 1, heads or 1, rows, columns)
            This rank's tile, numbers of any dtype.
        root : int, default 0
            The rank that gets the whole.
        bias_shared : sequence of str, default None
            As in `backward`.

        Returns
        -------
        bias : array, (batch or 1, heads or 1, seqlen, seqlen_k), or None
            In host memory, in native byte order: a torch tensor if the tile is one, else a NumPy array.  None off
            `root`.

        Raises
        ------
        ArgumentError
            The same on every rank: as in `scatter_bias`, or the tiles' dtypes or shapes do not fit.
        CallError, PeerFailure, MpiattnError
            As in `MeshAttention`.
        """
        p = self.problem
        with self.call("gather_bias") as call:
            peers = call.peers
            with call.agreement() as same:
                self._check_tiles("gather_bias is called")
                if root is None:
                    raise ArgumentError("root is None; it must be a rank: only one gets the whole bias")
                check_root(root, peers.size)
                array = as_array("tile", on_host(detached(tile)))
                _check_tile(array, self._share.shape)
                shape = whole_shape(self._share, array.shape, bias_shared, (p.seqlen, p.seqlen_k))
                same |= {"root": root, "shape and dtype of the whole": (shape, str(native(array.dtype)))}
            tiles = self._tiles_of(shape)

            def sending(rank: int) -> bool:
                """Of planes with the same tile, the first gives it."""
                own = self._decision.share(self._decision.rank_in_mesh(rank))
                return all(n > 1 or not of.start for n, of in zip(shape, (own.sequences, own.heads)))

            whole = whole_tiles.gather(peers, tiles, array, shape, root, self._exchange.max_message, sending)
        return None if whole is None else as_given(tile, whole)[0]

    def _tiles_of(self, shape: tuple[int, ...]) -> Any:
        """A function of a rank: where its tile lies in a whole of a shape, as of `mpiattn.comm.whole_tiles`."""

        def of_rank(rank: int) -> tuple[Any, ...]:
            share = self._decision.share(self._decision.rank_in_mesh(rank))
            return (share.leading(shape), *share.positions())

        return of_rank


def _check_whole(whole: Any, p: Problem) -> None:
    wanted = p.batch, p.heads, p.seqlen, p.seqlen_k
    check_numbers("bias", whole)
    if not _fits(whole, wanted):
        raise ArgumentError(
            f"bias has shape {whole.shape}; it must be an array (batch, heads, seqlen, seqlen_k) = {wanted}, whose "
            "first two lengths may be 1 instead"
        )


def _check_tile(tile: Any, wanted: tuple[int, ...]) -> None:
    check_numbers("tile", tile)
    if not _fits(tile, wanted):
        raise ArgumentError(
            f"tile has shape {tile.shape}; on this rank it must be an array (batch, heads, rows, columns) = {wanted}, "
            "whose first two lengths may be 1 instead"
        )


def _fits(array: NDArray[Any], wanted: tuple[int, ...]) -> bool:
    """Whether an array has a shape, but for lengths of 1 of its first two axes."""
    if array.ndim != 4:
        return False
    return array.shape[2:] == wanted[2:] and all(n in (1, m) for n, m in zip(array.shape, wanted))
