"""The memory of a pass over pieces: what a rank holds for its own pieces, and for those of others.

All of it lies in the pool that the passes of a plan share, one array after another.
"""

from itertools import pairwise

from ..schedule.kinds import GATHERED, IN_COLUMNS, KINDS
from ..schedule.piece_steps import MERGING


class PieceMemory:
    """The arrays of one pass of a rank.

    problem: of one piece: one sequence, one KV head and its query heads.
    pieces: the `RankPieces`.  groups: (sequence, KV head) of every matrix.
    tokens: numbers of this rank's own queries and keys.

    Attributes, all of which hold tuples of arrays (tokens, heads, dim) or (tokens, heads), one for each of a kind's:
    needs: by kind and number of the need, the tokens of a piece, or partials of them.
    own: by reduced kind and group, the partials of this rank's own tokens.
    staged: by kind and name of a parcel, what comes in many runs.
    packed: by kind, group and tokens, own tokens that do not lie as they are sent; None for arrays that do.
    leaving: by kind and name of a parcel, partials as they are sent, if that is not how they lie.  Of own tokens those
        that lie apart, one after another: launches merge no others.
    merging: by reduced kind, arrays for each of MERGING partials that arrive.
    """

    def __init__(self, pool, problem, direction, pieces, groups, tokens):
        self._pool = pool
        self.needs, self.own, self.staged, self.packed, self.leaving, self.merging = ({} for _ in range(6))
        self._kinds = {name: kind.arrays_of(problem) for name, kind in KINDS[direction].items()}
        self._problem, self._pieces, self._groups, self._tokens = problem, pieces, groups, tokens
        self.whole = False  # whether all arrays are there

    def drop(self):
        """Keep no array: the pool's memory is replaced."""
        self.whole = False
        for arrays in (self.needs, self.own, self.staged, self.packed, self.leaving, self.merging):
            arrays.clear()

    def make(self, in_place):
        """Take all arrays from the pool.

        in_place(array, parcel): whether tokens of an array of `mpiattn.schedule.kinds` are sent from where they lie.
        """
        wanted = {}
        for kind, arrays in self._kinds.items():
            column, gathered = kind in IN_COLUMNS, kind in GATHERED
            held = [array.held(self._problem) for array in arrays]
            wire = [array.travelling(self._problem) for array in arrays]
            for number, need in enumerate(self._pieces.needs):
                count = sum(stop - start for start, stop in need.of(column))
                wanted["needs", kind, number] = _shaped(count, held)
                for parcel in self._pieces.taken[column][number]:
                    if parcel.peer == self._pieces.rank:
                        if not gathered and any(place.step > 1 for place in parcel.places):
                            wanted["leaving", kind, parcel.name] = _shaped(parcel.length, held)
                        continue
                    if gathered and not parcel.in_one:
                        wanted["staged", kind, parcel.name] = _shaped(parcel.length, held)
                    if not gathered and (wire != held or not parcel.in_one):
                        wanted["leaving", kind, parcel.name] = _shaped(parcel.length, wire)
            given = [parcel for parcel in self._pieces.given[column] if parcel.peer != self._pieces.rank]
            if gathered:
                for parcel in given:
                    group = parcel.need.sequence, parcel.need.head
                    wanted["packed", kind, (group, parcel.tokens)] = [
                        None if in_place(array, parcel) else shape
                        for array, shape in zip(arrays, _shaped(parcel.length, held))
                    ]
                continue
            for group in self._groups:
                wanted["own", kind, group] = _shaped(self._tokens[column], held)
            most = max((parcel.length for parcel in given), default=0)
            for slot in range(min(MERGING, len(given))):
                wanted["merging", kind, slot] = _shaped(most, wire)
        names = list(wanted)
        below = {name: [] for name in names[:1]} | {name: [before] for before, name in pairwise(names)}
        arrays, _ = self._pool.arrays(self, wanted, below)
        for (role, kind, name), taken in arrays.items():
            getattr(self, role)[kind, name] = taken
        self.whole = True


def _shaped(count, tokens):
    return [((count, *shape), dtype) for shape, dtype in tokens]
