"""The reference: dense attention in float64 by its definition, a block of rows at a time.

It shares no code with masks and back ends, and never has more than one block of scores in memory.  Masks of several
intervals are those of `reference_masks`.
"""

from typing import NamedTuple

import numpy as np

from .reference_masks import Both, Window, place_of, shown, span

BLOCK_PAIRS = 2**17  # scores in memory at a time, 1 MB
BLOCK_ROWS = 64  # of a block, where each sees few keys
FAR = 2**62  # further than any two tokens are apart; sums with it fit an int64
OF_DOCUMENTS = ("cu_seqlens", "cu_seqlens_k", "prefixes", "causal_documents")


class Rows(NamedTuple):
    """What queries may see by their documents, an array over the queries each.

    first, last: the keys first <= j < last of the document; none for a token in no document.  diagonal: the key that
    the query is aligned with.  prefix: keys at the beginning of the document.  causal: whether the document is.
    """

    first: np.ndarray
    last: np.ndarray
    diagonal: np.ndarray
    prefix: np.ndarray
    causal: np.ndarray


def _rows(
    positions, lengths, causal=False, cu_seqlens=None, cu_seqlens_k=None, prefix=0, prefixes=None, causal_documents=None
):
    cuts = np.asarray((0, lengths[0]) if cu_seqlens is None else cu_seqlens, np.int64)
    cuts_k = np.asarray(
        (cuts if cu_seqlens is not None else (0, lengths[1])) if cu_seqlens_k is None else cu_seqlens_k, np.int64
    )
    documents = len(cuts) - 1
    document = np.searchsorted(cuts, positions, side="right") - 1  # the last that begins there: others are empty
    inside = (document >= 0) & (document < documents)
    document = document.clip(0, documents - 1)
    first, last = cuts_k[document], cuts_k[document + 1]
    return Rows(
        first,
        np.where(inside, last, first),
        positions + last - cuts[document + 1],
        np.broadcast_to(np.minimum(prefix if prefixes is None else prefixes, lengths[1]), documents)[document],
        np.broadcast_to(causal if causal_documents is None else causal_documents, documents).astype(bool)[document],
    )


