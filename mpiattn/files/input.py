"""HDF5 input: whole tensors (batch, seqlen, heads, dim) in natural token order, read by any number of ranks.

Every rank reads its own tokens.  Where these are striped and the ranks are on several hosts, which would then read all
of the file each, it reads a slab of consecutive tokens, which the ranks exchange.  With an h5py that has MPI, all ranks
read one file collectively.  Without, they read it independently.
"""

import contextlib
import copy
import os
import sys
from functools import partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from ..comm.agreement import agree_on, agreement
from ..comm.exchange import MAX_MESSAGE
from ..comm.redistribute import Redistribution
from ..errors import FileError
from ..problem.layout import Layout, even_part
from . import access, grids, hdf5
from .hdf5 import file_errors, natural, needed_bytes
from .lines import Lines
from .numbers import Numbers, missing_error
from .own_tokens import OwnTokens
from .shapes import place_name, read_shapes


class _Source(NamedTuple):
    """A dataset of an input file.

    shape: (batch, tokens, heads, dim).  place: (offset, shape, dtype) if its numbers lie one after another, as they
    would in memory, else None.  batched: whether it has a batch axis.
    """

    numbers: Numbers
    shape: tuple
    place: tuple | None
    batched: bool


class Wanted(NamedTuple):
    """A rank's chunk of a dataset.

    name: its role, "q" and so on.  layout: of the tokens.  entry: read only this batch entry.  first: token of the
    dataset at which the layout begins.  into: the array to fill, (batch, tokens, heads, dim); by default a new one.
    """

    name: str
    layout: Layout
    entry: int | None = None
    first: int = 0
    into: np.ndarray | None = None


