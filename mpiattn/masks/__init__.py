"""Masks of several intervals a query: `mpiattn.MeshAttention(..., mask=mpiattn.masks.neighborhood((256, 512), 15))`.

`a & b` shows the keys that both masks show, `a | b` those that either shows.  Masks are alike on every rank, cheap to
compare and can be pickled.  `IntervalMask` is what they are, and what a mask of one's own has to be.
"""

from importlib import import_module

_HOMES = {
    "IntervalMask": ".interval_mask",
    "blocks": ".sequence",
    "causal": ".sequence",
    "chunked": ".sequence",
    "function": ".given",
    "global_tokens": ".sequence",
    "intervals": ".given",
    "neighborhood": ".grid",
    "parse": ".text",
    "ranges": ".rectangles",
    "share_question": ".sequence",
    "sphere": ".spheres",
    "tree": ".trees",
    "window": ".sequence",
}
__all__ = list(_HOMES)

TYPE_CHECKING = False  # type checkers take it for true; the module typing is not loaded for it
if TYPE_CHECKING:
    from .given import function as function
    from .given import intervals as intervals
    from .grid import neighborhood as neighborhood
    from .interval_mask import IntervalMask as IntervalMask
    from .rectangles import ranges as ranges
    from .sequence import blocks as blocks
    from .sequence import causal as causal
    from .sequence import chunked as chunked
    from .sequence import global_tokens as global_tokens
    from .sequence import share_question as share_question
    from .sequence import window as window
    from .spheres import sphere as sphere
    from .text import parse as parse
    from .trees import tree as tree
else:

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)  # next time it is there
        return value
