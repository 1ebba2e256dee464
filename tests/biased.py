"""Dense attention with biases and dropout in float64, by its definition: the oracle of calls that have them."""

import random
from typing import NamedTuple

import numpy as np
from dense import separate

from mpiattn.backends.numpy.dropout import philox
from mpiattn.schedule.tile import DIVISIONS
from mpiattn.verify import reference
from mpiattn.verify.reference_masks import place_of

# Kinds of which no rank needs a tile
WITHOUT_TILES = [
    "key_bias",
    "alibi",
    "relative",
    "grid",
    "dropout",
    "key_bias relative",
    "key_bias alibi dropout",
    "alibi grid dropout",
]


class Drawn(NamedTuple):
    """Biases of a whole problem by argument, and the dropout."""

    bias: np.ndarray | None = None  # (batch or 1, heads or 1, seqlen, seqlen_k)
    key_bias: np.ndarray | None = None  # of whole keys
    alibi_slopes: np.ndarray | None = None
    relative_bias: np.ndarray | None = None
    relative_grid: tuple | None = None
    relative_cyclic: tuple | None = None
    dropout: float = 0.0
    seed: int | None = None

    @property
    def given(self):
        return [name for name in self._fields[:4] if getattr(self, name) is not None]


def draw(problem, seed, kinds=None, narrow=False, tile=None):
    """Random biases of a problem: some of the kinds, or those named.  tile: of a plan; with pieces none is dense."""
    p, rng, numbers = problem, random.Random(seed), np.random.default_rng(seed)
    if tile in DIVISIONS:
        kinds = kinds or rng.choice(WITHOUT_TILES)
    kinds = kinds or rng.choice(
        ["bias", "bias", "bias", "key_bias", "alibi", "relative", "grid", "dropout", "bias key_bias", "alibi relative"]
        + ["bias alibi dropout", "key_bias relative", "bias key_bias alibi relative dropout"]
    )
    partial, some = p.partial_dtype, {}
    heads = rng.choice([1, p.heads])

    def normal(*shape):
        return numbers.standard_normal(shape)

    for kind in kinds.split():
        if kind == "bias":
            bias = normal(rng.choice([1, p.batch]), rng.choice([1, p.heads]), p.seqlen, p.seqlen_k)
            bias[numbers.random(bias.shape) < rng.choice([0, 0, 0.2])] = -np.inf
            some["bias"] = bias.astype(p.dtype if narrow else partial)
        elif kind == "key_bias":
            shape = rng.choice([(), (p.heads,), (1,), (p.batch, p.heads), (p.batch, 1), (1, p.heads)])
            some["key_bias"] = normal(*shape, p.seqlen_k).astype(partial)
        elif kind == "alibi":
            some["alibi_slopes"] = (2.0 ** -np.arange(1, p.heads + 1)).astype(partial)
        elif kind == "relative":
            some["relative_bias"] = normal(heads, 2 * rng.choice([0, 2, 9, 200]) + 1).astype(partial)
        elif kind == "grid":
            if p.seqlen != p.seqlen_k or not p.seqlen or p.places is not None:
                continue
            width = max(n for n in range(1, 9) if p.seqlen % n == 0)
            some["relative_grid"] = p.seqlen // width, width
            some["relative_cyclic"] = rng.choice([None, (False, True), (True, True)])
            some["relative_bias"] = normal(heads, 2 * rng.choice([0, 1, 3]) + 1, 2 * rng.choice([1, 4]) + 1).astype(
                partial
            )
        else:
            some |= {"dropout": rng.choice([0.1, 0.5, 0.9]), "seed": rng.randrange(2**64)}
    return Drawn(**some)


def _distances(problem):
    """How far each key is from each query, by the places of a mask that has some: (seqlen, seqlen_k)."""
    p = problem
    keys, diagonal = np.arange(p.seqlen_k), np.arange(p.seqlen) + p.seqlen_k - p.seqlen
    place = None if p.mask is None else place_of(p.mask, p.seqlen, p.seqlen_k)
    if place is not None:
        keys, diagonal = place(keys), place(diagonal)
    return keys - diagonal[:, None]


