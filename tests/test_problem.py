"""The shape of a problem: defaults, bytes, and errors that say what is wrong."""

import numpy as np
import pytest

from mpiattn.errors import ArgumentError, MpiattnError
from mpiattn.problem.byte_counts import byte_count
from mpiattn.problem.problem import Problem

SHAPE = {"seqlen": 10, "heads": 4, "head_dim": 16}


def test_defaults():
    p = Problem(**SHAPE)
    assert (p.batch, p.kv_heads, p.value_dim, p.seqlen_k) == (1, 4, 16, 10)
    assert (p.dtype, p.causal, p.scale) == ("float32", False, 0.25)


@pytest.mark.parametrize("dtype", ["float16", np.float16, np.dtype("float16"), "fp16", "half"])
def test_dtype_by_any_name(dtype):
    p = Problem(**SHAPE, dtype=dtype)
    assert (p.dtype, p.itemsize, p.partial_dtype, p.partial_itemsize) == ("float16", 2, "float32", 4)


@pytest.mark.parametrize("text, count", [("1G", 2**30), ("1.5 GiB", 3 * 2**29), ("800", 800), (np.int64(7), 7)])
def test_bytes_as_text(text, count):
    assert byte_count("max_memory", text) == count


def test_numpy_integers_are_numbers():
    p = Problem(seqlen=np.int64(10), heads=np.int32(4), head_dim=np.uint8(16), scale=np.float32(0.5))
    assert p == Problem(**SHAPE, scale=0.5) and repr(p) == repr(Problem(**SHAPE, scale=0.5))


def test_window_without_end():
    """A side of a window that reaches over all tokens is no limit, however large."""
    plain = Problem(**SHAPE, seqlen_k=7, causal=True)
    for side in (17, 2**62, 2**63 - 1, 10**30):
        for window in ((side, None), (None, side), (side, side)):
            problem = Problem(**SHAPE, seqlen_k=7, causal=True, window=window)
            assert (
                problem.whole_mask.key_interval(np.arange(10))[1] == plain.whole_mask.key_interval(np.arange(10))[1]
            ).all()
            assert problem.pairs == plain.pairs


def test_flops_count_attended_pairs():
    assert Problem(**SHAPE).flops == 2 * 4 * 32 * 100
    assert Problem(**SHAPE, causal=True).flops == 2 * 4 * 32 * 55
    assert Problem(**SHAPE, seqlen_k=3, causal=True).flops == 2 * 4 * 32 * 6


def test_prefix_and_blocks_make_it_causal():
    for given in ({"prefix": 3}, {"causal_block": np.int64(4)}, {"prefix": 1, "causal_block": 1}):
        problem = Problem(**SHAPE, **given)
        assert problem.causal and problem == Problem(**SHAPE, **given, causal=True)
        assert str(problem).endswith(str(problem.whole_mask))
    assert str(Problem(**SHAPE, prefix=2, causal_block=3, window=(4, None)).whole_mask) == (
        "causal by blocks of 3 after a prefix of 2 in window 4,"
    )
    assert Problem(**SHAPE, prefix=10**30) == Problem(**SHAPE, prefix=10)  # there are no more keys
    assert Problem(**SHAPE, causal_block=10**30) == Problem(**SHAPE, causal_block=10)
    assert not Problem(**SHAPE, prefix=0, causal_block=None).causal


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ({"window": (-1, -1)}, {}),
        ({"window": (-1, 0)}, {"window": (None, 0)}),
        ({"window": [3, -1]}, {"window": (3, None)}),
        ({"softcap": 0.0}, {}),
        ({"softcap": 0}, {}),
        ({"causal": 1}, {"causal": True}),
        ({"causal": 0}, {}),
        ({"causal": np.bool_(True)}, {"causal": True}),
        ({"causal": np.int32(1)}, {"causal": True}),
    ],
)
def test_conventions_of_flash_attention(given, means):
    problem = Problem(**SHAPE, **given)
    assert problem == Problem(**SHAPE, **means) and repr(problem) == repr(Problem(**SHAPE, **means))