class Input:
    """An input file, open on every rank; made, used and closed collectively.

    shapes, axes: what look(path, axes) returns: by default the keyword arguments of `Problem` that the file determines,
    and the order of dimensions in the file, one of `mpiattn.files.hdf5.AXES`.  Arrays are returned in the order bshd.
    max_message: as for `MeshAttention`.  argument: its name in errors.  names: role ("q", ...) -> name of the dataset,
    where they differ.  axes: the order, None if nobody says it.  call: as for `agreement`.  grid: the shape of a grid
    whose points are the tokens, if datasets may have its axes for them; see `grid_of`.  missing: what becomes of
    missing numbers, one of `mpiattn.files.numbers.MISSING`.
    """

    def __init__(
        self,
        peers,
        path,
        max_message=MAX_MESSAGE,
        look=None,
        argument="IN",
        names=None,
        axes=None,
        call="",
        grid=None,
        missing="error",
    ):
        self.peers, self.path, self.max_message, self.argument = peers, path, max_message, argument
        self.names, self._watched, self._grid, self._missing = names or {}, None, grid, missing
        self._sources, self._numbers = {}, {}
        with agreement(peers, call=call):  # every rank looks itself: hosts may see different files
            look = look or partial(read_shapes, names=names)
            self.shapes, self.axes = look(path, axes)
        agree_on(peers, {f"the content of {argument}, {str(path)!r}": (self.shapes, self.axes)})
        with agreement(peers), file_errors(argument, path, "read"):
            self.file = self.group = access.open_file(path, "r", peers.comm)
            self._watched = open(path, "rb")  # noqa: SIM115  (keeps this file even if the name is replaced)
            self.needed = needed_bytes(self.file)
        self._own = None
        if access.on_one_host(peers) and sys.byteorder == "little":
            with agreement(peers), file_errors(argument, path, "read"):
                self._own = OwnTokens(self._watched, self._reading)
        self.check()

    def part(self, group, shapes, axes):
        """The same file, in which roles are those of datasets of this group; of `shapes` and `axes`."""
        part = copy.copy(self)
        part.group, part.shapes, part.axes = self.file[group or "/"], shapes, axes
        part._sources, part._numbers = {}, {}
        part.path = place_name(self.path, group)
        return part

    def check(self, read_elsewhere=()):
        """Raise FileError on every rank if the file was cut short, or numbers that were read are missing; collective.

        read_elsewhere: names of datasets of which another rank has read the same numbers, and counts the missing ones.
        """
        with agreement(self.peers):
            self._check_length()
        self._check_missing(read_elsewhere)

    def _check_missing(self, read_elsewhere=()):
        if self._missing == "nan":
            return
        own = {name: numbers.take_missing() for name, numbers in self._numbers.items() if name not in read_elsewhere}
        places = {}
        for of_rank in self.peers.allgather({name: missing for name, missing in own.items() if missing[0]}):
            for name, missing in of_rank.items():
                places.setdefault(name, []).append(missing)
        if not places:
            return
        texts = []
        for name, of_ranks in places.items():
            counts, firsts = zip(*of_ranks)
            texts.append(self.numbers(name).missing_text(name, sum(counts), min(firsts)))
        with agreement(self.peers):
            raise missing_error(self.argument, self.path, texts)

    def unpacked(self, datasets):
        """How the numbers of datasets are made of their elements, in words; "" if they are these."""
        texts = {name: self.numbers(name, self._token_axis).unpacked for name in datasets}
        return ", ".join(f"{name} = {text}" for name, text in texts.items() if text)

    def numbers(self, dataset, axis=None):
        """The `Numbers` of a dataset, None if there is none; made once.  axis: along which pieces of it are read."""
        if dataset not in self._numbers:
            numbers = Numbers.of(self.group, dataset, axis)
            if numbers is None:
                return None
            self._numbers[dataset] = numbers
        return self._numbers[dataset]

    @property
    def version(self):
        """The file's length and time of change, in words."""
        about = os.fstat(self._watched.fileno())
        return f"{about.st_size} bytes, changed at {about.st_mtime_ns / 1e9:.6f}"

    def _check_length(self):
        with file_errors(self.argument, self.path, "read"):
            length = os.fstat(self._watched.fileno()).st_size
        if length < self.needed:  # HDF5 reads zeros past the end of a file
            raise FileError(
                f"{self.argument} is {str(self.path)!r}; it was cut short: its datasets end at byte "
                f"{self.needed}, it holds {length}"
            )

    def _source(self, name):
        """The `_Source` of a role, "q" and so on; made once, since a cache reads its sequences one by one."""
        if name not in self._sources:
            numbers = self.numbers(self.names.get(name, name), self._token_axis)
            on_grid = numbers.shape, self._token_axis, self._grid
            place, shape = numbers.place(self.file), grids.flat(*on_grid)
            if place:
                place = place[0], shape, place[2]
            batched = not grids.lacks_batch(*on_grid)
            self._sources[name] = _Source(numbers, natural(shape, self.axes), place, batched)
        return self._sources[name]

    @property
    def _token_axis(self):
        return hdf5.token_axis("bshd", self.axes)

    def grid_of(self, name):
        """The grid if a dataset has its axes for the tokens, else None."""
        return self._grid if self._grid and len(self._source(name).numbers.shape) > 3 + self.is_batched(name) else None

    def is_batched(self, name):
        """Whether a dataset has a batch axis; on a grid it may have none."""
        return self._source(name).batched

    def chunks(self, wanted, progress=None):
        """This rank's chunks: arrays (batch, tokens, heads, dim), with tokens outermost in memory; collective.

        wanted: a list of `Wanted`.  progress: called with the number of tokens that this rank has just read.
        """
        if self._own is None or not all(self._source(some.name).place for some in wanted):  # alike on every rank
            chunks = [self._read_slabs(some, progress) for some in wanted]
            if any(self._source(some.name).numbers.may_miss for some in wanted):
                self._check_missing()
            return chunks
        with agreement(self.peers):
            wanted = [some if some.into is not None else some._replace(into=self._memory(some)) for some in wanted]
            self._own.read_each(map(self._lines, wanted), self.peers.rank, progress)
            self._check_length()
        return [some.into for some in wanted]

    def _memory(self, wanted):
        """A new array for this rank's tokens."""
        numbers, (batch, _, *row), *_ = self._source(wanted.name)
        shape = wanted.layout.length(self.peers.rank), batch if wanted.entry is None else 1, *row
        return np.empty(shape, numbers.dtype).swapaxes(0, 1)

    def _lines(self, wanted):
        name, layout, entry, first, into = wanted
        chunk, axis = (into, 1) if self.axes == "bshd" else (into.swapaxes(1, 2), 2)
        return Lines.of(chunk, layout, axis, first, self._source(name).place, entry)

    @contextlib.contextmanager
    def _reading(self):
        with file_errors(self.argument, self.path, "read"):
            try:
                yield
            except OSError:
                self._check_length()  # says it better
                raise

    def _read_slabs(self, wanted, progress):
        """Read tokens with the other ranks, which exchange what they read; collective."""
        name, layout, entry, first, into = wanted
        numbers, (batch, _, *row), _, batched = self._source(name)

        def read(tokens, rows):
            self.tokens(
                name, first + tokens.start, first + tokens.stop, entry, access.collective(), rows.swapaxes(0, 1)
            )
            self._check_length()
            if progress:
                progress(len(tokens))

        slabs = self._slabs(numbers, self._token_axis - (not batched), first, layout.seqlen)
        shape = (batch if entry is None else 1, *row)
        move = Redistribution(self.peers, slabs, layout, shape, np.dtype(numbers.dtype), self.max_message)
        chunk = None if into is None else into.swapaxes(0, 1)
        return move.to_chunk(read, chunk, slabs_only=slabs.sizes is not None).swapaxes(0, 1)

    def _slabs(self, numbers, axis, first, count):
        """The tokens that each rank reads: where chunks are compressed, each is read by one rank.

        axis: of the tokens, or the first one of their grid, in the dataset.
        """
        points_after = numbers.shape[axis + 1 : axis + 1 + len(numbers.shape) - 3 - (axis == self._token_axis)]
        cut, ranks = numbers.chunk_length(axis) * prod(points_after), self.peers.size
        if cut == 1 or not count:
            return Layout("contiguous", count, ranks)
        begin, chunks = first // cut, -(-(first + count) // cut) - first // cut
        ends = [(begin + even_part(chunks, ranks, rank).stop) * cut - first for rank in range(ranks)]
        ends = [0, *(min(max(end, 0), count) for end in ends)]
        return Layout("contiguous", count, ranks, sizes=[stop - start for start, stop in pairwise(ends)])

    def tokens(self, name, start, stop, entry=None, how=None, into=None):
        """Tokens [start, stop) of a dataset, (batch, tokens, heads, dim); not collective unless `how` is.

        entry: read only this batch entry.  how: transfer properties.  into: the array to read into; by default a new
        one.  `check` reports a file that was cut short.
        """
        numbers, (batch, _, *row), _, batched = self._source(name)
        place = (entry or 0, start, 0, 0), (1 if entry is not None else batch, stop - start, *row)
        if into is not None and self.axes == "bhsd":
            into = into.swapaxes(1, 2)
        with file_errors(self.argument, self.path, "read"):
            place, axis = [natural(indices, self.axes) for indices in place], self._token_axis
            if batched:
                array = numbers.read(*place, how, into, axis)
            else:
                place = [indices[1:] for indices in place]
                array = numbers.read(*place, how, None if into is None else into[0], axis - 1)[None]
        return array if self.axes == "bshd" else array.swapaxes(1, 2)

    def close(self):
        """Close the file; collective."""
        if self._own is not None:
            self._own.close()
        self._own, self._sources, self._numbers = None, {}, {}
        self._watched.close()
        self.file.close()
