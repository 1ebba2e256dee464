"""Masks as text, as commands take them: `global 4 | window 128,0`.  The text of a mask is mostly `str(mask)`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..system.choices import ORDERS, one_of
from ..system.closest import of_choices
from .grid import EDGES, in_c_order, neighborhood
from .rectangles import ranges
from .sequence import blocks, causal, chunked, global_tokens, share_question, window
from .spheres import sphere
from .trees import tree
from .values import explained

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .interval_mask import IntervalMask

# What --help says, a line each.
FORMS = {
    "neighborhood": "neighborhood 15x15 [dilation=1x2] [causal=0] [cyclic=1] [edge=clipped] [order=fortran]: on the "
    "--grid; causal and cyclic name axes, counted from 0, as 0,2",
    "sphere": "sphere 0.1 [rows=20,24,28] [order=fortran]: radians, on the --grid (latitudes, longitudes), with "
    "order=fortran (longitudes, latitudes), or rows of so many points",
    "window": "window 128,0: keys before and after the diagonal; an empty side has no limit",
    "causal": "causal",
    "global": "global 4: the first tokens see all and are seen by all",
    "chunked": "chunked 256: chunks see themselves",
    "blocks": "blocks 64 0:0,1:0,1:1: tokens in a block, and which block of queries sees which of keys",
    "ranges": "ranges 0:10:0:10:causal,10:20:0:20:full: queries, keys and kind, as MagiAttention has them",
    "tree": "tree -1,0,0,1: parents of the drafts, which are the last tokens",
    "share-question": "share-question 20,10,10: lengths of the question and its answers",
}
HELP = "; ".join([*FORMS.values(), "A & B shows what both show, A | B what either shows, & before |, with ( )"])
OPTIONS = {
    "neighborhood": ("grid", "dilation", "causal", "cyclic", "edge", "order"),
    "sphere": ("grid", "rows", "order"),
}


@explained
def parse(text: str, grid: Sequence[int] | None = None, order: str = ORDERS[0]) -> IntervalMask:
    """A mask from its text.

    Parameters
    ----------
    text : str
        For example "neighborhood 15x15 cyclic=1" or "global 4 | window 128,0".  `FORMS` has all masks; `&` joins before
        `|`, and brackets group.  A grid in the text is `grid=256x512`.
    grid : sequence of int, optional
        The grid of masks that need one and do not say it.
    order : {"c", "fortran"}, default "c"
        Of the axes of grids, as in `neighborhood`, for masks that do not say it.

    Returns
    -------
    IntervalMask

    Raises
    ------
    ArgumentError
        If the text is not that of a mask; the argument is called "mask".

    Examples
    --------
    >>> from mpiattn import masks
    >>> masks.parse("(global 4 | window 128,0) & chunked 1024")
    Both(a=Either(a=Global(tokens=4), b=Window(left=128, right=0)), b=Chunked(size=1024))
    """
    if not isinstance(text, str):
        raise ArgumentError(f"mask is {text!r}; it must be text, for example 'global 4 | window 128,0'")
    return _Text(text, grid, order).mask()


class _Text:
    """A text, read from left to right."""

    def __init__(self, text: str, grid: Sequence[int] | None, order: str):
        self.text, self.grid, self.order = text, grid, order
        self.words = re.findall(r"[&|()]|[^\s&|()]+", text)[::-1]  # the next one last

    def wrong(self, why: str) -> ArgumentError:
        return ArgumentError(f"mask is {self.text!r}: {why}")

    def mask(self) -> IntervalMask:
        mask = self._joined("|", lambda: self._joined("&", self._single))
        if self.words:
            raise self.wrong(f"{self.words[-1]!r} is one too many; write & or | between two masks")
        return mask

    def _joined(self, sign: str, part: Callable[[], IntervalMask]) -> IntervalMask:
        mask = part()
        while self.words and self.words[-1] == sign:
            self.words.pop()
            other = part()
            mask = mask & other if sign == "&" else mask | other
        return mask

    def _single(self) -> IntervalMask:
        word = self.words.pop() if self.words else ""
        if word == "(":
            mask = self._joined("|", lambda: self._joined("&", self._single))
            if not self.words or self.words.pop() != ")":
                raise self.wrong("a ( has no )")
            return mask
        if word not in FORMS:
            known = ", ".join(FORMS)
            what = f"{word!r} is no mask" if word else "a mask is missing"
            raise self.wrong(f"{what}; masks are {known}{of_choices(word, FORMS)}")
        values, options = [], {}
        while self.words and self.words[-1] not in "&|()":
            value = self.words.pop()
            name, equals, said = value.partition("=")
            if not equals:
                values.append(value)
            elif name in OPTIONS.get(word, ()) and name not in options:
                options[name] = said
            else:
                allowed = " or ".join(f"{option}=" for option in OPTIONS.get(word, ())) or "no name=value"
                raise self.wrong(f"{word} has {value!r}; it may have {allowed}, each once; {FORMS[word]}")
        try:
            return self._made(word, values, options)
        except ArgumentError as error:
            raise self.wrong(f"{error}") from None
        except (ValueError, TypeError):  # a number that is none, or one value too many or too few
            raise self.wrong(f"{' '.join([word, *values])!r} is not understood; write {FORMS[word]}") from None

    def _made(self, word: str, values: list[str], options: dict[str, str]) -> IntervalMask:
        if word == "neighborhood":
            return self._neighborhood(*values, **options)
        if word == "sphere":
            return self._sphere(*values, **options)
        makers: dict[str, Callable[..., IntervalMask]] = {
            "window": lambda sides: window(*_sides(sides)),
            "causal": causal,
            "global": lambda n: global_tokens(int(n)),
            "chunked": lambda size: chunked(int(size)),
            "blocks": lambda size, pairs="": blocks(int(size), [_numbers(pair, ":") for pair in _split(pairs)]),
            "ranges": lambda entries="": ranges([_entry(entry) for entry in _split(entries)]),
            "tree": lambda parents="": tree(_numbers(parents)),
            "share-question": lambda lengths: share_question(_numbers(lengths)[0], _numbers(lengths)[1:]),
        }
        return makers[word](*values)

    def _shape(self, grid: str | None) -> tuple[int, ...]:
        if grid is None and self.grid is None:
            raise ArgumentError("it needs a grid: --grid 256x512, or grid=256x512 in the mask")
        return tuple(self.grid or ()) if grid is None else _numbers(grid, "x")

    def _neighborhood(
        self,
        kernel: str,
        grid: str | None = None,
        dilation: str = "1",
        causal: str = "",
        cyclic: str = "",
        edge: str = EDGES[0],
        order: str | None = None,
    ) -> IntervalMask:
        shape = self._shape(grid)
        axes = [_numbers(named) for named in (causal, cyclic)]
        for name, numbers in zip(("causal", "cyclic"), axes):
            if any(axis not in range(len(shape)) for axis in numbers):
                raise ArgumentError(f"{name}= names axes of a grid of {len(shape)}, which are counted from 0")
        flags = ([axis in numbers for axis in range(len(shape))] for numbers in axes)
        is_causal, is_cyclic = flags
        kernels, steps = _one_or_all(kernel), _one_or_all(dilation)
        return neighborhood(shape, kernels, steps, is_causal, is_cyclic, edge, order or self.order)

    def _sphere(
        self, radius: str, rows: str | None = None, grid: str | None = None, order: str | None = None
    ) -> IntervalMask:
        one_of("order", order or self.order, ORDERS)
        if rows is not None:
            return sphere(_numbers(rows), float(radius))
        shape = self._shape(grid)
        if len(shape) != 2:
            raise ArgumentError(f"a sphere's grid has latitudes and longitudes, 2 axes; this one has {len(shape)}")
        latitudes, longitudes = in_c_order(shape, order or self.order)
        return sphere((longitudes,) * latitudes, float(radius))


def _split(text: str, between: str = ",") -> list[str]:
    """The words of a list.  Raises ArgumentError where one is missing."""
    words = text.split(between) if text else []
    if "" in words:
        before = between.join(words[: words.index("")])
        where = f"after {before!r}" if before else "before the first word"
        raise ArgumentError(f"{text!r} has a {between!r} too many, {where}")
    return words


def _numbers(text: str, between: str = ",") -> tuple[int, ...]:
    return tuple(map(int, _split(text, between)))


def _one_or_all(text: str) -> Any:
    numbers = _numbers(text, "x")
    return numbers[0] if len(numbers) == 1 else numbers


def _sides(text: str) -> list[int | None]:
    left, right = (int(side) if side else None for side in text.split(","))
    return [left, right]


def _entry(text: str) -> tuple[Any, ...]:
    *numbers, kind = text.split(":")
    return (*map(int, numbers), kind)
