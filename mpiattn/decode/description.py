"""What a cache says of itself, without a change to it: `DescribedCache`, a base class of `KVCache`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..arguments.counts import sequence_numbers
from ..problem.problem import dims_in_words
from ..schedule import reduction

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..backends.base import Backend
    from ..comm.exchange import Exchange
    from ..comm.mesh import Home
    from ..model.machine import Machine
    from .storage import Storage


class DescribedCache:
    """What a cache holds, its counters so far, and the algorithm that it chooses."""

    capacity: int
    sequences: int
    page_size: int
    pages: int
    kv_heads: int
    head_dim: int
    value_dim: int
    shared_kv: bool
    dtype: str
    partial_dtype: str
    rank: int
    ranks: int
    nodes: list[int]
    machine: Machine
    # used by the modules of this package only
    storage: Storage
    combiner: Any  # a `Combiner`; None once the cache is closed
    asked: dict[str, Any]  # of the last decoding call, see `call`
    _home: Home | None
    _backend: Backend
    _exchange: Exchange
    _ways: dict[tuple[int, int, int | None], str]

    def __repr__(self) -> str:
        if "combiner" not in self.__dict__:
            return f"{type(self).__name__}(not made)"
        dims = dims_in_words(self.head_dim, self.value_dim, self.shared_kv)
        return (
            f"{type(self).__name__}({self.sequences} sequences, {sum(self.lengths)} of {self.capacity} tokens, "
            f"{self.kv_heads} KV heads x {dims}, {self.dtype}; {self.ranks} ranks, pages of {self.page_size}, "
            f"{self.backend}; {'closed' if self._home is None else 'open'})"
        )

    @property
    def dims(self) -> tuple[int, ...]:
        """Elements of a row of each array that is held: of a key and of a value, with shared_kv of a key alone."""
        return (self.head_dim,) if self.shared_kv else (self.head_dim, self.value_dim)

    @property
    def backend(self) -> str:
        """Name of the back end."""
        return self._backend.name

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's pool of pages and of the buffers kept for partial results; 0 if the cache is closed."""
        if self._home is None:
            return 0
        return sum(pool.nbytes for pool in self.storage.pools) + self.combiner.kept.nbytes()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of every sequence."""
        return self.storage.lengths

    @property
    def local_lengths(self) -> tuple[int, ...]:
        """Number of tokens of every sequence on this rank."""
        return tuple(self.storage.ledgers.counts[:, self.rank].tolist())

    def positions(self, sequence: int) -> NDArray[np.int64]:
        """Positions of this rank's tokens of a sequence.

        Parameters
        ----------
        sequence : int
            Number of the sequence, from 0.

        Returns
        -------
        int64 array, (tokens,), increasing

        Raises
        ------
        ArgumentError
            On this rank only: there is no such sequence.
        """
        return self.storage.ledgers[self._number(sequence)].positions(self.rank)

    @property
    def free_pages(self) -> int:
        """Number of pages of this rank that no sequence uses."""
        return self.storage.free_pages

    @property
    def sent(self) -> tuple[int, int]:
        """Totals that decoding with this cache has sent from this rank so far: (bytes, messages)."""
        return self._exchange.sent_bytes, self._exchange.sent_messages

    def table(self, sequence: int) -> NDArray[np.int32]:
        """This rank's block table of a sequence.

        Parameters
        ----------
        sequence : int
            Number of the sequence, from 0.

        Returns
        -------
        int32 array, (pages,)
            The numbers of the sequence's pages in order.  A view: it is not to be written to.

        Raises
        ------
        ArgumentError
            On this rank only: there is no such sequence.
        """
        return self.storage.tables([self._number(sequence)])[0]

    def algorithm(self, nbytes: int, lse_bytes: int, root: int | None = None) -> str:
        """The algorithm with the shortest predicted time on `machine` to combine the ranks' partial results.

        Parameters
        ----------
        nbytes, lse_bytes : int
            Bytes of a rank's partial (out, lse), and of its lse.
        root : int, default None
            The only rank that gets the result; None for all ranks.

        Returns
        -------
        str
            "allreduce" (Tree Attention, Algorithm 3), "butterfly" or "levels", as in `tree_decode`.
        """
        key = nbytes, lse_bytes, root
        if key not in self._ways:
            links = self.machine.inside, self.machine.between
            self._ways[key] = reduction.choose(nbytes, lse_bytes, self.nodes, *links, root, self.machine.combining)
        return self._ways[key]

    def _number(self, sequence: int) -> int:
        return sequence_numbers([sequence], self.sequences)[0]
