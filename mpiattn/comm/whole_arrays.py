"""Whole arrays to and from the chunks of a layout: `scatter` and `gather`.

Tokens go from where they are to where they belong.  Sender and receiver know from the layout which tokens a message
holds, so messages contain nothing but tokens.
"""

import math
from itertools import zip_longest

import numpy as np

from ..errors import ArgumentError
from ..problem.tensors import as_array, as_given, as_tensor, is_tensor, what_is
from ..system.values import UNLIMITED, AsGiven, is_whole
from . import rounds
from .agreement import agreement
from .exchange import MAX_MESSAGE

RUN_BYTES = 64 * 2**10  # consecutive bytes of a chunk from which on they are worth a message of their own


class _Boxes:
    """What a message takes of an array of tokens along `axis`; shape: of the array without that axis.

    Where the tokens of a chunk are many bytes at each place before `axis`, there is one box a place, so that boxes are
    contiguous.  places: indices of the axes before.  row_bytes: the bytes of a token there.

    Of chunks that may consist of many ranges, a box has tokens of several of these.
    """

    def __init__(self, layout, shape, dtype, axis):
        self.layout, leading = layout, shape[:axis]
        row_bytes = dtype.itemsize * math.prod(shape[axis:])
        self.straight = math.prod(leading) == 1 or row_bytes * layout.seqlen >= RUN_BYTES * layout.chunks
        self.places = list(np.ndindex(*leading)) if self.straight else [(slice(None),) * axis]
        self.row_bytes = row_bytes if self.straight else dtype.itemsize * math.prod(shape)
        self._row = shape[0 if not self.straight else axis :]
        self._axis = 0 if self.straight else axis

    def shape(self, tokens):
        """The shape of a box of so many tokens."""
        return (*self._row[: self._axis], tokens, *self._row[self._axis :])

    def of(self, rank, tokens=None):
        """Every box of a rank as indices, into its chunk and into the whole; tokens: the most in a box."""
        positions = self.layout.positions(rank) if self.layout.many else None
        for place in self.places:
            before = 0
            for part in self.layout.ranges(rank) if positions is None else [positions]:
                most = tokens or max(len(part), 1)
                for first in range(0, len(part), most):
                    cut = part[first : first + most]
                    in_chunk = slice(before + first, before + first + len(cut))
                    in_whole = cut if positions is not None else slice(cut[0], cut[-1] + 1, cut.step)
                    yield (*place, in_chunk), (*place, in_whole)
                before += len(part)

    def rounds(self, ranks):
        """The boxes of several ranks, a few megabytes in all: for every round a list of (rank, in_chunk, in_whole)."""
        tokens = max(1, rounds.PIECE_BYTES // self.layout.chunks // max(self.row_bytes, 1))
        for boxes in zip_longest(*(self.of(rank, tokens) for rank in ranks)):
            yield [(rank, *box) for rank, box in zip(ranks, boxes) if box]


def check_numbers(name, array):
    """Raise ArgumentError unless an argument is an array in host memory of elements whose bytes say all."""
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        raise ArgumentError(
            f"{name} is a {type(array).__name__}; it must be a NumPy array or a torch tensor on the CPU{what_is(array)}"
        )
    if array.dtype.hasobject or issubclass(array.dtype.type, np.void):
        raise ArgumentError(f"{name} has dtype {array.dtype}; it must be of numbers")


def _check_tokens(name, array, axis, length):
    check_numbers(name, array)
    if not -array.ndim <= axis < array.ndim:
        raise ArgumentError(
            f"axis is {axis}; {name} has shape {array.shape}, so it may be from {-array.ndim} to {array.ndim - 1}"
        )
    if array.shape[axis] != length:
        others = [other for other, count in enumerate(array.shape) if count == length]
        hint = f"; if they are along axis {others[0]}, say axis={others[0]}" if len(others) == 1 else ""
        raise ArgumentError(f"{name} has shape {array.shape}; it must have {length} tokens along axis {axis}{hint}")


def check_root(root, ranks):
    """Raise ArgumentError unless it is None or one of so many ranks.  A truth value is none."""
    if root is not None and not is_whole(root, 0, ranks - 1):
        raise ArgumentError(f"root is {root!r}; it must be None or a rank from 0 to {ranks - 1}")


def _checked(call, layout, name, array, root, axis, length, alike):
    """The array; the shape and dtype of its tokens and whether it is a tensor, None without an array.

    name: of the argument.  length: the array's tokens; None: this rank need not have it.
    alike: all ranks have arrays of like tokens.
    """
    given, row = array, None
    with call.agreement() as same:
        check_root(root, call.peers.size)
        if not is_whole(axis, -UNLIMITED, UNLIMITED):
            raise ArgumentError(f"axis is {axis!r}; it must be a whole number")
        same |= {"root": AsGiven(root, "every rank" if root is None else root), "axis": axis, "tokens": layout.seqlen}
        if length is not None:
            array = as_array(name, array)
            _check_tokens(name, array, axis, length)
            row = np.delete(array.shape, axis).tolist(), rounds.native(array.dtype)
            if alike:
                same |= {f"shape of a token and dtype of {name}": row}
    return array, row and (*row, is_tensor(given))


def _empty(shape, dtype, axis, tokens):
    return np.empty((*shape[:axis], tokens, *shape[axis:]), dtype)


def scatter(call, layout, array, root, axis, max_message=MAX_MESSAGE):
    """A rank's chunk of the whole `array`; a tensor if the array is one.

    root: the rank that has the array; None: every rank has it.  call: this collective call, a
    `mpiattn.comm.collective_calls.Call`.
    """
    peers = call.peers
    me, has = peers.rank, root in (None, peers.rank)
    array, row = _checked(call, layout, "array", array, root, axis, layout.seqlen if has else None, root is None)
    shape, dtype, tensor = row if root is None else peers.allgather(row)[root]
    axis %= len(shape) + 1
    with agreement(peers):  # a rank may lack the memory, or torch
        chunk = _empty(shape, dtype, axis, layout.length(me))
        given = as_tensor(chunk) if tensor else chunk
    boxes = _Boxes(layout, shape, dtype, axis)
    if root is None:
        for in_chunk, in_whole in boxes.of(me):
            chunk[in_chunk] = array[in_whole]
        return given
    with rounds.Rounds(peers, max_message) as messages:
        for of_round in boxes.rounds(range(peers.size) if has else [me]):
            for rank, in_chunk, in_whole in of_round:
                if not has:
                    messages.receive(root, chunk[in_chunk])
                elif rank == me:
                    chunk[in_chunk] = array[in_whole]
                else:
                    messages.send(rank, array[in_whole])
            messages.turn()
        messages.end()
    return given


def gather(call, layout, chunk, root, axis, max_message=MAX_MESSAGE):
    """The whole array of all chunks on `root`, and None on the others; a tensor if the chunks are tensors.

    root: a rank; None: every rank gets the array.  call: as for `scatter`.
    """
    peers, given = call.peers, chunk
    me, gets = peers.rank, root in (None, peers.rank)
    chunk, (shape, dtype, _) = _checked(call, layout, "chunk", chunk, root, axis, layout.length(me), True)
    axis %= len(shape) + 1
    with agreement(peers):
        whole = _empty(shape, dtype, axis, layout.seqlen if gets else 0)
    boxes = _Boxes(layout, shape, dtype, axis)
    with rounds.Rounds(peers, max_message) as messages:
        if root is None:
            _gather_to_all(messages, boxes, peers, chunk, whole)
        else:
            for of_round in boxes.rounds(range(peers.size) if gets else [me]):
                for rank, in_chunk, in_whole in of_round:
                    if not gets:
                        messages.send(root, chunk[in_chunk])
                    elif rank == me:
                        whole[in_whole] = chunk[in_chunk]
                    else:
                        messages.receive(rank, whole, in_whole)
                messages.turn()
        messages.end()
    return as_given(given, whole)[0] if gets else None


def _gather_to_all(messages, boxes, peers, chunk, whole):
    """By allgathers, which send less between hosts than messages to every rank."""
    layout, ranks = boxes.layout, range(peers.size)
    if boxes.straight and not layout.striped and not layout.many:
        for place in boxes.places:
            before = 0
            for parts in zip_longest(*map(layout.ranges, ranks), fillvalue=range(0)):
                own = chunk[(*place, slice(before, before + len(parts[peers.rank])))]
                before += len(own)
                lengths, starts = list(map(len, parts)), [part.start for part in parts]
                messages.allgather(own, whole[place], lengths, starts, boxes.row_bytes)
                messages.turn()
        return
    for of_round in boxes.rounds(ranks):
        places = {rank: (in_whole, in_chunk[-1].stop - in_chunk[-1].start) for rank, in_chunk, in_whole in of_round}
        shapes = {rank: boxes.shape(tokens) for rank, (_, tokens) in places.items()}
        sizes = [math.prod(shapes[rank]) if rank in shapes else 0 for rank in ranks]
        ends = np.cumsum(sizes).tolist()
        arena = np.empty(ends[-1], whole.dtype)
        starts = [end - size for end, size in zip(ends, sizes)]
        unpack = [
            (whole, in_whole, arena[starts[rank] : ends[rank]].reshape(shapes[rank]))
            for rank, (in_whole, _) in places.items()
        ]
        own = next((chunk[in_chunk] for rank, in_chunk, _ in of_round if rank == peers.rank), chunk[:0])
        messages.allgather(own, arena, sizes, starts, whole.itemsize, unpack)
        messages.turn()
