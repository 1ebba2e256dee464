"""Keywords that a function does not have: the error says what is meant, and nothing is left out in silence."""

import numpy as np
import pytest
from mpi4py import MPI

import mpiattn
from mpiattn.errors import KeywordError

SHAPE = {"seqlen": 9, "heads": 2, "head_dim": 8}
ONES = np.ones((1, 9, 2, 8), np.float32)


def refused(call, *arguments, **keywords):
    """The error's text."""
    with pytest.raises(KeywordError) as caught:
        call(*arguments, **keywords)
    assert isinstance(caught.value, mpiattn.ArgumentError) and isinstance(caught.value, TypeError)
    return str(caught.value)


@pytest.mark.parametrize(
    "keyword, text",
    [
        ("causel", "causel is not an argument of attention; did you mean causal?"),
        ("softmax_scale", "softmax_scale is not an argument of attention; it is called scale here"),
        ("is_causal", "it is called causal here"),
        ("window_size", "it is called window here"),
        ("sliding_window", "sliding_window=n is window=(n - 1, 0) here, the keys before a query's own"),
        ("cu_seqlens_q", "it is called cu_seqlens here"),
        ("dropout_p", "dropout_p is not an argument of attention; it is called dropout here"),
        ("attn_bias", "it is called bias here"),
        ("attn_mask", "there are no masks as arrays here: causal, prefix, causal_block, window and a mask of"),
        ("attn_mask", "where padding begins; numbers that are added to scores are a bias"),
        ("score_mod", "there are no functions of scores here: bias, key_bias, alibi_slopes and relative_bias are"),
        ("enable_gqa", "it follows from the other arguments"),
        ("heads", "; heads is one of MeshAttention"),
        ("xyz", "xyz is not an argument of attention, which has q, k, v, comm, "),
    ],
)
def test_attention(keyword, text):
    assert text in refused(mpiattn.attention, ONES, ONES, ONES, comm=MPI.COMM_SELF, **{keyword: None})


def test_attention_without_what_it_needs():
    assert "it is called q here" in refused(mpiattn.attention, query=ONES, key=ONES, value=ONES, comm=MPI.COMM_SELF)
    assert "it is called comm here" in refused(mpiattn.attention, ONES, ONES, ONES, group=MPI.COMM_SELF)


def test_plans():
    """Also: the plan can be called after a refused call."""
    assert callable(mpiattn.attention)  # errors name what has been loaded
    assert "it is called kv_heads here" in refused(mpiattn.MeshAttention, MPI.COMM_SELF, **SHAPE, num_kv_heads=1)
    assert "cu_seqlens is one of backward, forward, " in refused(
        mpiattn.MeshAttention, MPI.COMM_SELF, **SHAPE, cu_seqlens=[0, 9]
    )
    with mpiattn.MeshAttention(MPI.COMM_SELF, **SHAPE) as plan:
        for call in plan.forward, plan.backward:
            assert "; causal is one of MeshAttention, attention" in refused(call, is_causal=True)
        assert "did you mean axis?" in refused(plan.scatter, ONES, axes=1)
        assert "did you mean root?" in refused(plan.gather, ONES, rot=1)
        assert "it is called seqlen here" in refused(plan.like, seq_len=3)
        assert "it is called cu_seqlens here" in refused(plan.activity_of, cu_seqlens_q=[0, 9])
        plan.forward(ONES, ONES, ONES)


def test_decoding(tmp_path):
    with mpiattn.KVCache(MPI.COMM_SELF, capacity=9, kv_heads=2, head_dim=8) as cache:
        cache.append(ONES, ONES)
        assert "way is not an argument of tree_decode any more; it is now called algorithm" in refused(
            mpiattn.tree_decode, ONES[:, :1], cache, way="levels"
        )
        for call in mpiattn.ring_decode, mpiattn.query_ring_decode:
            assert "algorithm is one of tree_decode" in refused(call, ONES[:, :1], cache, way="levels")
        for call in cache.append, cache.truncate, cache.free:
            assert "it is called sequences here" in refused(call, cache_batch_idx=[0])
        cache.save(tmp_path / "cache.h5")
        mpiattn.tree_decode(ONES[:, :1], cache)
    wrong = {"num_kv_heads": 2}
    assert "it is called kv_heads here" in refused(mpiattn.KVCache, MPI.COMM_SELF, capacity=9, head_dim=8, **wrong)
    assert "it is called kv_heads here" in refused(mpiattn.KVCache.load, MPI.COMM_SELF, tmp_path / "cache.h5", **wrong)


def test_torch():
    torch = pytest.importorskip("torch")
    from mpiattn.torch import attention

    q = torch.ones(1, 9, 2, 8)
    with mpiattn.MeshAttention(MPI.COMM_SELF, **SHAPE) as plan:
        assert "scale is one of MeshAttention" in refused(attention, plan, q, q, q, softmax_scale=1.0)


def test_errors_of_types_inside_stay():
    """Only unknown keywords are turned into errors of their own."""
    with mpiattn.MeshAttention(MPI.COMM_SELF, **SHAPE) as plan, pytest.raises(TypeError, match="missing"):
        plan.forward(check=True)


def test_a_sliding_window_counts_itself():
    """The hint has the number that was given, and is right."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 9, 2, 8))
    text = refused(mpiattn.attention, q, k, v, comm=MPI.COMM_SELF, sliding_window=4)
    assert "sliding_window=4 is window=(3, 0) here" in text, text
    out, _ = mpiattn.attention(q, k, v, comm=MPI.COMM_SELF, window=(3, 0))
    last, _ = mpiattn.attention(q[:, 8:], k[:, 5:], v[:, 5:], comm=MPI.COMM_SELF)
    np.testing.assert_allclose(out[:, 8:], last, atol=1e-12)


@pytest.mark.parametrize(
    "keywords, text",
    [
        ({"is_causal": True}, "is_causal is not an argument of masks.neighborhood; it is called causal here"),
        ({"window_size": 3}, "window_size is not an argument of masks.neighborhood; it is called kernel_size here"),
        ({"stride": 2}, "there is no stride here: every point has a window of its own"),
        ({"dilatoin": 2}, "did you mean dilation?"),
        ({"xyz": 2}, "which has shape, kernel_size, dilation, causal, cyclic, edge"),
    ],
)
def test_names_of_masks(keywords, text):
    assert text in refused(mpiattn.masks.neighborhood, (6, 6), 3, **keywords)


def test_functions_of_pairs_are_no_masks():
    text = refused(mpiattn.masks.function, mask_mod=lambda b, h, i, j: i >= j, seqlen=10)
    assert "mask_mod is not an argument of masks.function: no mask is a function of pairs here" in text, text
    for pairs in (lambda b, h, i, j: i >= j, lambda i, j: i >= j):
        with pytest.raises(mpiattn.ArgumentError, match="it must take the positions of queries alone"):
            mpiattn.masks.function(pairs, 10)
    for takes_one in (lambda i, shift=1: ([0 * i], [i + shift]), lambda *at: ([0 * at[0]], [at[0] + 1])):
        assert mpiattn.masks.function(takes_one, 10).keys == 10