@pytest.mark.parametrize(
    ("name", "value", "may_be"),
    [
        ("window", (-2, 0), "None or -1 for no limit"),
        ("window", (1.5, 0), "None or -1"),
        ("softcap", -1.0, "None or 0"),
        ("causal", 2, "True or False"),
        ("causal", -1, "True or False"),
        ("causal", 1.0, "True or False"),
        ("causal", None, "True or False"),
        ("prefix", -1, "at least 0"),
        ("prefix", 1.5, "whole number"),
        ("prefix", None, "whole number"),
        ("causal_block", 0, "at least 1"),
        ("causal_block", True, "whole number"),
        ("seqlen", -1, "whole number, at least 0"),
        ("seqlen", 1.5, "whole number"),
        ("seqlen", "10", "whole number"),
        ("seqlen", None, "whole number"),
        ("seqlen_k", -3, "at least 0"),
        ("heads", 0, "at least 1"),
        ("heads", True, "whole"),
        ("kv_heads", 3, "must divide heads, which is 4"),
        ("kv_heads", 8, "must divide heads"),
        ("head_dim", 0, "at least 1"),
        ("value_dim", 0, "at least 1"),
        ("batch", 0, "at least 1"),
        ("dtype", "int32", "float16, bfloat16, float32, float64"),
        ("dtype", np.complex64, "float16, bfloat16, float32, float64"),
        ("dtype", None, "float16"),
        ("wire_dtype", "float64", "float16, bfloat16, float32"),
        ("dtype", "flaot32", "did you mean float32?"),
        ("dtype", "float", "did you mean float32 or float64?"),  # NumPy's is not torch's
        ("window", 128, "(128, 0) is a query's own key and the 128 before it"),
        ("wire_dtype", "int8", "float16, bfloat16, float32"),
        ("causal", "yes", "True or False"),
        ("scale", 1e39, "scores are float32 here, in which it must be 0 or from 1.18e-38 to 1.7e+38"),
        ("scale", -1e-50, "0 or from 1.18e-38"),
        ("softcap", 1e39, "from 1.18e-38 to 8.51e+37"),
        ("softcap", 1e-39, "from 1.18e-38"),
        ("softcap", 1e-300, "from 1.18e-38"),
        ("scale", float("inf"), "finite"),
        ("scale", "1", "finite"),
        ("scale", 1j, "finite"),
        pytest.param("scale", 10**400, "finite", id="scale-huge"),
    ],
)
def test_errors_name_argument_value_and_what_it_may_be(name, value, may_be):
    with pytest.raises(ArgumentError) as caught:
        Problem(**{**SHAPE, name: value})
    text = str(caught.value)
    shown = "complex64" if value is np.complex64 else repr(value).strip("'")
    assert text.startswith(f"{name} is ") and shown in text and may_be in text
    assert isinstance(caught.value, MpiattnError) and isinstance(caught.value, ValueError)


def test_what_scores_can_be_computed_with():
    """scale, softcap and their quotient must be representable in the dtype of the scores."""
    for dtype, tiny, most in (
        ("float32", 2.0**-126, 1.7e38),
        ("bfloat16", 2.0**-126, 1.7e38),
        ("float64", 2.0**-1022, 8.9e307),
    ):
        for scale in (0, tiny, -tiny, most, -most):
            assert Problem(**SHAPE, dtype=dtype, scale=scale).scale == scale
        for softcap in (tiny, 1 / tiny):
            assert Problem(**SHAPE, dtype=dtype, scale=softcap, softcap=softcap).softcap == softcap
            assert Problem(**SHAPE, dtype=dtype, scale=0, softcap=softcap).softcap == softcap
        for scale, softcap in ((tiny, 2), (2, tiny)):
            with pytest.raises(ArgumentError, match=r"scale / softcap is .* it must be 0 or from"):
                Problem(**SHAPE, dtype=dtype, scale=scale, softcap=softcap)


def test_a_prefix_makes_causal_also_where_there_are_no_keys():
    assert Problem(seqlen=1, seqlen_k=0, heads=1, head_dim=1, prefix=4).causal
