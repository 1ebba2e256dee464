"""Which keys a mask of `mpiattn.masks` shows, pair by pair: each by its definition, without intervals.

It reads only what a mask is made of, its public fields, and shares no code with masks.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

ROUNDING = 1e-9  # radians by which a point of a sphere may be too far away
FAR = 2**62
LINE_PAIRS = 2**20  # of lines compared at a time


class Window(NamedTuple):
    """A window as `mpiattn.masks` has one."""

    left: int | None
    right: int | None


class Both(NamedTuple):
    """What two masks show, as `mpiattn.masks` has it."""

    a: object
    b: object


def shown(mask, positions, keys, seqlen, seqlen_k, place=None):
    """Which of the keys at positions `keys` the queries at `positions` see: bool (queries, keys).

    mask: any of `mpiattn.masks`; one that somebody else wrote has no definition but its intervals.
    seqlen, seqlen_k: numbers of queries and keys of the whole sequence.
    place: of a larger mask, of which this one is a part, as `place_of` returns it.
    """
    kind, positions, keys = _kind(mask), np.asarray(positions), np.asarray(keys)
    place = place or place_of(mask, seqlen, seqlen_k)
    if kind in PAIRS:
        a, b = (shown(part, positions, keys, seqlen, seqlen_k, place) for part in (mask.a, mask.b))
        return a & b if kind == "Both" else a | b
    if place is not None and _by_distance(mask):
        positions, keys, seqlen = place(positions + (seqlen_k - seqlen)), place(keys), seqlen_k
    return RULES.get(kind, _intervals)(mask, positions, keys, seqlen, seqlen_k)


def place_of(mask, seqlen, seqlen_k):
    """A function from keys to the places by which distances go; None where these are the positions."""
    kind = _kind(mask)
    if kind in PAIRS:
        return place_of(mask.a, seqlen, seqlen_k) or place_of(mask.b, seqlen, seqlen_k)
    if kind not in PLACES:
        return None
    places = _places(mask, seqlen_k)
    return lambda keys: np.where(keys < 0, keys, places[np.maximum(keys, 0)])


@lru_cache(8)
def _places(mask, seqlen_k):
    """The place of every key."""
    return PLACES[_kind(mask)](mask, seqlen_k)


def _place_in_tree(mask, seqlen_k):
    """One after that of the token that it follows."""
    context = seqlen_k - len(mask.parents)
    places = np.arange(seqlen_k)
    for draft, parent in enumerate(mask.parents):
        places[context + draft] = 1 + (context - 1 if parent < 0 else places[context + parent])
    return places


def _place_in_answer(mask, seqlen_k):
    """As if the answer alone came after the question."""
    return np.concatenate([np.arange(mask.question), *(mask.question + np.arange(n) for n in mask.answers)])


def _by_distance(mask):
    """Whether it goes by how far keys are away; `causal` is the order in memory."""
    kind = _kind(mask)
    return kind == "Chunked" or (kind == "Window" and (mask.left is not None or mask.right not in (None, 0)))


def span(mask, positions, seqlen, seqlen_k, placed=False):
    """Keys (begin, end), an int64 array each: a query sees none before `begin`, nor any from `end` on.

    It sees mostly not all between; a rule that has no quick bounds says all keys.  placed: whether the mask is part of
    one with places.
    """
    kind, positions = _kind(mask), np.asarray(positions, np.int64)
    placed = placed or place_of(mask, seqlen, seqlen_k) is not None
    if kind in PAIRS:
        sides = [span(part, positions, seqlen, seqlen_k, placed) for part in (mask.a, mask.b)]
        (begin, end), (begin_b, end_b) = sides
        if kind == "Both":
            return np.maximum(begin, begin_b), np.minimum(end, end_b)
        return np.minimum(begin, begin_b), np.maximum(end, end_b)
    bounds = SPANS.get(kind)
    if bounds is None or (placed and _by_distance(mask)):
        return np.zeros_like(positions), np.full_like(positions, seqlen_k)
    begin, end = bounds(mask, positions, seqlen, seqlen_k)
    return np.maximum(begin, 0), np.minimum(end, seqlen_k)


def _kind(mask):
    """The name of a mask's class; None if somebody else wrote it, whose classes may have the same names."""
    kind = type(mask)
    return kind.__name__ if kind.__module__.startswith("mpiattn.") else None


