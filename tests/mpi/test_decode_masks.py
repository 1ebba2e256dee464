"""Decoding under masks of several intervals, against dense attention of what was appended."""

import numpy as np
from runs import on
from test_agreement import same_error
from test_decode import Mirror

from mpiattn import masks, ring_decode, tree_decode
from mpiattn.errors import KeywordError


@on(1, 3)
def test_masks_of_several_intervals(group):
    """Of sequences of different lengths: drafted tokens as a tree, first tokens and a window, blocks."""
    mirror = Mirror(group, 2, 8, sequences=2, capacity=200, page_size=4)
    mirror.append(30, counts=[30, 11])
    for mask in (
        masks.tree([-1, 0, 0, 2, -1]),
        masks.global_tokens(2) | masks.window(6, 0),
        masks.chunked(4) & masks.window(9, 9),
    ):
        for causal in (True, False):
            mirror.check(5, mask=mask, causal=causal)
        out, lse = tree_decode(mirror.draw(2, 0, 4, 8), mirror.cache, mask=mask)
        assert out.shape == (2, 0, 4, 8) and lse.shape == (2, 4, 0), "no query"
    _, lse = tree_decode(mirror.draw(2, 13, 4, 8), mirror.cache, mask=masks.global_tokens(2), causal=False)
    assert np.isneginf(lse[1, :, :2]).all() and np.isfinite(lse[1, :, 2:]).all(), "two come before 11 tokens"
    text = same_error(group, lambda: tree_decode(mirror.draw(2, 1, 4, 8), mirror.cache, mask=masks.tree([-1] * 12)))
    assert text.startswith("mask is tree -1,-1") and "of 12 tokens" in text and "11 keys" in text, text
    assert text.endswith(": sequence 1 of the cache has 11 tokens"), text
    text = same_error(
        group, lambda: tree_decode(mirror.draw(1, 1, 4, 8), mirror.cache, sequences=[1], mask=masks.tree([-1] * 12))
    )
    assert text.endswith(": sequence 1 of the cache has 11 tokens"), text
    text = same_error(
        group, lambda: ring_decode(mirror.draw(2, 1, 4, 8), mirror.cache, mask=masks.causal()), KeywordError
    )
    assert "ring_decode, which computes without masks of mpiattn.masks; mask is one of" in text, text
    assert "tree_decode" in text and "arrays" not in text, text
    text = same_error(group, lambda: tree_decode(mirror.draw(2, 1, 4, 8), mirror.cache, mask=np.ones(30)))
    assert text.startswith("mask is a ndarray; it must be a mask of mpiattn.masks"), text
    chosen = masks.chunked(4 + group.rank)
    if group.size > 1:
        text = same_error(group, lambda: tree_decode(mirror.draw(2, 1, 4, 8), mirror.cache, mask=chosen))
        assert text.startswith("mask is") and "must be the same on every rank" in text, text
    mirror.cache.close()
