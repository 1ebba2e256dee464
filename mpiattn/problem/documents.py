"""Packed documents and padding from the arguments of a call: their limits, and the mask of each document.

The result is a tuple of `mpiattn.problem.group.Group`: one per batch entry, or one for all if all entries are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from ..errors import ArgumentError
from ..system.values import as_int64, truth
from ..system.words import number
from .group import Group

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from .mask import IntArray
    from .problem import Problem

PerDocument: TypeAlias = "ArrayLike | None"  # an argument of a call, for all entries or per entry
Pairs: TypeAlias = "tuple[tuple[IntArray, IntArray], ...]"  # (cuts of the queries, cuts of the keys) per group
Part = TypeVar("Part")


def documents(
    problem: Problem,
    cu_seqlens: PerDocument = None,
    cu_seqlens_k: PerDocument = None,
    lengths: PerDocument = None,
    lengths_k: PerDocument = None,
    prefixes: PerDocument = None,
    causal_documents: PerDocument = None,
    padding: bool = False,
) -> tuple[Group, ...] | None:
    """The groups of documents of a call; None without arguments.  Raises ArgumentError.

    cu_seqlens: start of every document and the end of the last, as in FlashAttention: int (documents + 1,) for all
        batch entries, or a sequence of one such array per entry.  The first is 0 and the last the number of tokens,
        unless there is padding.
    padding: whether tokens before the first document and after the last are padding.
    lengths: tokens of every batch entry without padding, int (batch,); padding comes last.
    cu_seqlens_k, lengths_k: the same for the keys, if they differ from the queries'.
    prefixes: number of leading keys of every document that all its queries see in spite of `causal`; replaces the
        plan's prefix.  int (documents,) for all batch entries, or a sequence of one such array per entry.  Without
        cu_seqlens every entry is one document, and the shape is (batch,).
    causal_documents: whether each document is causal, bool in the same shape; replaces the plan's causal.
    """
    if cu_seqlens is not None and lengths is not None:
        raise ArgumentError(
            "lengths and cu_seqlens are both given; give cu_seqlens alone, let the last document end where padding "
            "begins, and say padding=True"
        )
    truth("padding", padding)
    if padding and cu_seqlens is None:
        raise ArgumentError("padding is given without cu_seqlens, of which it says that tokens outside are padding")
    for name, keys_alone in (
        ("cu_seqlens", cu_seqlens is None and cu_seqlens_k is not None),
        ("lengths", lengths is None and lengths_k is not None),
    ):
        if keys_alone:
            raise ArgumentError(f"{name}_k is given without {name}")
    pairs = _pairs(problem, cu_seqlens, cu_seqlens_k, lengths, lengths_k)
    if cu_seqlens is not None and not padding:
        for q_cuts, k_cuts in pairs or ():
            wrong = left_out("cu_seqlens", q_cuts, problem.seqlen)
            wrong = wrong or left_out("cu_seqlens_k", k_cuts, problem.seqlen_k)
            if wrong:
                raise ArgumentError(wrong)
    if pairs is not None and problem.window != (None, None) and problem.places is not None:
        check_diagonals(tuple(Group(*pair) for pair in pairs), problem, f"window, beside mask {problem.mask},")
    if prefixes is None and causal_documents is None:
        return None if pairs is None else tuple(Group(*pair) for pair in pairs)
    if causal_documents is None and not problem.causal:
        raise ArgumentError("prefixes are given, but nothing is causal; make the plan causal or give causal_documents")
    pairs = pairs or ((np.array([0, problem.seqlen]), np.array([0, problem.seqlen_k])),)
    kinds = [
        _of_documents(name, given, pairs, problem.batch, cu_seqlens is not None)
        for name, given in (("prefixes", prefixes), ("causal_documents", causal_documents))
    ]
    groups = max(map(len, (pairs, *kinds)))
    return tuple(
        Group(q_cuts, k_cuts, prefix, causal)
        for (q_cuts, k_cuts), prefix, causal in zip(*(_spread(parts, groups) for parts in (pairs, *kinds)))
    )


def check_diagonals(groups: tuple[Group, ...], problem: Problem, name: str) -> None:
    """Raise ArgumentError unless distances in every document are those in the whole sequence.

    name: of the argument that goes by distances.
    """
    for group in groups:
        cuts = zip(group.q_cuts.tolist(), group.q_cuts[1:].tolist(), group.k_cuts[1:].tolist())
        if any(start < stop and stop_k - stop != problem.seqlen_k - problem.seqlen for start, stop, stop_k in cuts):
            raise ArgumentError(
                f"{name} is given with documents whose queries and keys end at different positions; distances are "
                "known only where each document's queries end with its keys"
            )


def left_out(name: str, cuts: IntArray, tokens: int) -> str:
    """What is wrong with documents that do not hold all tokens, in words; "" if they do."""
    if cuts[0] == 0 and cuts[-1] == tokens:
        return ""
    return (
        f"{name} is {_brief(cuts)}; it must begin with 0 and end with {tokens}, the number of tokens; if the tokens "
        "outside are padding, say padding=True (of a command: --padding)"
    )


def padding_of(groups: tuple[Group, ...] | None, batch: int, seqlen: int, seqlen_k: int) -> tuple[int, int]:
    """Number of tokens that are padding, of queries and of keys, summed over the batch.  groups: of `documents`."""
    if groups is None:
        return 0, 0
    held = [sum(int(cuts[-1] - cuts[0]) for cuts in of_side) for of_side in zip(*(group[:2] for group in groups))]
    entries = batch // len(groups)  # of a group
    return batch * seqlen - entries * held[0], batch * seqlen_k - entries * held[1]


def expected_cuts(problem: Problem, given: PerDocument, name: str = "expected_cu_seqlens") -> tuple[int, ...] | None:
    """The argument of a plan as numbers, of batch entries those with the most work; None without it.

    name: how errors name it.  Raises ArgumentError.
    """
    if given is None:
        return None
    if problem.seqlen != problem.seqlen_k:
        raise ArgumentError(
            f"{name} is given with seqlen {problem.seqlen} and seqlen_k {problem.seqlen_k}; these must be equal"
        )
    rows = _cuts(name, given, problem.batch, problem.seqlen)
    return tuple(max(rows, key=lambda cuts: (np.diff(cuts).astype(float) ** 2).sum()).tolist())


def _pairs(problem: Problem, cu_seqlens: Any, cu_seqlens_k: Any, lengths: Any, lengths_k: Any) -> Pairs | None:
    """(cuts of the queries, cuts of the keys) of every group; None without arguments."""
    if cu_seqlens is None and lengths is None:
        return None
    if cu_seqlens is not None:
        name, cuts, given, given_k = "cu_seqlens", _cuts, cu_seqlens, cu_seqlens_k
    else:
        name, cuts, given, given_k = "lengths", _padding, lengths, lengths_k
    q_cuts = cuts(name, given, problem.batch, problem.seqlen)
    if given_k is None and problem.seqlen != problem.seqlen_k:
        raise ArgumentError(
            f"{name}_k is not given; it must be where seqlen ({problem.seqlen}) and seqlen_k "
            f"({problem.seqlen_k}) differ"
        )
    k_cuts = q_cuts if given_k is None else cuts(f"{name}_k", given_k, problem.batch, problem.seqlen_k)
    groups = max(len(q_cuts), len(k_cuts))
    pairs = tuple(zip(_spread(q_cuts, groups), _spread(k_cuts, groups)))
    for q_cut, k_cut in pairs:
        if len(q_cut) != len(k_cut):
            raise ArgumentError(f"{name}_k has {len(k_cut) - 1} documents; it must have {len(q_cut) - 1}, as {name}")
    return pairs


def _spread(cuts: tuple[Part, ...], groups: int) -> tuple[Part, ...]:
    return cuts * groups if len(cuts) == 1 else cuts


def _of_documents(name: str, given: Any, pairs: Pairs, batch: int, packed: bool) -> tuple[NDArray[Any] | None, ...]:
    """A tuple of arrays (documents,), one for all groups or one per group; (None,) if not given."""
    if given is None:
        return (None,)
    if not (isinstance(given, Sequence) or getattr(given, "ndim", 0) > 0):
        raise ArgumentError(f"{name} is {_brief(given)}; it must be a sequence, of one value for each document")
    if not packed:
        _array(name, given)  # whose elements a list would hide
        given = [[value] for value in given]  # each batch entry is one document
    nested = not packed or (len(given) > 0 and np.ndim(given[0]) > 0)
    if nested and len(given) != batch:
        raise ArgumentError(
            f"{name} has {len(given)} entries; it must have {batch}, one for each of the batch"
            + (", or be alike for all" if packed else "")
        )
    rows = tuple(_array(name, row) for row in (given if nested else [given]))
    for row, (cuts, _) in zip(_spread(rows, len(pairs)), _spread(pairs, len(rows))):
        if row.shape != (len(cuts) - 1,):
            raise ArgumentError(f"{name} is {_brief(row)}; it must have a value for each of {len(cuts) - 1} documents")
        if name == "prefixes" and (row.dtype.kind not in "iu" or row.min() < 0):
            raise ArgumentError(f"{name} is {_brief(row)}; it must hold whole numbers, at least 0")
        if name == "causal_documents" and not np.isin(row, (0, 1)).all():
            raise ArgumentError(f"{name} is {_brief(row)}; it must hold True or False")
    if name == "causal_documents":
        return tuple(row.astype(bool) for row in rows)
    # below 2^62, so that the sum with a document's first key is below 2^63
    return tuple(np.minimum(row, min(np.iinfo(row.dtype).max, 2**62)).astype(np.int64) for row in rows)


def _array(name: str, values: Any) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        device = getattr(values, "device", None)
        if device is not None:
            raise ArgumentError(
                f"{name} is on device {device}; it must be in host memory, as {name}.cpu() of PyTorch and {name}.get() "
                "of CuPy are: a call needs its numbers before anything is computed"
            ) from error
        return np.empty(0)  # rows of different lengths


def _integers(name: str, values: Any) -> NDArray[np.int64]:
    array = _array(name, values)
    if array.dtype.kind not in "iu":
        raise ArgumentError(f"{name} is {_brief(values)}; it must hold whole numbers")
    return as_int64(array)


def _check_no_mask(name: str, given: Any, batch: int, tokens: int) -> None:
    """Raise ArgumentError if lengths are given as a padding mask: of bool or of 0 and 1, with an entry a token."""
    array = _array(name, given)
    if array.dtype == bool or (array.shape == (batch, tokens) and array.size and np.isin(array, (0, 1)).all()):
        raise ArgumentError(
            f"{name} is an array {array.shape} of {array.dtype}, a padding mask; it must be "
            f"{number(batch, 'number')} of tokens: mask.sum(axis=1) of a mask that is True at tokens, "
            "(~mask).sum(axis=1) of one that is True at padding; padding comes last"
        )


def _padding(name: str, given: Any, batch: int, tokens: int) -> tuple[IntArray, ...]:
    _check_no_mask(name, given, batch, tokens)
    ends = _integers(name, given)
    if ends.shape != (batch,) or (ends < 0).any() or (ends > tokens).any():
        raise ArgumentError(
            f"{name} is {_brief(given)}; it must be a sequence of {number(batch, 'number')} from 0 to {tokens}, one "
            "for each entry of the batch"
        )
    return tuple(np.array([0, end]) for end in ends.tolist())


def _cuts(name: str, given: Any, batch: int, tokens: int) -> tuple[IntArray, ...]:
    if not (isinstance(given, Sequence) or getattr(given, "ndim", 0) > 0):
        raise ArgumentError(f"{name} is {_brief(given)}; it must be a sequence of positions")
    nested = len(given) > 0 and np.ndim(given[0]) > 0
    if nested and len(given) != batch:
        raise ArgumentError(f"{name} has {len(given)} entries; it must be one for all, or one for each of {batch}")
    cuts = tuple(_integers(name, entry) for entry in (given if nested else [given]))
    for cut in cuts:
        if cut.ndim != 1 or len(cut) < 2 or cut[0] < 0 or cut[-1] > tokens or (cut[1:] < cut[:-1]).any():
            raise ArgumentError(
                f"{name} is {_brief(cut)}; it must be two or more positions from 0 to {tokens} that never decrease"
            )
    return cuts


def _brief(values: object) -> str:
    text = " ".join(str(values).split())
    return text if len(text) <= 80 else text[:77] + "..."
