"""What a cache says of itself, without a change to it: `DescribedCache`, a base class of `KVCache`."""

from ..schedule import reduction
from .arguments import sequence_numbers


class DescribedCache:
    """What a cache holds, its counters so far, and the algorithm that it chooses."""

    def __repr__(self):
        if "combiner" not in self.__dict__:
            return f"{type(self).__name__}(not made)"
        dims = f"{self.head_dim}" + (f" ({self.value_dim} of values)" if self.value_dim != self.head_dim else "")
        return (f"{type(self).__name__}({self.sequences} sequences, {sum(self.lengths)} of {self.capacity} tokens, "
                f"{self.kv_heads} KV heads x {dims}, {self.dtype}; {self.ranks} ranks, pages of {self.page_size}, "
                f"{self.backend}; {'closed' if self._home is None else 'open'})")

    @property
    def backend(self):
        """Name of the back end."""
        return self._backend.name

    @property
    def nbytes(self):
        """Bytes of this rank's pool of pages and of the buffers kept for partial results; 0 if the cache is closed."""
        if self._home is None:
            return 0
        return sum(pool.nbytes for pool in self.storage.pools) + self.combiner.kept.nbytes()

    @property
    def lengths(self):
        """Number of tokens of every sequence."""
        return self.storage.lengths

    @property
    def local_lengths(self):
        """Number of tokens of every sequence on this rank."""
        return tuple(ledger.length(self.rank) for ledger in self.storage.ledgers)

    def positions(self, sequence):
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
    def free_pages(self):
        """Number of pages of this rank that no sequence uses."""
        return self.storage.free_pages

    @property
    def sent(self):
        """Totals that decoding with this cache has sent from this rank so far: (bytes, messages)."""
        return self._exchange.sent_bytes, self._exchange.sent_messages

    def table(self, sequence):
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
        return self.storage.table(self._number(sequence))

    def way(self, nbytes, lse_bytes, root=None):
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

    def _number(self, sequence):
        return sequence_numbers([sequence], self.sequences)[0]