def visible_keys(
    positions, keys, lengths, causal=False, window=(None, None), causal_block=None, mask=None, **documents
):
    """Which of the keys at positions `keys` the queries at `positions` see: bool (queries, keys).

    lengths: (seqlen, seqlen_k).  causal_block: causal queries see up to the end of their block of this many keys of the
    document.  mask: of `mpiattn.masks`; it hides pairs besides.
    documents: cu_seqlens, cu_seqlens_k: where documents of queries and of keys begin and end; by default the sequence
    is one document.  Tokens in no document see nothing and are not seen.  prefix: causal queries also see this many
    keys at the beginning of their document.  prefixes, causal_documents: one value per document, instead of prefix and
    causal.
    """
    keys, block = np.asarray(keys), causal_block or 1
    window, mask = _together(window, mask, lengths)
    rows = _rows(np.asarray(positions), lengths, causal, **documents)
    first, last, diagonal, prefix, causal = (array[:, None] for array in rows)
    visible = (first <= keys) & (keys < last)
    visible &= ~causal | (keys < first + prefix) | ((keys - first) // block <= (diagonal - first) // block)
    left, right = window
    if left is not None:
        visible &= keys - diagonal >= -left
    if right is not None:
        visible &= keys - diagonal <= right
    if mask is not None:
        visible &= shown(mask, positions, keys, *lengths)
    return visible


def _together(window, mask, lengths):
    """The window as a part of a mask with places, by which it goes then; both as they are without such a mask."""
    if mask is None or window == (None, None) or place_of(mask, *lengths) is None:
        return window, mask
    return (None, None), Both(Window(*window), mask)


def _bounds(rows, window, block):
    """Keys (begin, end) of every query: it sees none before `begin`, nor any from `end` on."""
    begin, end, block = rows.first, rows.last, min(block, FAR)
    of_block = rows.first + ((rows.diagonal - rows.first) // block + 1) * block
    end = np.where(rows.causal, np.minimum(end, np.maximum(of_block, rows.first + rows.prefix)), end)
    left, right = window
    if left is not None:
        begin = np.maximum(begin, rows.diagonal - min(left, FAR))
    if right is not None:
        end = np.minimum(end, rows.diagonal + min(right, FAR) + 1)
    begin = np.minimum(begin, rows.last)
    return begin, np.maximum(begin, end)


def bounds(positions, batch, lengths, causal=False, window=(None, None), causal_block=None, mask=None, **documents):
    """Keys (begin, end) of every query: it sees none before `begin`, nor any from `end` on; int64 (2, batch, queries).

    Arguments as for `attention`.
    """
    window, mask = _together(window, mask, lengths)
    limits = np.stack(
        [_bounds(_of_entry(positions, lengths, causal, documents, b), window, causal_block or 1) for b in range(batch)],
        axis=1,
    )
    if mask is not None:
        begin, end = span(mask, positions, *lengths)
        np.maximum(limits[0], begin, out=limits[0])
        np.maximum(np.minimum(limits[1], end), limits[0], out=limits[1])
    return limits


def blind(positions, batch, lengths, mask=None, window=(None, None), **masks):
    """Which queries see no key: bool (batch, queries).  Arguments as for `attention`."""
    window, mask = _together(window, mask, lengths)
    masks["window"] = window
    begin, end = bounds(positions, batch, lengths, mask=mask, **masks)
    none = begin >= end
    for b in range(batch if mask is not None else 0):
        start = 0
        while start < len(positions):
            rows, seen = _block(start, begin[b], end[b])
            keys = np.arange(seen.start, seen.stop)
            inside = (begin[b, rows, None] <= keys) & (keys < end[b, rows, None])
            none[b, rows] = ~(inside & shown(mask, positions[rows], keys, *lengths)).any(axis=1)
            start = rows.stop
    return none


def padding(positions, batch, cu_seqlens=None):
    """Number of a batch's tokens at some positions that are in no document.  cu_seqlens: as for `attention`."""
    if cu_seqlens is None:
        return 0
    of_entries = [cu_seqlens[b] if np.ndim(cu_seqlens[0]) else cu_seqlens for b in range(batch)]
    return sum(int(((positions < cuts[0]) | (positions >= cuts[-1])).sum()) for cuts in of_entries)


def _of_entry(positions, lengths, causal, documents, b):
    """`Rows` of a batch entry."""
    of_entry = {
        name: value[b] if name in OF_DOCUMENTS and value is not None and np.ndim(value[0]) else value
        for name, value in documents.items()
    }
    return _rows(positions, lengths, causal, **of_entry)


def _blocks(
    q,
    k,
    scale=None,
    softcap=None,
    positions=None,
    keys=None,
    lengths=None,
    mask=None,
    biases=None,
    window=(None, None),
    **masks,
):
    """For every batch entry, head and block of rows that sees any key, yields
    (place, pairs, scores, hidden, derivative of the softcap or None, factors of the weights or None).

    place: (b, rows, h, kv head, slice of the keys).  pairs: (b, h, positions of the queries, positions of the keys).
    hidden: the pairs that are not visible, whose score is -inf.  The scores are the caller's.
    """
    batch, queries, heads, dim = q.shape
    positions = np.arange(queries) if positions is None else positions
    keys = np.arange(k.shape[1]) if keys is None else keys
    lengths = (queries, k.shape[1]) if lengths is None else lengths
    scale = dim**-0.5 if scale is None else scale
    masks["window"], mask = _together(window, mask, lengths)

    for b, of_entry in enumerate(bounds(positions, batch, lengths, mask=mask, **masks).swapaxes(0, 1)):
        begin, end = (np.searchsorted(keys, side) for side in of_entry)
        start = 0
        while start < queries:
            rows, seen = _block(start, begin, end)
            start = rows.stop
            numbers = np.arange(seen.start, seen.stop)
            hidden = (numbers < begin[rows, None]) | (numbers >= end[rows, None])
            if mask is not None:
                hidden |= ~shown(mask, positions[rows], keys[seen], *lengths)
            for h in range(heads if len(numbers) else 0):
                kv, slope = h // (heads // k.shape[2]), None
                score = (q[b, rows, h].astype(np.float64) * scale) @ k[b, seen, kv].astype(np.float64).T
                if softcap is not None:
                    bent = np.tanh(score / softcap)
                    score, slope = softcap * bent, 1 - bent**2
                pairs, kept = (b, h, positions[rows], keys[seen]), None
                if biases is not None:
                    score += biases.scores(*pairs)
                    kept = biases.kept(*pairs)
                np.copyto(score, -np.inf, where=hidden)
                yield (b, rows, h, kv, seen), pairs, score, hidden, slope, kept


def _block(start, begin, end):
    """The next rows and the keys that some of them see, as slices: so few rows that each sees most of the keys."""
    rows = slice(start, start + max(BLOCK_ROWS, (end[start] - begin[start]) // 4))
    seen = _span(begin[rows], end[rows])
    rows = slice(start, min(rows.stop, len(begin), start + max(1, BLOCK_PAIRS // max(1, seen.stop - seen.start))))
    return rows, _span(begin[rows], end[rows])


def _span(begin, end):
    """The slice of keys that holds all [begin, end)."""
    some = begin < end
    return slice(int(begin[some].min()), int(end[some].max())) if some.any() else slice(0, 0)


def _product(weight, matrix, hidden):
    """weight @ matrix; hidden pairs have weight 0, and contribute 0 even where the matrix is NaN or infinite."""
    if np.isfinite(matrix).all():
        return weight @ matrix
    finite = np.isfinite(matrix).all(axis=1)
    out = weight @ np.where(finite[:, None], matrix, 0)
    for row in np.flatnonzero(~finite):
        seen = ~hidden[:, row]
        out[seen] += weight[seen, row, None] * matrix[row]
    return out


def attention(q, k, v, causal=False, scale=None, *, sinks=None, **masks):
    """out (batch, seqlen, heads, value_dim) and lse (batch, heads, seqlen), float64.

    q (batch, seqlen, heads, head_dim), k and v (batch, seqlen_k, kv_heads, ...).  causal, masks: as for `visible_keys`,
    relative to a diagonal that is aligned bottom-right in every document; arguments of documents have one dimension for
    all batch entries, or a row per entry.  Also, by name:
    softcap: scores s become softcap * tanh(s / softcap).
    positions, keys, lengths: if q, or k and v, are a selection of the sequence: the positions of the queries, the
    increasing ones of the keys, and the whole (seqlen, seqlen_k).  A row that sees no key gives out 0 and lse -inf.
    sinks: (heads,) an additional score for every query of a head, with value 0.
    biases: a `reference_biases.PairRules`, or None: what is added to scores after the softcap, and the dropout.
    """
    out = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    with np.errstate(all="ignore"):
        for (b, rows, h, kv, seen), _, score, hidden, _, kept in _blocks(q, k, scale, causal=causal, **masks):
            top = score.max(axis=1)
            base = np.where(top == -np.inf, 0, top)
            score -= base[:, None]
            weight = np.exp(score, out=score)
            total = weight.sum(axis=1)
            if kept is not None:
                weight *= kept
            product = _product(weight, v[b, seen, kv].astype(np.float64), hidden)
            out[b, rows, h] = product / np.where(total == 0, 1, total)[:, None]
            lse[b, h, rows] = base + np.log(total)
    if sinks is not None:
        score = np.broadcast_to(np.asarray(sinks, np.float64)[:, None], lse.shape)
        out, lse = merge(out, lse, np.zeros(out.shape), score)
    return out, lse


def backward(dout, q, k, v, causal=False, scale=None, *, dlse=None, sinks=None, sums=(), **masks):
    """dq, dk, dv of sum(dout * out) + sum(dlse * lse), float64, shapes of q, k, v; arguments as for `attention`.

    With sinks also dsinks, (heads,).  sums: as for `gradients`.
    """
    out, lse = attention(q, k, v, causal, scale, sinks=sinks, **masks)
    counted = np.where(out.any(axis=3, keepdims=True), dout, 0)  # rows that see no key ignore dout, even NaN
    delta = np.einsum("bqhd,bqhd->bhq", counted.astype(np.float64), out) - (0 if dlse is None else dlse)
    grads = gradients(dout, q, k, v, lse, delta, causal=causal, scale=scale, sums=sums, **masks)
    if sinks is None:
        return grads
    score = np.asarray(sinks, np.float64)[:, None]
    weight = np.where(score == -np.inf, 0, np.exp(score - np.where(lse == -np.inf, 0, lse)))
    return *grads, -(weight * delta).sum(axis=(0, 2))


def gradients(dout, q, k, v, lse, delta, *, scale=None, of="qkv", sums=(), **masks):
    """The contributions of these queries and keys to dq, dk and dv, float64; other arguments as for `attention`.

    lse and delta = rowsum(dout * out) - dlse, (batch, heads, seqlen): of these queries over all their keys.
    of: "q" for dq alone, "kv" for dk and dv; the others are None.
    sums: `reference_biases.Sums` that are called with what each pair gives to its bias.
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    dq = np.zeros(q.shape) if "q" in of else None
    dk, dv = (np.zeros(array.shape) if "kv" in of else None for array in (k, v))
    with np.errstate(all="ignore"):
        for (b, rows, h, kv, seen), pairs, score, hidden, slope, kept in _blocks(q, k, scale, **masks):
            row = lse[b, h, rows, None]
            score -= np.where(row == -np.inf, 0, row)
            weight = np.exp(score, out=score)
            grad, of_values, of_keys, queries = (
                array.astype(np.float64) for array in (dout[b, rows, h], v[b, seen, kv], k[b, seen, kv], q[b, rows, h])
            )
            dscore = grad @ of_values.T
            if kept is not None:
                dscore *= kept
            dscore -= delta[b, h, rows, None]
            dscore *= weight
            for add in sums:
                add(*pairs, *(np.where(hidden, 0, array) for array in (dscore, weight)))
            if slope is not None:
                dscore *= slope
            if kept is not None:
                weight *= kept
            for array in (weight, dscore):  # NaN where a row's numbers or a hidden key's are
                np.copyto(array, 0, where=hidden)
            if dq is not None:
                dq[b, rows, h] = _product(dscore, of_keys * scale, hidden)
            if dk is not None:
                dk[b, seen, kv] += _product(dscore.T, queries * scale, hidden.T)
                dv[b, seen, kv] += _product(weight.T, grad, hidden.T)
    return dq, dk, dv


def merge(out, lse, out_b, lse_b):
    """Merge the attention over two disjoint sets of keys, float64; shapes as for `attention`."""
    with np.errstate(all="ignore"):
        total = np.logaddexp(lse, lse_b)
        weight, weight_b = (
            np.where(part == -np.inf, 0, np.exp(part - total)).transpose(0, 2, 1)[..., None] for part in (lse, lse_b)
        )
        return weight * out + weight_b * out_b, total
