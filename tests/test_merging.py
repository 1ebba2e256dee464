"""`mpiattn.merge`: results over disjoint keys together, against the attention over all of them."""

import itertools
import sys

import ml_dtypes
import numpy as np
import pytest
from dense import error, largest

from mpiattn import ArgumentError, merge
from mpiattn.problem.tensors import as_array, as_tensor
from mpiattn.verify import reference

SHAPE = {"q": (2, 7, 4, 8), "k": (2, 30, 2, 8), "v": (2, 30, 2, 6)}
TOLERANCE = {"float64": 1e-13, "float32": 1e-6}


def states(cuts, dtype, wide, seed=0):
    """The attention over the keys between cuts, and that over all of them in float64."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape) for shape in SHAPE.values())

    def over(start, stop):
        out, lse = reference.attention(q, k[:, start:stop], v[:, start:stop])
        return out.astype(dtype), lse.astype(wide)

    return [over(*pair) for pair in itertools.pairwise(cuts)], reference.attention(q, k, v)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        ("float64", "float64"),
        ("float32", "float32"),
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float64"),
    ],
)
@pytest.mark.parametrize("cuts", [[0, 30], [0, 11, 30], [0, 0, 30], [0, 3, 3, 29, 30, 30]])
def test_merged_in_any_order(dtype, wide, cuts):
    parts, (out, lse) = states(cuts, dtype, wide)
    for order in itertools.permutations(parts):
        before = [(array.copy(), sums.copy()) for array, sums in order]
        whole = order[0]
        for part in order[1:]:
            whole = merge(*whole, *part)
        assert whole[0].dtype == dtype and whole[1].dtype == wide
        rounding = len(cuts) * float(ml_dtypes.finfo(dtype).eps) if dtype.endswith("16") else TOLERANCE[dtype]
        assert error(whole[0], out) <= rounding * largest(out) and error(whole[1], lse) <= TOLERANCE[wide] * 5
        assert all((a == b).all() and (c == d).all() for (a, c), (b, d) in zip(before, order))


def test_rows_that_saw_nothing():
    """They change no bit of the other, whatever their out holds; two of them are one."""
    ((out, lse), (out_b, lse_b)), _ = states([0, 9, 30], "float32", "float32")
    lse[0, :, 2], lse_b[1, 1] = -np.inf, -np.inf
    out[0, 2], out_b[1, :, 1] = np.nan, 1e9
    lse[1, 0, 0] = lse_b[1, 0, 0] = -np.inf
    for pair in ((out, lse, out_b, lse_b), (out_b, lse_b, out, lse)):
        whole, total = merge(*pair)
        assert (whole[0, 2] == out_b[0, 2]).all() and (total[0, :, 2] == lse_b[0, :, 2]).all()
        assert (whole[1, 1:, 1] == out[1, 1:, 1]).all() and (total[1, 1, 1:] == lse[1, 1, 1:]).all()
        assert not whole[1, 0, 0].any() and total[1, 0, 0] == -np.inf
        assert np.isfinite(whole).all()


def test_infinity_is_no_key_either():
    """FlashAttention-2 gives a row without keys lse +inf and out 0."""
    ((out, lse), (out_b, lse_b)), _ = states([0, 9, 30], "float32", "float32")
    lse[0, :, 2] = lse_b[1, 1] = lse[1, 0, 0] = lse_b[1, 0, 0] = -np.inf
    plus = [np.where(np.isneginf(each), np.inf, each).astype(each.dtype) for each in (lse, lse_b)]
    expected = merge(out, lse, out_b, lse_b)
    for sums in ((plus[0], plus[1]), (plus[0], lse_b), (lse, plus[1])):
        assert all((a == b).all() for a, b in zip(merge(out, sums[0], out_b, sums[1]), expected))


def test_many_at_once():
    """As one after another, bit for bit; an odd number of arrays is an error."""
    parts, _ = states([0, 3, 3, 11, 29, 30], "bfloat16", "float32")
    one_by_one = [array.astype(np.float32) for array in parts[0]]
    for out, lse in parts[1:]:
        one_by_one = merge(*one_by_one, out.astype(np.float32), lse)
    got = merge(*(array for part in parts for array in part))
    assert (got[0] == one_by_one[0].astype("bfloat16")).all() and (got[1] == one_by_one[1]).all()
    with pytest.raises(ArgumentError, match="5 arrays are to be merged"):
        merge(*parts[0], *parts[1], parts[2][0])
    with pytest.raises(ArgumentError, match="lse of result 3 has shape"):
        merge(*parts[0], *parts[1], parts[2][0], parts[2][1][:, :1])


def test_not_a_number_stays_in_its_row():
    ((out, lse), other), _ = states([0, 9, 30], "float32", "float32")
    out[0, 1, 2, 3] = np.nan
    lse[1, 3, 4] = np.nan
    whole, total = merge(out, lse, *other)
    assert np.argwhere(np.isnan(total)).tolist() == [[1, 3, 4]]
    wrong = np.zeros(out.shape, bool)
    wrong[0, 1, 2, 3] = wrong[1, 4, 3] = True
    assert (np.isnan(whole) == wrong).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_tensors(dtype):
    pytest.importorskip("torch")
    torch = sys.modules["torch"]
    parts, _ = states([0, 11, 30], dtype, "float64" if dtype == "float64" else "float32")
    arrays = [array for part in parts for array in part]
    for got, wanted in zip(merge(*map(as_tensor, arrays)), merge(*arrays), strict=True):
        assert isinstance(got, torch.Tensor) and as_array("got", got).tobytes() == wanted.tobytes()
    with pytest.raises(ArgumentError, match="out_b requires a gradient"):
        merge(*arrays[:2], as_tensor(arrays[2]).requires_grad_(), arrays[3])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"out": np.ones((2, 7, 4))}, "out has shape"),
        ({"out": None}, "the dtype of out is 'None'"),
        ({"lse": np.ones((2, 7, 4), np.float32)}, "lse has shape"),
        ({"lse": np.ones((2, 4, 7), np.int32)}, "of lse is 'int32'"),
        ({"out_b": np.ones((2, 7, 4, 5), np.float32)}, "out_b has shape"),
        ({"lse_b": [1.0]}, "lse_b is a list"),
        ({"out_b": np.ones((2, 7, 4, 6))}, "out_b has dtype float64; it must be float32"),
        ({"lse_b": np.ones((2, 4, 7))}, "lse_b has dtype float64; it must be float32"),
    ],
)
def test_wrong_arguments(change, text):
    (first, second), _ = states([0, 9, 30], "float32", "float32")
    with pytest.raises(ArgumentError, match=text):
        merge(**{**dict(zip(("out", "lse", "out_b", "lse_b"), (*first, *second))), **change})
