"""Masks of several intervals a query: `mpiattn.MeshAttention(..., mask=mpiattn.masks.neighborhood((256, 512), 15))`.

`a & b` shows the keys that both masks show, `a | b` those that either shows.  Masks are alike on every rank, cheap to
compare and can be pickled.  `IntervalMask` is what they are, and what a mask of one's own has to be.
"""

from ..problem.interval_mask import IntervalMask
from .given import function, intervals
from .grid import neighborhood
from .ranges import ranges
from .sequence import blocks, causal, chunked, global_tokens, share_question, window
from .sphere import sphere
from .text import parse
from .tree import tree

__all__ = [
    "IntervalMask",
    "blocks",
    "causal",
    "chunked",
    "function",
    "global_tokens",
    "intervals",
    "neighborhood",
    "parse",
    "ranges",
    "share_question",
    "sphere",
    "tree",
    "window",
]
