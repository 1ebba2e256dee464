"""Whether a backward pass is given what belongs together: an lse, and the options of the forward pass that made it.

A plan knows an lse of its own by its numbers, not by its memory: so copies of it are known, and memory that was used
again is not taken for what it held before.  Another lse, as `merge` makes it, is held against a few rows.
Nothing is sent.  Arrays on a GPU are not looked at, since a look would wait for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arguments.biases import WITH_GRADIENTS
from ..comm.agreement import difference
from ..errors import ArgumentError
from ..system.values import AsGiven, Words
from .arguments import DOCUMENTS, OF_BACKWARD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..backends.base import Array
    from ..problem.group import Group
    from ..problem.layout import Layout
    from ..problem.problem import Problem
    from ..schedule.needed import Activity

REMEMBERED = 256  # forward passes of a plan: those of a network's layers and of some microbatches
ALIKE = 8  # calls whose lse has the same numbers, as with other seeds or values; of more, none is remembered
ROWS, KEYS = 3, 256  # of a rank, that an unknown lse is held against
MOST = 1.1  # that the weights of a row may add up to; a part of them adds up to less than 1
HASHED = 2**16  # bytes of an lse; the bits of a longer one are added up
LARGE = 64  # numbers of an array that is not kept
ROUNDING = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-20, "float64": 2**-50}  # of scores, as back ends do it
KEPT = 2**-8  # of an lse that was kept in 16 bits
FAR = 0.25  # of a row's largest number: how far an element of out may be off, as where it was kept in 8 bits


class _Call(NamedTuple):
    """A forward pass: its documents, its other options as ranks compare them, and some numbers of out."""

    documents: tuple[Group, ...] | None
    options: dict[str, Any]
    out: NDArray[Any]


class Returned:
    """The forward passes of a plan on this rank, by the lse that they returned.

    layouts: of the caller's queries and keys.  chunk: the number of this rank's.
    """

    def __init__(self, problem: Problem, layouts: tuple[Layout, Layout], chunk: int) -> None:
        self._problem, self._layouts, self._chunk = problem, layouts, chunk
        self._calls: dict[int, list[_Call]] = {}
        self._all_known = True

    def skip(self) -> None:
        """A call is not remembered: from now on no options are compared, since its lse may have another's numbers."""
        self._all_known = False
        self._calls.clear()

    def remember(self, results: tuple[Array, ...], activity: Activity, options: dict[str, Any]) -> None:
        """Remember a forward pass.  results: out and lse.  options: as ranks compare them."""
        out, lse = results
        key = _fingerprint(lse)
        if key is None or not self._all_known:
            return
        call = _Call(activity.documents, _others(options), _some(out).copy())
        alike = self._calls.pop(key, [])
        if len(alike) < ALIKE and not any(_is_same(call, other) for other in alike):
            alike.append(call)
        self._calls[key] = alike
        if len(self._calls) > REMEMBERED:
            del self._calls[next(iter(self._calls))]

    def check(self, arrays: dict[str, Array], activity: Activity, options: dict[str, Any]) -> None:
        """Raise ArgumentError, on this rank, if a backward pass with these arguments would be wrong.

        arrays: by name, of this rank.  options: as of `remember`.
        """
        key = _fingerprint(arrays["lse"])
        if key is None:
            return
        alike = self._calls.get(key)
        if alike is None:
            self._check_rows(arrays, activity, options)
        elif len(alike) < ALIKE:
            self._check_options(alike, arrays, activity.documents, _others(options))

    def _check_options(
        self, alike: list[_Call], arrays: dict[str, Array], documents: tuple[Group, ...] | None, options: dict[str, Any]
    ) -> None:
        """Raise ArgumentError if none of the calls that returned this lse had these options, or returned this out."""
        with_options = [call for call in alike if call.options == options]
        fitting = [call for call in with_options if self._see_same(call.documents, documents)]
        if not fitting:
            if not self._seen(documents)[1].any():  # a part of merged results, or nothing: no gradient comes of it
                return
            (call,) = with_options[-1:] or alike[-1:]
            names = {**call.options, **options}
            name = next((name for name in names if call.options.get(name) != options.get(name)), DOCUMENTS)
            before, now = call.options.get(name), options.get(name)
            if name == DOCUMENTS:
                before, now = _in_lists(call.documents), _in_lists(documents)
            text = difference(name, now, before, "in this backward pass", "in the forward pass that returned its lse")
            raise ArgumentError(f"{text}; it must be the same (or say check=False, if this is meant)")
        if "dlse" in arrays:  # what is wrong with out could be made up for by dlse
            return
        out, dout = _some(arrays["out"]), _some(arrays["dout"])
        if all(_is_far(out, call.out, dout) for call in fitting):
            raise ArgumentError(
                "out has other numbers than forward returned with this lse; backward needs them as they were: has "
                "its memory been used again?  check=False takes it as it is"
            )

    def _see_same(self, documents: Sequence[Group] | None, others: Sequence[Group] | None) -> bool:
        """Whether this rank's queries see the same keys with either documents, which may be named in two ways."""
        if documents is others:
            return True
        sides = zip(self._seen(documents), self._seen(others))
        return all(np.all(side == other) for side, other in sides)

    def _seen(self, documents: Sequence[Group] | None) -> tuple[NDArray[Any], NDArray[Any]]:
        """The keys that this rank's queries see: where intervals begin and end, both 0 of one without keys."""
        queries = self._layouts[0].positions(self._chunk)
        lo, hi = self._problem.whole_mask.key_intervals(queries, documents)
        return np.where(lo < hi, lo, 0), np.where(lo < hi, hi, 0)

    def _check_rows(self, arrays: dict[str, Array], activity: Activity, options: dict[str, Any]) -> None:
        """Raise ArgumentError if the weights of a row and of some of this rank's keys add up to more than all may."""
        p = self._problem
        if any(name in options for name in WITH_GRADIENTS):  # which may raise or lower scores
            return
        queries, at = (layout.positions(self._chunk) for layout in self._layouts)
        rows, keys = _spread(queries, ROWS), _spread(at, KEYS)
        queries, at = queries[rows], at[keys]
        lo, hi = p.whole_mask.key_intervals(queries, activity.documents)
        seen = np.any((lo[:, 0, :, None] <= at) & (at < hi[:, 0, :, None]), axis=0)  # (rows, keys)
        lse = arrays["lse"][0, 0, rows].astype(np.float64)
        q = arrays["q"][0, rows, 0].astype(np.float64)
        k = arrays["k"][0, keys, 0].astype(np.float64)
        with np.errstate(all="ignore"):  # of values that are not finite, nothing is known
            scores = p.scale * (q @ k.T)
            if p.softcap:
                scores = p.softcap * np.tanh(scores / p.softcap)
            weights = np.where(seen, np.exp(scores - lse[:, None]), 0).sum(axis=1)
            rounding = abs(p.scale) * (abs(q) @ abs(k).T).max(axis=1, initial=0) * ROUNDING[p.dtype]
            rounding += abs(lse) * KEPT
            wrong = np.isfinite(lse) & (weights > MOST * np.exp(rounding))
        wrong &= arrays["dout"][0, rows, 0].any(axis=-1)  # other rows have no gradient
        if wrong.any():
            row = int(wrong.argmax())
            raise ArgumentError(
                f"lse is {lse[row]:.6g} in batch entry 0, head 0, position {queries[row]}, whose weights would then "
                f"add up to {weights[row]:.3g} or more; they add up to 1: it must be the lse of forward with the same "
                "q, k and options (or of more keys, as merge makes it), in natural logarithms; check=False takes it "
                "as it is"
            )