def _offsets(problem, drawn):
    """Index in the flat table of every pair: (seqlen, seqlen_k)."""
    p, table = problem, drawn.relative_bias
    if drawn.relative_grid is None:
        reach = table.shape[1] // 2
        return np.clip(_distances(p), -reach, reach) + reach
    index = np.zeros((p.seqlen, p.seqlen), np.int64)
    places = np.array(list(np.ndindex(*drawn.relative_grid)))
    for axis, points in enumerate(drawn.relative_grid):
        count = table.shape[1 + axis]
        offset = places[None, :, axis] - places[:, None, axis]
        if drawn.relative_cyclic and drawn.relative_cyclic[axis]:
            offset = (offset + points // 2) % points - points // 2
        index = index * count + np.clip(offset, -(count // 2), count // 2) + count // 2
    return index


def whole(problem, drawn):
    """The sum of the biases of every pair: (batch, heads, seqlen, seqlen_k)."""
    p = problem
    bias = np.zeros((p.batch, p.heads, p.seqlen, p.seqlen_k))
    if drawn.bias is not None:
        bias += drawn.bias.astype(np.float64)
    if drawn.key_bias is not None:
        of_keys = drawn.key_bias.astype(np.float64)
        bias += of_keys.reshape((1,) * (3 - of_keys.ndim) + of_keys.shape)[:, :, None]
    if drawn.alibi_slopes is not None:
        bias -= drawn.alibi_slopes.astype(np.float64)[:, None, None] * np.abs(_distances(p))
    if drawn.relative_bias is not None:
        table = drawn.relative_bias.astype(np.float64)
        bias += table.reshape(len(table), -1)[:, _offsets(p, drawn)]
    return bias


def kept(problem, drawn):
    """What the weights of every pair are multiplied by: (batch, heads, seqlen, seqlen_k)."""
    p, shape = problem, (problem.batch, problem.heads, problem.seqlen, problem.seqlen_k)
    if not drawn.dropout:
        return np.ones(shape)
    b, h, i, j = (each.astype(np.uint32) for each in np.indices(shape))
    four = philox((j // 4, i, b * np.uint32(p.heads) + h, np.zeros(shape, np.uint32)), drawn.seed)
    threshold = round(drawn.dropout * 2**32)
    return (np.choose(j % 4, four) >= threshold) / (1 - threshold / 2**32)


def expected(problem, inputs, drawn, **options):
    """(out, lse, dq, dk, dv, dsinks, gradients of biases by argument, sizes of all gradients); of a whole problem.

    A size is the largest sum of the magnitudes of a gradient's terms, to which rounding errors are relative.  A
    score's gradient is a difference of two terms: they cancel, but for rounding, where a query sees one key.
    options: of `dense.masks`.
    """
    p = problem
    arrays = separate(inputs)
    q, k, v, dout, dlse, sinks = (None if a is None else a.astype(np.float64) for a in arrays)
    per_kv = p.heads // p.kv_heads
    k_of, v_of = (np.repeat(array, per_kv, axis=2) for array in (k, v))
    visible = np.zeros((p.batch, 1, p.seqlen, p.seqlen_k), bool)
    seeing = {name: value for name, value in options.items() if name not in ("scale", "softcap")}
    for b in range(p.batch):
        of_entry = {
            name: value[b] if name in reference.OF_DOCUMENTS and np.ndim(value[0]) else value
            for name, value in seeing.items()
        }
        visible[b, 0] = reference.visible_keys(
            np.arange(p.seqlen), np.arange(p.seqlen_k), (p.seqlen, p.seqlen_k), **of_entry
        )
    raw = p.scale * np.einsum("bihd,bjhd->bhij", q, k_of)
    bent = np.tanh(raw / p.softcap) if p.softcap else raw
    score = (p.softcap * bent if p.softcap else raw) + whole(p, drawn)
    score = np.where(visible, score, -np.inf)
    keep = kept(p, drawn)
    with np.errstate(all="ignore"):
        top = score.max(axis=3, keepdims=True, initial=-np.inf)
        sink = np.full((1, p.heads, 1, 1), -np.inf) if sinks is None else sinks[None, :, None, None]
        base = np.maximum(top, sink)
        base = np.where(base == -np.inf, 0, base)
        weight, of_sink = np.exp(score - base), np.exp(sink - base)
        total = weight.sum(axis=3, keepdims=True) + of_sink
        lse = (base + np.log(total))[..., 0]
        weight /= np.where(total == 0, 1, total)
        of_sink = of_sink / np.where(total == 0, 1, total)
    out = np.einsum("bhij,bjhd->bihd", weight * keep, v_of)
    delta = np.einsum("bihd,bihd->bhi", dout, out) - (0 if dlse is None else dlse)
    dweight, delta_of = np.einsum("bihd,bjhd->bhij", dout, v_of) * keep, delta[..., None]
    dscore, of_terms = weight * (dweight - delta_of), weight * (np.abs(dweight) + np.abs(delta_of))
    slope = 1 - bent**2 if p.softcap else 1
    through_softcap, terms = dscore * slope, of_terms * slope

    def of_kv(array):
        return array.reshape(*array.shape[:2], p.kv_heads, per_kv, array.shape[3]).sum(axis=3)

    dq = p.scale * np.einsum("bhij,bjhd->bihd", through_softcap, k_of)
    dk = of_kv(p.scale * np.einsum("bhij,bihd->bjhd", through_softcap, q))
    dv = of_kv(np.einsum("bhij,bihd->bjhd", weight * keep, dout))
    if inputs.v is None:
        dk[..., : p.value_dim] += dv
        dv = None
    dsinks = None if sinks is None else -(of_sink[..., 0] * delta).sum(axis=(0, 2))
    sizes = {f"d{name}": np.abs(of).max(initial=0) for name, of in _gradients(p, drawn, of_terms).items()}
    sizes["dq"] = p.scale * np.einsum("bhij,bjhd->bihd", terms, np.abs(k_of)).max(initial=0)
    sizes["dk"] = p.scale * np.einsum("bhij,bihd->bjhd", terms, np.abs(q)).max(initial=0)
    return out, lse, dq, dk, dv, dsinks, _gradients(p, drawn, dscore), sizes


def _gradients(p, drawn, dscore):
    gradients = {}
    if drawn.bias is not None:
        shared = tuple(axis for axis in (0, 1) if drawn.bias.shape[axis] == 1)
        gradients["bias"] = dscore.sum(axis=shared, keepdims=True)
    if drawn.key_bias is not None:
        shape = drawn.key_bias.shape
        full = (1,) * (3 - len(shape)) + shape
        broadcast = tuple(axis for axis in (0, 1) if full[axis] == 1)
        gradients["key_bias"] = dscore.sum(axis=2).sum(axis=broadcast, keepdims=True).reshape(shape)
    if drawn.alibi_slopes is not None:
        gradients["alibi_slopes"] = -(dscore * np.abs(_distances(p))).sum(axis=(0, 2, 3))
    if drawn.relative_bias is not None:
        table, index = drawn.relative_bias, _offsets(p, drawn).ravel()
        sums = np.zeros((len(table), table[0].size))
        for h in range(p.heads):
            np.add.at(sums[min(h, len(table) - 1)], index, dscore[:, h].sum(axis=0).ravel())
        gradients["relative_bias"] = sums.reshape(table.shape)
    return gradients
