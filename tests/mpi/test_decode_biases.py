"""Decoding with biases by distance, against dense attention in float64 of what was appended."""

import numpy as np
import pytest
from runs import BACKENDS, on
from test_agreement import same_error
from test_decode import RINGS, Mirror

from mpiattn import KVCache, masks, tree_decode
from mpiattn.backends.numpy.backend import NumpyBackend
from mpiattn.decode import biases
from mpiattn.errors import KeywordError
from mpiattn.schedule.reduction import ALGORITHMS
from mpiattn.verify.reference_masks import place_of, shown

ALL = (*ALGORITHMS, *RINGS)


def dense(
    q, k, v, slopes=None, table=None, causal=True, window=(None, None), softcap=None, scale=None, sinks=None, mask=None
):
    """out (queries, heads, value_dim) and lse (heads, queries) of one sequence, by the definition."""
    (queries, heads, dim), (tokens, kv_heads, _) = q.shape, k.shape
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    at, keys = np.arange(tokens - queries, tokens)[:, None], np.arange(tokens)[None]
    distance, seen = keys - at, np.ones((queries, tokens), bool)
    seen &= (distance <= 0) | (not causal)
    place = None if mask is None else place_of(mask, tokens, tokens)
    if place is not None:  # of drafts, along their paths
        distance = place(keys) - place(at)
    seen &= True if window[0] is None else distance >= -window[0]
    seen &= True if window[1] is None else distance <= window[1]
    seen &= True if mask is None else shown(mask, at[:, 0], keys[0], tokens, tokens)
    out, lse = np.zeros((queries, heads, v.shape[2])), np.full((heads, queries), -np.inf)
    for h in range(heads):
        score = q[:, h] @ k[:, h * kv_heads // heads].T * (scale or dim**-0.5)
        score = score if softcap is None else softcap * np.tanh(score / softcap)
        if slopes is not None:
            score = score - float(slopes[h]) * abs(distance)
        if table is not None:
            of_head = table[h if len(table) > 1 else 0].astype(np.float64)
            reach = len(of_head) // 2
            score = score + of_head[reach + np.minimum(np.maximum(distance, -reach), reach)]
        weight = np.exp(np.where(seen, score, -np.inf))
        total = weight.sum(axis=1) + (0 if sinks is None else np.exp(float(sinks[h])))
        lse[h] = np.log(total, where=total > 0, out=np.full(queries, -np.inf))
        out[:, h] = weight @ v[:, h * kv_heads // heads] / np.where(total > 0, total, 1)[:, None]
    return out, lse


class Biased(Mirror):
    """A `Mirror` whose dense attention has biases by distance."""

    def expected(self, q, alibi_slopes=None, relative_bias=None, sequences=None, **how):
        whole = [self.whole[sequence] for sequence in sequences or range(len(self.whole))]
        parts = [dense(of_q, *kv, alibi_slopes, relative_bias, **how) for of_q, kv in zip(q, whole)]
        return tuple(map(np.array, zip(*parts)))


def drawn(mirror, heads, reach, own=True):
    """Slopes and a table, in which one distance is hidden."""
    dtype, rng = mirror.cache.partial_dtype, np.random.default_rng(reach)
    table = rng.standard_normal((heads if own else 1, 2 * reach + 1))
    table[-1, reach // 2] = -np.inf
    return {"alibi_slopes": (2.0 ** -np.arange(1, heads + 1)).astype(dtype), "relative_bias": table.astype(dtype)}


@pytest.mark.draw(1)
@on(1, 3, 4)
@pytest.mark.parametrize("dtype, page_size, piece", [("float32", 3, None), ("bfloat16", 1, 60), ("float64", 16, 300)])
def test_against_dense(group, dtype, page_size, piece, monkeypatch):
    """Ragged sequences that were placed and dealt; several queries of grouped heads.  piece: numbers of a launch."""
    if piece:
        monkeypatch.setattr(biases, "PIECE", piece)
        monkeypatch.setattr(biases, "LEAST", 2)
    for backend in BACKENDS:
        options = {"sequences": 3, "capacity": 400, "page_size": page_size, "dtype": dtype, "backend": backend}
        mirror = Biased(group, 2, 8, 5, **options)
        mirror.append(19, counts=[19, 0, 4])
        mirror.append(30, "zigzag", counts=[30, 2, 0])
        mirror.append(7, "any", sequences=[0])
        mirror.append(9, counts=[9, 1, 5])
        both = drawn(mirror, 4, 6)
        slopes, table = ({name: argument} for name, argument in both.items())
        sinks = np.linspace(-1, 1, 4).astype(mirror.cache.partial_dtype)
        mirror.check(1, algorithms=ALL, **slopes)
        mirror.check(3, algorithms=ALL, **both)
        mirror.check(4, algorithms=("butterfly", "qring"), causal=False, softcap=2.0, sinks=sinks, **slopes)
        mirror.check(5, algorithms=("allreduce", "ring"), window=(6, 1), causal=False, **table)
        mirror.check(2, algorithms=("auto",), sequences=[2, 0], **both)
        mirror.check(2, algorithms=("auto",), **drawn(mirror, 4, 40, own=False))
        mirror.cache.free([1])
        mirror.whole[1] = tuple(array[:0] for array in mirror.whole[1])
        mirror.check(12, algorithms=("levels", "ring", "qring"), **both)
        mirror.cache.close()


@on(3)
def test_masks_and_one_array_for_keys_and_values(group, monkeypatch):
    monkeypatch.setattr(biases, "PIECE", 100)
    mirror = Biased(group, 1, 12, 8, sequences=2, capacity=200, page_size=4, shared_kv=True, dtype="float16")
    mirror.append(40, counts=[40, 11])
    for mask in (masks.tree([-1, 0, 0, 2, -1]), masks.global_tokens(2) | masks.window(6, 0)):
        mirror.check(5, mask=mask, **drawn(mirror, 2, 9))
    mirror.cache.close()


@on(2)
def test_what_a_launch_has_is_bounded(group, monkeypatch):
    """Its bias has the keys that a window shows, and no more numbers than a piece; small sequences go together."""
    monkeypatch.setattr(biases, "PIECE", 1024)
    shapes, attend = [], NumpyBackend.attend_pages

    def watched(backend, block, *arrays, **how):
        shapes.append((len(block.pages), *block.bias.shape))
        return attend(backend, block, *arrays, **how)

    monkeypatch.setattr(NumpyBackend, "attend_pages", watched)
    mirror = Biased(group, 1, 4, sequences=3, capacity=5000, page_size=16, backend="numpy")
    mirror.append(4000, "contiguous", counts=[4000, 100, 120])
    for how, least, launches in (({}, 2 * 2000, 4 + 1), ({"window": (40, 0)}, 0, 1)):
        shapes.clear()
        mirror.check(1, algorithms=("auto",), **drawn(mirror, 2, 3), **how)
        numbers = [rows * heads * columns for _, rows, heads, columns in shapes]
        assert max(numbers, default=0) <= 1024 and sum(numbers) >= least and len(shapes) <= launches, shapes
        assert not how or max(columns for *_, columns in shapes) <= 41 + 15
    assert max(tables for tables, *_ in shapes) > 1
    mirror.cache.close()


@on(3)
def test_errors(group, monkeypatch):
    odd = group.rank == 1
    with KVCache(group, capacity=12, kv_heads=2, head_dim=4, dtype="float16", backend="numpy") as cache:
        cache.append(*np.zeros((2, 1, 9, 2, 4), np.float16))
        q = np.zeros((1, 1, 4, 4), np.float16)
        slopes, table = np.ones(4, np.float32), np.zeros((1, 5), np.float32)

        def text(decode=tree_decode, **how):
            return same_error(group, lambda: decode(q, cache, **how))

        for decode in (tree_decode, *RINGS.values()):
            message = text(decode, alibi_slopes=slopes + odd)
            assert message.startswith("alibi_slopes[0] is 1.0 on rank 0 but 2.0 on rank 1; it must be the same")
        assert text(alibi_slopes=slopes if odd else None).startswith("alibi_slopes is left out on rank 0 but array")
        assert text(relative_bias=table - odd).startswith("relative_bias[0, 0] is 0.0 on rank 0 but -1.0 on rank 1")
        assert text(alibi_slopes=slopes.astype("float16")).startswith(
            "alibi_slopes has dtype float16; it must be float32"
        )
        assert text(alibi_slopes=slopes[:3]).startswith("alibi_slopes has shape (3,); it must be (heads,)")
        assert text(relative_bias=table[0]).startswith("relative_bias has shape (5,); it must be (1 or heads, 2 R + 1)")
        assert "its lengths after the heads must be odd" in text(relative_bias=table[:, :4])
        with pytest.raises(KeywordError, match="relative_grid is not an argument of tree_decode") as raised:
            tree_decode(q, cache, relative_bias=table[:, None], relative_grid=(3, 3))
        assert len(set(group.allgather(str(raised.value)))) == 1
        monkeypatch.setattr(NumpyBackend, "takes", ())
        message = text(alibi_slopes=slopes)
        assert message == "alibi_slopes is given; the back end numpy computes without biases", message