def _fingerprint(lse: Array) -> int | None:
    """A number by which an lse is known; None if it says nothing, or if a look would wait for a device."""
    if type(lse) is not np.ndarray or not lse.size:
        return None
    if lse.item(0) == -np.inf and lse.max() == -np.inf:  # all see nothing; most begin with a number
        return None
    if lse.nbytes <= HASHED:
        return hash(lse.tobytes())
    sum_of_bits = np.add.reduce(lse.view(f"i{lse.itemsize}"), axis=None, dtype=np.int64)  # without a copy
    return hash((int(sum_of_bits), lse[0, 0, _spread(lse[0, 0], KEYS)].tobytes()))  # the sum has no order


def _others(options: dict[str, Any]) -> dict[str, Any]:
    """The options but documents, without large arrays, and without what a backward pass alone has."""
    others = {}
    for name, value in options.items():
        if value is None or name == DOCUMENTS or name in OF_BACKWARD:
            continue
        if isinstance(value, list):  # of sinks, of which NaN is the same as NaN
            value = AsGiven(repr(value), value)
        if isinstance(value, AsGiven) and isinstance(value.given, np.ndarray):
            given = value.given  # a view, perhaps, of something large that the caller frees or changes
            value = AsGiven(value.value, given.copy() if given.size <= LARGE else Words(f"another array {given.shape}"))
        others[name] = value
    return others


def _in_lists(documents: Sequence[Group] | None) -> list[Any] | None:
    """Documents for an error."""
    return None if documents is None else [group.as_lists() for group in documents]


def _some(array: Array) -> NDArray[Any]:
    """Some rows of out or its gradient: of the first batch entry and head."""
    return array[0, _spread(array[0], ROWS), 0]


def _spread(array: Any, most: int) -> slice:
    """A few elements of an axis, evenly spread."""
    return slice(None, None, -(-len(array) // most) or 1)


def _is_same(call: _Call, other: _Call) -> bool:
    same = call.documents is other.documents and call.options == other.options
    return same and call.out.tobytes() == other.out.tobytes()  # quicker than to compare numbers; NaN is the same


def _is_far(out: NDArray[Any], returned: NDArray[Any], dout: NDArray[Any]) -> bool:
    """Whether an element is far off, in a row that has a gradient and sees a key."""
    if out.tobytes() == returned.tobytes():
        return False
    out, returned = out.astype(np.float64), returned.astype(np.float64)
    with np.errstate(invalid="ignore"):  # of infinite numbers
        off = abs(out - returned) > FAR * abs(returned).max(axis=-1, keepdims=True)
    return bool((off.any(axis=-1) & dout.any(axis=-1) & returned.any(axis=-1)).any())
