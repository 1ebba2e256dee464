"""The kinds of data that move in a pass, and their arrays, as one table.  No MPI, no NumPy.

Bytes, message counts, tags, buffer shapes and the order of costs all follow from this table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..problem.problem import Problem

TokenArray: TypeAlias = "tuple[tuple[int, ...], str]"  # the shape of a token, and its dtype


class Array(NamedTuple):
    """One array of a kind; `heads`, `dim` and the dtypes name attributes of `Problem`.

    A token has the shape (batch * heads, dim), or (batch * heads,) without a dim.
    dtype: in memory.
    wire: dtype in messages.
    keys: whether its tokens are those of keys.
    unless, given: attributes of `Problem` with which there is no such array, or without which there is none; "" for
        none.
    """

    name: str
    heads: str
    dim: str | None
    dtype: str = "dtype"
    wire: str = "dtype"
    keys: bool = False
    unless: str = ""
    given: str = ""

    @property
    def argument(self) -> str:
        """Its name among the arguments and the results of a call."""
        return self.name.replace("O", "out").lower()

    def shape(self, problem: Problem) -> tuple[int, ...]:
        """Shape of a token, with the batch folded into the heads."""
        rows = problem.batch * getattr(problem, self.heads)
        return (rows, getattr(problem, self.dim)) if self.dim else (rows,)

    def held(self, problem: Problem) -> TokenArray:
        """Shape of a token and dtype in memory."""
        return self.shape(problem), getattr(problem, self.dtype)

    def travelling(self, problem: Problem) -> TokenArray:
        """Shape of a token and dtype in messages."""
        return self.shape(problem), getattr(problem, self.wire)

    def in_result(self, problem: Problem, strided: bool = False) -> bool:
        """Whether partials of this array may be accumulated in the result itself: it has their shape and their dtype.

        strided: whether they may lie in memory as a batch of results does.
        """
        return bool(self.dim) and (problem.batch == 1 or strided) and problem.partial_dtype == problem.dtype

    def partial(self, name: str) -> Array:
        """The partial results of this array: same shape, held in partial_dtype and sent in wire_dtype."""
        return self._replace(name=name, dtype="partial_dtype", wire="wire_dtype")


def present(problem: Problem, arrays: Iterable[Array]) -> tuple[Array, ...]:
    """Those of some arrays that a problem has."""
    return tuple(
        array
        for array in arrays
        if not (array.unless and getattr(problem, array.unless))
        and not (array.given and not getattr(problem, array.given))
    )


class Kind(NamedTuple):
    """Arrays that move together, one message each.

    column: True if they move in the columns of the mesh, False if in its rows.
    reduced: True for partials, which are merged at their owner; False for chunks, which are gathered from theirs.
    """

    column: bool
    reduced: bool
    arrays: tuple[Array, ...]

    def arrays_of(self, problem: Problem) -> tuple[Array, ...]:
        """The arrays that a problem has."""
        return present(problem, self.arrays)


Q = Array("Q", "heads", "head_dim")
K = Array("K", "kv_heads", "head_dim", keys=True)
V = Array("V", "kv_heads", "value_dim", keys=True, unless="shared_kv")
OUT = Array("O", "heads", "value_dim")
DOUT = OUT._replace(name="dO")
LSE = Array("lse", "heads", None, "partial_dtype", "partial_dtype")  # never rounded to wire_dtype
DELTA = LSE._replace(name="delta")
KEY_BIAS = LSE._replace(name="key_bias", keys=True, given="key_bias")
DKEY_BIAS = KEY_BIAS._replace(name="dkey_bias")

# By direction and name.  Costs and bytes are given in this order.
KINDS = {
    "forward": {
        "Q": Kind(column=False, reduced=False, arrays=(Q,)),
        "KV": Kind(column=True, reduced=False, arrays=(K, V, KEY_BIAS)),
        "O": Kind(column=False, reduced=True, arrays=(OUT.partial("O"), LSE)),
    },
    "backward": {
        "Q": Kind(column=False, reduced=False, arrays=(Q, DOUT, LSE, DELTA)),
        "KV": Kind(column=True, reduced=False, arrays=(K, V, KEY_BIAS)),
        "dQ": Kind(column=False, reduced=True, arrays=(Q.partial("dQ"),)),
        "dKV": Kind(column=True, reduced=True, arrays=(K.partial("dK"), V.partial("dV"), DKEY_BIAS)),
    },
}

_ALL = [(name, kind) for kinds in KINDS.values() for name, kind in kinds.items()]
NAMES = tuple(dict.fromkeys(name for name, _ in _ALL))
GATHERED = tuple(name for name, kind in KINDS["forward"].items() if not kind.reduced)  # the same in both directions
REDUCED = {direction: tuple(name for name, kind in kinds.items() if kind.reduced) for direction, kinds in KINDS.items()}
IN_COLUMNS = tuple(name for name in NAMES if dict(_ALL)[name].column)


def _tags() -> dict[str, int]:
    """The tag of each kind's first array; the tags of its other arrays follow."""
    tags, following = {}, 0
    for name in NAMES:
        tags[name] = following
        following += max(len(kind.arrays) for other, kind in _ALL if other == name)
    return tags


# Message tags.  MPI keeps the order of messages with the same tag between two ranks.
TAG = _tags()


def arena_of(kind: str) -> str:
    """The arena whose slots receive a kind."""
    return kind if kind in GATHERED else f"+{kind}"


def chunk_of(kind: str, u: int, w: int) -> int:
    """The chunk or accumulator of a kind that block (u, w) uses; both are hops, or both are numbers."""
    return w if kind in IN_COLUMNS else u


def shapes(problem: Problem, direction: str) -> dict[str, list[TokenArray]]:
    """{arena: [(shape of a token, dtype) of each array]}; arena "+X" holds partials in their dtype on the wire."""
    kinds = KINDS[direction]
    arenas = {name: [array.held(problem) for array in kind.arrays_of(problem)] for name, kind in kinds.items()}
    for name in REDUCED[direction]:
        arenas[arena_of(name)] = [array.travelling(problem) for array in kinds[name].arrays_of(problem)]
    return arenas


def matrices(direction: str, column: bool) -> tuple[str, ...]:
    """Names of the arrays with a head dimension that move in a row, or in a column with `column`."""
    return tuple(
        array.name for kind in KINDS[direction].values() if kind.column == column for array in kind.arrays if array.dim
    )
