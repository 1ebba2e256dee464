"""The mask that PyTorch's flex_attention gets beside a plan: the same pairs, in the blocks that torch would find."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpiattn import masks
from mpiattn.bench import flex, neighborhood


@pytest.mark.parametrize("text", ["neighborhood 3x4 grid=9x10 cyclic=1", "global 3 | window 20,1", "causal"])
def test_pairs_of_blocks(text):
    """Of lengths that blocks do not divide, and intervals longer than a block."""
    mask, tokens, block = masks.parse(text), 90, 16
    begin, end = mask.intervals(np.arange(tokens), tokens, tokens)
    keys = np.arange(tokens)
    seen = ((begin[..., None] <= keys) & (keys < end[..., None])).any(axis=0)
    padded = np.pad(seen, (0, -tokens % block)).reshape(-1, block, -(-tokens // block), block)
    assert np.array_equal(flex.blocks_of(mask, tokens, block), padded.sum(axis=(1, 3)))


@pytest.mark.slow  # torch loads its compiler for such a mask, which takes long
@pytest.mark.draw(1, slow=1)
@pytest.mark.parametrize("cyclic", [(), (1,), (0, 1)])
@pytest.mark.parametrize("kernel", [(5, 6), (13, 24), (1, 1)])
def test_block_mask(cyclic, kernel):
    torch = pytest.importorskip("torch")
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    args = SimpleNamespace(grid=(13, 24), kernel=kernel, cyclic=cyclic)
    mask, axes = neighborhood.of(args)
    made = flex.block_mask(torch, args.grid, kernel, axes, mask)
    tokens = 13 * 24
    wanted = create_block_mask(made.mask_mod, None, None, tokens, tokens, device="cpu")
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(made, name), getattr(wanted, name)), name
    assert made.seq_lengths == wanted.seq_lengths and made.BLOCK_SIZE == wanted.BLOCK_SIZE
    begin, end = mask.intervals(np.arange(tokens), tokens, tokens)
    keys = np.arange(tokens)
    seen = ((begin[..., None] <= keys) & (keys < end[..., None])).any(axis=0)
    assert np.array_equal(create_mask(made.mask_mod, 1, 1, tokens, tokens, device="cpu")[0, 0].numpy(), seen)
