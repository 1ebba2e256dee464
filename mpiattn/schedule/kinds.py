"""What travels in a pass: one table of kinds and their arrays.  No MPI, no NumPy.

Bytes, numbers of messages, tags, shapes of buffers and the order of costs follow from it.
"""

from typing import NamedTuple


class Array(NamedTuple):
    """One array of a kind; `heads`, `dim` and the dtypes are names of attributes of `Problem`.

    The shape of a token is (batch * heads, dim), without a dim (batch * heads,).  dtype: as the array is held.
    wire: as it travels.
    """

    name: str
    heads: str
    dim: str | None
    dtype: str = "dtype"
    wire: str = "dtype"

    def shape(self, problem):
        """The shape of a token, its batch folded into the heads."""
        rows = problem.batch * getattr(problem, self.heads)
        return (rows, getattr(problem, self.dim)) if self.dim else (rows,)

    def held(self, problem):
        """Shape of a token and dtype, in memory."""
        return self.shape(problem), getattr(problem, self.dtype)

    def travelling(self, problem):
        """Shape of a token and dtype, in a message."""
        return self.shape(problem), getattr(problem, self.wire)

    def partial(self, name):
        """The array of partial results that becomes this one: it accumulates and travels in dtypes of its own."""
        return self._replace(name=name, dtype="partial_dtype", wire="wire_dtype")


class Kind(NamedTuple):
    """Arrays that move together, a message each.

    column: they move in the columns of the mesh, else in its rows.  reduced: partials that are merged at their owner,
    else chunks that are gathered from their owners.
    """

    column: bool
    reduced: bool
    arrays: tuple


Q = Array("Q", "heads", "head_dim")
K = Array("K", "kv_heads", "head_dim")
V = Array("V", "kv_heads", "value_dim")
OUT = Array("O", "heads", "value_dim")
DOUT = OUT._replace(name="dO")
LSE = Array("lse", "heads", None, "partial_dtype", "partial_dtype")        # keeps its digits where partials are rounded
DELTA = LSE._replace(name="delta")

# By direction and name, in the order in which costs and bytes are given.
KINDS = {
    "forward": {"Q": Kind(column=False, reduced=False, arrays=(Q,)),
                "KV": Kind(column=True, reduced=False, arrays=(K, V)),
                "O": Kind(column=False, reduced=True, arrays=(OUT.partial("O"), LSE))},
    "backward": {"Q": Kind(column=False, reduced=False, arrays=(Q, DOUT, LSE, DELTA)),
                 "KV": Kind(column=True, reduced=False, arrays=(K, V)),
                 "dQ": Kind(column=False, reduced=True, arrays=(Q.partial("dQ"),)),
                 "dKV": Kind(column=True, reduced=True, arrays=(K.partial("dK"), V.partial("dV")))},
}

_ALL = [(name, kind) for kinds in KINDS.values() for name, kind in kinds.items()]
NAMES = tuple(dict.fromkeys(name for name, _ in _ALL))
GATHERED = tuple(name for name, kind in KINDS["forward"].items() if not kind.reduced)      # the same in both directions
REDUCED = {direction: tuple(name for name, kind in kinds.items() if kind.reduced) for direction, kinds in KINDS.items()}
IN_COLUMNS = tuple(name for name in NAMES if dict(_ALL)[name].column)


def _tags():
    """The tag of each kind's first array; every further array has one more."""
    tags, following = {}, 0
    for name in NAMES:
        tags[name] = following
        following += max(len(kind.arrays) for other, kind in _ALL if other == name)
    return tags


# Message tags; between two ranks, messages of one tag keep their order.
TAG = _tags()


def arena_of(kind):
    """The arena that arrivals of a kind take their slots in."""
    return kind if kind in GATHERED else f"+{kind}"


def hop_of(kind, u, w):
    """Which hop's chunk or accumulator of a kind the block (u, w) works on."""
    return w if kind in IN_COLUMNS else u


def extent_of(kind, a, b):
    """Number of hops of a kind in a tile of a x b, #0 included: the ranks of a row or of a column."""
    return b if kind in IN_COLUMNS else a


def shapes(problem, direction):
    """By arena, shape of a token and dtype of every array; "+X" is of partials as they travel."""
    kinds = KINDS[direction]
    found = {name: [array.held(problem) for array in kind.arrays] for name, kind in kinds.items()}
    for name in REDUCED[direction]:
        found[arena_of(name)] = [array.travelling(problem) for array in kinds[name].arrays]
    return found


def matrices(direction, column):
    """Names of the arrays that move in a row (in a column) and have elements for every head and dimension."""
    return tuple(array.name for kind in KINDS[direction].values() if kind.column == column
                 for array in kind.arrays if array.dim)
