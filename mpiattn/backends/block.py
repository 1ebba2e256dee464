"""What a block of attention is, as one record: the engine makes it, and hands it unchanged to a back end.

An optional input more is a field of `BlockInputs`, None where a block has none.
A back end computes with the fields that its `takes` names: tests/test_block_inputs.py holds it to that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from ..problem.problem import Problem

# In annotations.  An array is of NumPy or CuPy or, where a caller gives it, of any library whose arrays the back end
# takes, such as a torch tensor.  These have no type in common, so type checkers accept anything.
Array: TypeAlias = Any


class Dropout(NamedTuple):
    """Which weights of a block are dropped: a pure function of positions, so that no mesh and no back end changes it.

    The word of a pair is number `key % 4` of the four that Philox4x32-10 makes of the counter (key // 4, row, head, 0)
    and the two halves of the seed, low half first; row and key are positions.  A weight is dropped where its word is
    below `threshold`; all others are divided by the probability to be kept, 1 - threshold / 2^32.  lse does not change.

    threshold: from 1 to 2^32 - 1.
    seed: from 0 to 2^64 - 1.
    rows, keys: int32 (tokens,) and (keys,), positions in the sequence.
    heads: int32 (heads,), number of each head of the block among those of all batch entries of the problem.
    """

    threshold: int
    seed: int
    rows: Array
    keys: Array
    heads: Array

    @property
    def kept(self) -> float:
        """The probability that a weight is kept."""
        return 1 - self.threshold / 2**32


class BlockInputs(NamedTuple):
    """The inputs of a block, in a chunk of keys or in pages of a pool of them.

    q: (tokens, heads, head_dim).
    k, v: (keys, kv_heads, head_dim) and (keys, kv_heads, value_dim), of q's dtype; v is None where values are the first
        value_dim numbers of the keys.  In pages: pools (kv_heads, slots, head_dim) and (kv_heads, slots, value_dim).
    begin, end: int32 (groups, tokens).  Row i sees the keys [begin[g, i], end[g, i]).  The heads are split into
        `groups` equal groups; g is the group of the head.  Back ends that `takes_lists` also take (groups, tokens,
        lists): the row sees the disjoint intervals [begin[g, i, n], end[g, i, n]) of each list n.  In pages: NumPy's
        int32 (tokens,), keys of the sequence.
    scale: of the scores q . k.
    softcap: scores s become softcap * tanh(s / softcap); None for none.
    pages: None for a chunk.  Else NumPy's int32, the numbers of a sequence's pages in order, or a list of such tables,
        one a sequence; q then holds the queries of each sequence in turn, the same number for each.
    page_size: the consecutive slots of a page; None for a chunk.
    bias: (sequences, heads of a sequence, tokens, keys), of q's dtype or that of partials, or None.  Every axis but
        the last may have the length 1 instead, and is the same for all then.  The bias is added to the scores after
        scale and softcap; -inf gives a pair the weight 0.  The numbers of a row lie one after another; all other
        strides are any multiples of the itemsize, negative ones too.
        In pages: contiguous (tokens, heads, most), of the dtype of partials; column j is key j of the row's sequence,
        of which no sequence has more than `most`.
    dropout: a `Dropout` or None; None in pages.
    """

    q: Array
    k: Array
    v: Array | None
    begin: Array
    end: Array
    scale: float
    softcap: float | None = None
    pages: Array | list[Array] | None = None
    page_size: int | None = None
    bias: Array | None = None
    dropout: Dropout | None = None

    @classmethod
    def of(
        cls, problem: Problem, q: Array, kv: tuple[Array, ...], begin: Array, end: Array, **others: Any
    ) -> BlockInputs:
        """Those of a problem.  kv: (k, v), or (k,) where keys hold the values.  others: what not every block has."""
        k, v = kv if len(kv) == 2 else (*kv, None)
        return cls(q, k, v, begin, end, problem.scale, problem.softcap, **others)


class BackwardInputs(NamedTuple):
    """What a backward pass has of a block's rows besides their inputs.

    dout: (tokens, heads, value_dim), of q's dtype.
    lse: (tokens, heads), over all keys of the row, not of this block alone.
    delta: (tokens, heads), from `Backend.delta`.
    """

    dout: Array
    lse: Array
    delta: Array


class Gradients(NamedTuple):
    """The sums to which a backward pass adds, of the dtype of partials and the shapes of q, k and v.

    dv: None where v is; dk takes both gradients then.
    dbias: (sequences, heads of a sequence, tokens, keys), of the dtype of partials, with any strides as of a bias, or
        None.  An axis of length 1 gets the sum along it, added up in the same order in every run; the bias need not
        have the length 1 there.
    """

    dq: Array
    dk: Array
    dv: Array | None = None
    dbias: Array | None = None
