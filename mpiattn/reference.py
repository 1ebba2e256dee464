"""The oracle: dense attention in float64, a block of rows at a time, by the definition.

It shares nothing with the back ends, and never holds more than one block of scores.
"""

import numpy as np

BLOCK_PAIRS = 2 ** 17      # scores held at a time, 1 MB


def visible_keys(positions, keys, seqlen, seqlen_k, causal):
    """Which of the keys at positions `keys` the queries at `positions` see: bool (queries, keys)."""
    if not causal:
        return np.ones((len(positions), len(keys)), bool)
    return np.asarray(keys) <= np.asarray(positions)[:, None] + (seqlen_k - seqlen)


def attention(q, k, v, causal=False, scale=None, positions=None, keys=None, lengths=None):
    """out (batch, seqlen, heads, value_dim) and lse (batch, heads, seqlen), float64.

    q (batch, seqlen, heads, head_dim), k and v (batch, seqlen_k, kv_heads, ...).  causal: bottom-right.
    positions, keys, lengths: where q or k and v are a selection of the sequence, which queries and which keys
    they are, and how many (seqlen, seqlen_k) there are in all.  A row that sees nothing gives 0 and -inf.
    """
    batch, rows, heads, dim = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    positions = np.arange(rows) if positions is None else positions
    keys = np.arange(seqlen_k) if keys is None else keys
    lengths = (rows, seqlen_k) if lengths is None else lengths
    scale = dim ** -0.5 if scale is None else scale
    out = np.zeros((batch, rows, heads, v.shape[3]))
    lse = np.full((batch, heads, rows), -np.inf)
    step = max(1, BLOCK_PAIRS // max(seqlen_k, 1))
    with np.errstate(all="ignore"):
        for start in range(0, rows if seqlen_k else 0, step):
            at = slice(start, start + step)
            visible = visible_keys(positions[at], keys, *lengths, causal)
            for b in range(batch):
                for h in range(heads):
                    kv = h // (heads // kv_heads)
                    out[b, at, h], lse[b, h, at] = _rows(
                        q[b, at, h].astype(np.float64), k[b, :, kv].astype(np.float64),
                        v[b, :, kv].astype(np.float64), visible, scale)
    return out, lse


def _rows(q, k, v, visible, scale):
    score = np.where(visible, q @ k.T * scale, -np.inf)
    top = score.max(axis=1)
    base = np.where(top == -np.inf, 0, top)
    weight = np.exp(score - base[:, None])
    total = weight.sum(axis=1)
    finite = np.isfinite(v).all(axis=1)
    out = weight @ np.where(finite[:, None], v, 0)
    for key in np.flatnonzero(~finite):                # 0 * NaN would reach rows that do not see this key
        seen = visible[:, key]
        out[seen] += weight[seen, key, None] * v[key]
    return out / np.where(total == 0, 1, total)[:, None], base + np.log(total)


def merge(out, lse, out_b, lse_b):
    """The attention over two sets of keys from that over each, float64; shapes as of `attention`."""
    with np.errstate(all="ignore"):
        total = np.logaddexp(lse, lse_b)
        weight, weight_b = (np.where(part == -np.inf, 0, np.exp(part - total)).transpose(0, 2, 1)[..., None]
                            for part in (lse, lse_b))
        return weight * out + weight_b * out_b, total
