"""Tables of relative positions of other libraries: which way round theirs are, as docs/biases.md says."""

import math

import numpy as np
import pytest
from mpi4py import MPI

import mpiattn

HEADS, DIM = 2, 8
rng = np.random.default_rng(0)


def dense(q, k, v, bias, scale):
    """Attention of a bias (heads, queries, keys)."""
    scores = np.einsum("bihd,bjhd->bhij", q, k) * scale + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("bhij,bjhd->bihd", weights / weights.sum(axis=-1, keepdims=True), v)


def test_swins_tables_are_flipped():
    """Swin: entry (q - k + W - 1) of each axis, a row a pair of offsets, a column a head."""
    width = 4
    q, k, v = rng.standard_normal((3, 1, width**2, HEADS, DIM))
    table = rng.standard_normal(((2 * width - 1) ** 2, HEADS))
    at = np.stack(np.meshgrid(np.arange(width), np.arange(width), indexing="ij")).reshape(2, -1)
    offset = at[:, :, None] - at[:, None, :] + width - 1
    bias = table[offset[0] * (2 * width - 1) + offset[1]].transpose(2, 0, 1)
    ours = np.flip(table.reshape(2 * width - 1, 2 * width - 1, HEADS).transpose(2, 0, 1), (1, 2))
    biases = {"relative_bias": ours, "relative_grid": (width, width)}
    out, _ = mpiattn.attention(q, k, v, comm=MPI.COMM_SELF, **biases)
    np.testing.assert_allclose(out, dense(q, k, v, bias, DIM**-0.5), atol=1e-12)


def t5_bucket(distance, buckets, farthest, causal):
    """The bucket of key - query, as T5 numbers them."""
    number = 0
    if not causal:
        buckets //= 2
        number = buckets * (distance > 0)
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return number + distance
    far = exact + int(math.log(distance / exact) / math.log(farthest / exact) * (buckets - exact))
    return number + min(far, buckets - 1)


@pytest.mark.parametrize("causal", [True, False])
def test_t5s_buckets_are_as_ours(causal):
    """T5: the bucket of k - q; a table that repeats the numbers of a bucket, not flipped, with scale=1."""
    tokens, buckets, farthest = 40, 8, 16
    q, k, v = rng.standard_normal((3, 1, tokens, HEADS, DIM))
    embedding = rng.standard_normal((buckets, HEADS))
    number = {d: t5_bucket(d, buckets, farthest, causal) for d in range(-tokens, tokens)}
    bias = np.array([[embedding[number[j - i]] for j in range(tokens)] for i in range(tokens)]).transpose(2, 0, 1)
    if causal:
        bias = np.where(np.tri(tokens, dtype=bool), bias, -np.inf)
    table = np.array([embedding[number[d]] for d in range(-farthest, farthest + 1)]).T
    out, _ = mpiattn.attention(q, k, v, comm=MPI.COMM_SELF, causal=causal, scale=1, relative_bias=table)
    np.testing.assert_allclose(out, dense(q, k, v, bias, 1), atol=1e-12)


def test_natten_s_tables_are_as_ours():
    """NATTEN: entry (k - q + K - 1), of points in the window."""
    tokens, kernel = 9, 3
    q, k, v = rng.standard_normal((3, 1, tokens, HEADS, DIM))
    table = rng.standard_normal((HEADS, 2 * kernel - 1))
    bias = np.full((HEADS, tokens, tokens), -np.inf)
    for i in range(tokens):
        start = min(max(i - kernel // 2, 0), tokens - kernel)
        for j in range(start, start + kernel):
            bias[:, i, j] = table[:, j - i + kernel - 1]
    biases = {"relative_bias": table, "relative_grid": (tokens,)}
    mask = mpiattn.masks.neighborhood((tokens,), kernel)
    out, _ = mpiattn.attention(q, k, v, comm=MPI.COMM_SELF, mask=mask, **biases)
    np.testing.assert_allclose(out, dense(q, k, v, bias, DIM**-0.5), atol=1e-12)


@pytest.mark.parametrize("points, entries", [(4, [0, 1, -2, -1]), (5, [0, 1, 2, -2, -1]), (6, [0, 1, 2, -3, -2, -1])])
def test_the_opposite_point_of_an_even_cyclic_axis_is_behind(points, entries):
    """Both ways are as long: it has the number of -points / 2, and that of +points / 2 is never used."""
    reach = points // 2
    q, k, v = rng.standard_normal((3, 1, points, HEADS, DIM))
    table = rng.standard_normal((1, 2 * reach + 1))
    bias = np.array([[table[0, reach + entries[(j - i) % points]] for j in range(points)] for i in range(points)])
    biases = {"relative_grid": (points,), "relative_cyclic": (True,)}
    out, _ = mpiattn.attention(q, k, v, comm=MPI.COMM_SELF, relative_bias=table, **biases)
    np.testing.assert_allclose(out, dense(q, k, v, bias[None], DIM**-0.5), atol=1e-12)
    if points % 2 == 0:
        table[0, -1] = 1e3
        same, _ = mpiattn.attention(q, k, v, comm=MPI.COMM_SELF, relative_bias=table, **biases)
        np.testing.assert_array_equal(same, out)