def _intervals(mask, positions, keys, seqlen, seqlen_k):
    order = np.argsort(positions, kind="stable")
    visible = np.zeros((len(positions), len(keys)), bool)
    for begin, end in zip(*mask.intervals(positions[order], seqlen, seqlen_k)):
        visible[order] |= (begin[:, None] <= keys) & (keys < end[:, None])
    return visible


def _along(axis, x, y):
    """Whether coordinates x see y on an axis: bool (len(x), len(y))."""
    (x, x_at), (y, y_at) = (np.unique(side, return_inverse=True) for side in (x, y))
    size, kernel, step, causal, cyclic, edge = axis
    x, step, kernel = x[:, None], min(step, size), min(kernel, 2 * size + 1)
    before = kernel // 2
    after = kernel - 1 - before
    if causal:
        seen = (y <= x) & (x - y < kernel * step)
    elif cyclic:
        seen = (y - x + before * step) % size < kernel * step
    elif edge == "clipped":
        seen = (x - y <= before * step) & (y - x <= after * step)
    else:  # NATTEN's: the middle of the window moves inside, among the coordinates that are whole steps away
        last = (size - 1 - x % step) // step
        middle = np.clip(x // step, before, np.maximum(last - after, before))
        seen = (middle - y // step <= before) & (y // step - middle <= after)
    if cyclic:
        seen &= (y - x + before * step) % size % step == 0
    else:
        seen &= (y - x) % step == 0
    return seen[x_at][:, y_at]


def _neighborhood(mask, positions, keys, seqlen, seqlen_k):
    visible = np.ones((len(positions), len(keys)), bool)
    axes = zip(mask.shape, mask.kernel_size, mask.dilation, mask.causal, mask.cyclic)
    for number, axis in enumerate(axes):
        unit = math.prod(mask.shape[number + 1 :])
        x, y = (tokens // unit % mask.shape[number] for tokens in (positions, keys))
        visible &= _along((*axis, mask.edge), x, y)
    return visible


def _lines(mask, positions, seqlen, seqlen_k):
    """Of the first axis alone, a few coordinates at a time."""
    unit, size = math.prod(mask.shape[1:]), mask.shape[0]
    axis = size, mask.kernel_size[0], mask.dilation[0], mask.causal[0], mask.cyclic[0], mask.edge
    lines, at = np.unique(positions // unit, return_inverse=True)
    begin, end = np.zeros((2, len(lines)), np.int64)
    some = max(1, LINE_PAIRS // size)
    for start in range(0, len(lines), some):
        rows = slice(start, start + some)
        seen = _along(axis, lines[rows], np.arange(size))
        begin[rows], end[rows] = seen.argmax(axis=1), size - seen[:, ::-1].argmax(axis=1)
    return begin[at] * unit, end[at] * unit


def _sphere(mask, positions, keys, seqlen, seqlen_k):
    """By the angle between the directions of two points from the middle of the sphere."""
    x, y = (_direction(mask, tokens) for tokens in (positions, keys))
    along = x @ y.T
    across = np.sqrt(sum((np.outer(x[:, i], y[:, j]) - np.outer(x[:, j], y[:, i])) ** 2 for i, j in _PLANES))
    return np.arctan2(across, along) <= mask.radius + ROUNDING


_PLANES = (0, 1), (1, 2), (2, 0)


def _direction(mask, tokens):
    row, column = _row_and_column(mask, tokens)
    latitude, turn = np.array(mask.latitudes)[row], 2 * np.pi * column / np.array(mask.row_lengths)[row]
    return np.stack([np.cos(latitude) * np.cos(turn), np.cos(latitude) * np.sin(turn), np.sin(latitude)], axis=1)


def _row_and_column(mask, tokens):
    first = np.concatenate([[0], np.cumsum(mask.row_lengths)])
    row = np.searchsorted(first, tokens, side="right") - 1
    return row, tokens - first[row]


def _latitudes(mask, positions, seqlen, seqlen_k):
    """Rows that are no further away in latitude alone."""
    first, latitude = np.concatenate([[0], np.cumsum(mask.row_lengths)]), np.array(mask.latitudes)
    begin, end = [], []
    for own in latitude:
        near = np.flatnonzero(np.abs(latitude - own) <= mask.radius + 2 * ROUNDING)
        begin.append(first[near[0]])
        end.append(first[near[-1] + 1])
    row, _ = _row_and_column(mask, positions)
    return np.array(begin)[row], np.array(end)[row]


def _diagonal(positions, seqlen, seqlen_k):
    return positions[:, None] + (seqlen_k - seqlen)


def _window(mask, positions, keys, seqlen, seqlen_k):
    distance = keys - _diagonal(positions, seqlen, seqlen_k)
    left, right = (FAR if side is None else side for side in (mask.left, mask.right))
    return (distance >= -left) & (distance <= right)


def _around(mask, positions, seqlen, seqlen_k):
    left, right = (min(FAR if side is None else side, seqlen + seqlen_k) for side in (mask.left, mask.right))
    diagonal = positions + (seqlen_k - seqlen)
    return diagonal - left, diagonal + right + 1


def _global(mask, positions, keys, seqlen, seqlen_k):
    return (positions[:, None] < mask.tokens) | (keys < mask.tokens)


def _chunked(mask, positions, keys, seqlen, seqlen_k):
    size = min(mask.size, FAR)
    return keys // size == _diagonal(positions, seqlen, seqlen_k) // size


def _chunk(mask, positions, seqlen, seqlen_k):
    diagonal = positions + (seqlen_k - seqlen)
    size = min(mask.size, seqlen + seqlen_k)
    return diagonal - size + 1, diagonal + size


def _blocks(mask, positions, keys, seqlen, seqlen_k):
    visible, size = np.zeros((len(positions), len(keys)), bool), min(mask.size, FAR)
    for block, block_k in mask.pairs:
        visible |= (positions // size == block)[:, None] & (keys // size == block_k)
    return visible


def _ranges(mask, positions, keys, seqlen, seqlen_k):
    visible = np.zeros((len(positions), len(keys)), bool)
    i = positions[:, None]
    for q0, q1, k0, k1, kind in mask.entries:
        inside = (q0 <= i) & (i < q1) & (k0 <= keys) & (keys < k1)
        if kind in ("causal", "bidirectional_causal"):  # the last query and the last key are on the diagonal
            inside &= k1 - keys >= q1 - i
        if kind in ("inverse_causal", "bidirectional_causal"):  # the first ones are
            inside &= keys - k0 >= i - q0
        visible |= inside
    return visible


def _tree(mask, positions, keys, seqlen, seqlen_k):
    drafted = len(mask.parents)
    context, context_k = seqlen - drafted, seqlen_k - drafted
    visible = (keys < context_k) & (keys <= _diagonal(positions, seqlen, seqlen_k))
    for row, position in enumerate(positions):
        draft = position - context
        while draft >= 0:
            visible[row] |= keys == context_k + draft
            draft = mask.parents[draft]
    return visible


def _share_question(mask, positions, keys, seqlen, seqlen_k):
    part = np.repeat(np.arange(len(mask.answers) + 1), (mask.question, *mask.answers))
    of_query, of_key = part[positions][:, None], part[keys]
    return (keys <= positions[:, None]) & ((of_key == of_query) | (of_key == 0))


def _given(mask, positions, keys, seqlen, seqlen_k):
    begin, end = mask.begin[:, positions, None], mask.end[:, positions, None]
    return ((begin <= keys) & (keys < end)).any(axis=0)


def _given_span(mask, positions, seqlen, seqlen_k):
    begin, end = mask.begin[:, positions], mask.end[:, positions]
    return np.where(begin < end, begin, seqlen_k).min(axis=0, initial=seqlen_k), end.max(axis=0, initial=0)


def _before(mask, positions, seqlen, seqlen_k):
    return np.zeros_like(positions), positions + 1


PAIRS = "Both", "Either"
PLACES = {"Tree": _place_in_tree, "ShareQuestion": _place_in_answer}
RULES = {
    "Neighborhood": _neighborhood,
    "Sphere": _sphere,
    "Window": _window,
    "Global": _global,
    "Chunked": _chunked,
    "Blocks": _blocks,
    "Ranges": _ranges,
    "Tree": _tree,
    "ShareQuestion": _share_question,
    "Given": _given,
}
SPANS = {
    "Neighborhood": _lines,
    "Sphere": _latitudes,
    "Window": _around,
    "Chunked": _chunk,
    "ShareQuestion": _before,
    "Given": _given_span,
}
