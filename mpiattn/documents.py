"""Where packed documents and padding begin and end, from the arguments of a call.

The result is a tuple of groups (q_cuts, k_cuts), int64 arrays of equal length: document d holds the queries from
q_cuts[d] to q_cuts[d + 1] and the keys from k_cuts[d] to k_cuts[d + 1]; what lies outside is padding.  There is one
group a batch entry, or one for all where they are cut alike.
"""

from collections.abc import Sequence

import numpy as np

from .errors import ArgumentError


def documents(problem, cu_seqlens=None, cu_seqlens_k=None, lengths=None, lengths_k=None):
    """The groups that the arguments of a call mean; None where there is neither documents nor padding.

    cu_seqlens: positions where documents begin, and one past the last one's end, as in FlashAttention; (documents
        + 1,) for all batch entries alike, or a sequence of one such for each.
    lengths: tokens of every batch entry that are not padding, (batch,); padding comes last.
    cu_seqlens_k, lengths_k: the same of the keys, where it differs from that of the queries.
    """
    if cu_seqlens is not None and lengths is not None:
        raise ArgumentError("lengths is given with cu_seqlens; let the last document end where padding begins")
    for name, keys_alone in (("cu_seqlens", cu_seqlens is None and cu_seqlens_k is not None),
                             ("lengths", lengths is None and lengths_k is not None)):
        if keys_alone:
            raise ArgumentError(f"{name}_k is given without {name}")
    if cu_seqlens is None and lengths is None:
        return None
    if cu_seqlens is not None:
        name, cuts, given, given_k = "cu_seqlens", _cuts, cu_seqlens, cu_seqlens_k
    else:
        name, cuts, given, given_k = "lengths", _padding, lengths, lengths_k
    q_cuts = cuts(name, given, problem.batch, problem.seqlen)
    if given_k is None and problem.seqlen != problem.seqlen_k:
        raise ArgumentError(f"{name}_k is not given; it must be where seqlen ({problem.seqlen}) and seqlen_k "
                            f"({problem.seqlen_k}) differ")
    k_cuts = q_cuts if given_k is None else cuts(f"{name}_k", given_k, problem.batch, problem.seqlen_k)
    groups = max(len(q_cuts), len(k_cuts))
    pairs = tuple(zip(_spread(q_cuts, groups), _spread(k_cuts, groups)))
    for q_cut, k_cut in pairs:
        if len(q_cut) != len(k_cut):
            raise ArgumentError(f"{name}_k has {len(k_cut) - 1} documents; it must have {len(q_cut) - 1}, as {name}")
    return pairs


def _spread(cuts, groups):
    return cuts * groups if len(cuts) == 1 else cuts


def _integers(name, values):
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError):      # rows of different lengths where there should be one; a tensor
        array = np.empty(0)                            # that NumPy cannot see
    if array.dtype.kind not in "iu":
        raise ArgumentError(f"{name} is {_brief(values)}; it must hold whole numbers")
    return array.astype(np.int64)


def _padding(name, lengths, batch, tokens):
    ends = _integers(name, lengths)
    if ends.shape != (batch,) or (ends < 0).any() or (ends > tokens).any():
        raise ArgumentError(f"{name} is {_brief(lengths)}; it must be {batch} numbers from 0 to {tokens}")
    return tuple(np.array([0, end]) for end in ends.tolist())


def _cuts(name, cu_seqlens, batch, tokens):
    if not (isinstance(cu_seqlens, Sequence) or getattr(cu_seqlens, "ndim", 0)):
        raise ArgumentError(f"{name} is {_brief(cu_seqlens)}; it must be a sequence of positions")
    nested = len(cu_seqlens) > 0 and np.ndim(cu_seqlens[0]) > 0
    if nested and len(cu_seqlens) != batch:
        raise ArgumentError(f"{name} has {len(cu_seqlens)} entries; it must be one for all, or one for each of {batch}")
    cuts = tuple(_integers(name, entry) for entry in (cu_seqlens if nested else [cu_seqlens]))
    for cut in cuts:
        if cut.ndim != 1 or len(cut) < 2 or cut[0] < 0 or cut[-1] > tokens or (cut[1:] < cut[:-1]).any():
            raise ArgumentError(f"{name} is {_brief(cut)}; it must be two or more positions from 0 to {tokens} that "
                                "never decrease")
    return cuts


def _brief(values):
    text = " ".join(str(values).split())
    return text if len(text) <= 80 else text[:77] + "..."
