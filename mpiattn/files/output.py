"""HDF5 output: whole tensors in natural token order, written by any number of ranks.

With an h5py that has MPI, all ranks write one file collectively.  Without, on one host they write it independently,
also from memory that they share; on several, rank 0 writes what the others send, a piece at a time.  The file appears
whole, by a rename, or not at all.
"""

import contextlib
import copy
from collections.abc import Collection, Mapping
from typing import NamedTuple

import h5py
import numpy as np

from ..comm.agreement import agreement
from ..comm.exchange import MAX_MESSAGE
from ..comm.redistribute import Redistribution, all_on
from ..problem.layout import Layout
from ..system import output_lock, partial_files
from ..system.atomic_file import HDF5, NewFile, sync
from . import access, grids, hdf5, pairs
from .hdf5 import create_datasets, file_errors, natural, reserve
from .lines import Lines
from .staged import staged


def _join(group, name):
    """The path of a dataset of a group in the file."""
    return f"{group}/{name}" if group else name


def _write_tokens(dataset, start, rows, axis):
    starts = [0] * rows.ndim
    starts[axis] = start
    hdf5.write(dataset, tuple(starts), np.moveaxis(rows, 0, axis), access.collective(), axis)


class Written(NamedTuple):
    """A rank's chunk for a dataset.

    name: of the dataset.  chunk: with tokens along `axis`.  layout: of the tokens.  first: token of the dataset at
    which the layout begins.
    """

    name: str
    chunk: np.ndarray
    layout: Layout
    axis: int = 1
    first: int = 0


class Contents(NamedTuple):
    """What a group of an output file holds.

    shapes: name -> (shape, dtype), tensors of four dimensions in the order bshd.  attributes: of the group; axes among
    them, one of `files.hdf5.AXES`, is the order of dimensions of these tensors in the file.  grid: the shape of a grid
    whose points are the tokens, if datasets are to have its axes for them.  plain: names of datasets that have the
    dimensions of their shape, whatever `axes` and `grid` are.  batched: whether the others have a batch axis; the batch
    is one if they have none.
    """

    shapes: dict
    attributes: Mapping = {}
    grid: tuple | None = None
    plain: Collection = ()
    batched: bool = True

    @property
    def axes(self):
        """The order of dimensions in the file."""
        return self.attributes.get("axes", "bshd")

    def ordered(self):
        """Shape and dtype of every dataset in the file's order of dimensions, with one axis of tokens."""
        return {
            name: (tuple(shape) if name in self.plain else self._of_tokens(shape), np.dtype(dtype))
            for name, (shape, dtype) in self.shapes.items()
        }

    def _of_tokens(self, shape):
        shape = natural(shape, self.axes)
        return shape if self.batched else shape[1:]

    def stored(self):
        """Shape and dtype of every dataset, with the axes of the grid."""
        stored = {}
        for name, (shape, dtype) in self.ordered().items():
            if name not in self.plain:
                axis = hdf5.token_axis(self.shapes[name][0], self.axes)
                shape = grids.spread(shape, axis if self.batched else axis - 1, self.grid)
            stored[name] = shape, dtype
        return stored


class Output:
    """An output file that appears when it is committed; made, used, committed and abandoned collectively.

    contents: the `Contents` of every group, by its path in the file; "" is the file itself.  inputs: files that must
    not be overwritten.  argument: its name in errors.  unfinished: the `files.unfinished.Unfinished` that keeps the
    file for a later run where this one ends early.
    Attributes are written and the disk space of all datasets is allocated at the start, so that the file can be
    completed even if others fill the disk meanwhile.
    """

    def __init__(self, peers, path, contents, inputs=(), max_message=MAX_MESSAGE, argument="OUT", unfinished=None):
        self.peers, self.path, self.max_message, self.argument = peers, path, max_message, argument
        self.new = self.file = self.partial = self._lock = self._staged = None
        self._contents, self._group, self._unfinished = contents, "", unfinished
        begun = unfinished is not None and unfinished.begun
        try:
            with agreement(peers, only=0), self._errors():
                if peers.rank == 0:
                    self._begin(inputs, begun)
            path, self._lock = peers.allgather(self.new and (self.new.partial, self.new.lock.path))[0]
            if not begun:
                self.partial = path
                partial_files.share(argument, path)
            output_lock.share(self._lock)
            with agreement(peers), self._errors():
                if access.parallel() or peers.rank == 0:
                    self.file = access.open_file(path, "r+", peers.comm)
            self._places = peers.allgather(self.file and self._found())[0]
            if access.on_one_host(peers):
                self._staged = staged(peers, path, self._errors)
        except BaseException:
            self.abandon()
            raise

    def _errors(self):
        return file_errors(self.argument, self.path, "written")

    def _begin(self, inputs, begun):
        """Make the file on rank 0, or take up that of an earlier run."""
        if self._unfinished:
            self.new = self._unfinished.file
        else:
            self.new = NewFile(self.argument, self.path, inputs, HDF5, locked=True)
        if begun:
            stored = {path: contents.stored() for path, contents in self._contents.items()}
            self.new.check({_join(path, name): of for path, each in stored.items() for name, of in each.items()})
        else:
            self._create()

    def _create(self):
        with hdf5.writing(self.new.partial, create=True) as file:
            models = {}
            for path, contents in self._contents.items():
                create_datasets(hdf5.group_with(file, path, contents.attributes, models), contents.stored())
        reserve(self.new.partial)

    def _found(self):
        """(offset, shape, dtype) of every dataset, by its path in the file."""
        return {
            _join(path, name): (h5py.h5d.open(self.file.id, _join(path, name).encode()).get_offset(), *of)
            for path, contents in self._contents.items()
            for name, of in contents.ordered().items()
        }

    def part(self, group):
        """The same file, in which names are those of datasets of this group."""
        part = copy.copy(self)
        part._group = group
        return part

    def write(self, name, chunk, layout, axis=1, progress=None):
        """Write every rank's chunk of a dataset; arguments as of `write_each` and `Written`."""
        self.write_each([Written(name, chunk, layout, axis)], progress)

    def write_each(self, written, progress=None):
        """Write every rank's chunks; collective.

        written: `Written`, of the same datasets and layouts on every rank.  They may be made one by one: what making
        one raises is raised on every rank.  progress: called with the number of tokens that have just been written.
        """
        written = map(self._in_file, written)
        if self._staged is not None:
            chunks = (Lines.of(*some[1:], self._places[some.name]) for some in written)
            self._staged.write_each(chunks, progress)
            return
        while True:
            with agreement(self.peers):
                some = next(written, None)
            if some is None:
                return
            self._write_slabs(some, progress)

    def write_pairs(self, name, tile, place, progress=None):
        """Write every rank's tile of a dataset of pairs; arguments as of `files.pairs.write_pairs`; collective."""
        name = _join(self._group, name)
        shape = self._places[name][1]

        def write(starts, rows):
            with self._errors():
                hdf5.write(self.file[name], starts, rows)

        pairs.write_pairs(self.peers, tile, place, shape, write, progress)

    def write_whole(self, name, array):
        """Write a dataset that every rank has; collective."""
        with agreement(self.peers, only=0), self._errors():
            if self.peers.rank == 0:
                hdf5.write(self.file[_join(self._group, name)], (0,) * array.ndim, array)

    def _write_slabs(self, written, progress):
        """Send tokens to the ranks that write them; collective."""
        _, chunk, _, axis, _ = written
        slabs, writers = all_on(0, written.layout), 1
        if access.parallel():
            slabs, writers = Layout("contiguous", written.layout.seqlen, self.peers.size), self.peers.size

        def write(tokens, rows):
            if self.file is None:
                return
            with self._errors():
                _write_tokens(self.file[written.name], written.first + tokens.start, rows, axis)
            if progress:
                progress(len(tokens) * writers)

        rows = np.moveaxis(chunk, axis, 0)
        move = Redistribution(self.peers, slabs, written.layout, rows.shape[1:], rows.dtype, self.max_message)
        move.from_chunk(rows, write)

    def _in_file(self, written):
        """A chunk under its path in the file, with its dimensions in the order of the file."""
        contents, plain = self._contents[self._group], written.name in self._contents[self._group].plain
        written = written._replace(name=_join(self._group, written.name))
        if written.chunk.ndim == 4 and contents.axes == "bhsd":
            written = written._replace(chunk=written.chunk.swapaxes(1, 2), axis=2)
        if not contents.batched and not plain:
            written = written._replace(chunk=written.chunk[0], axis=written.axis - 1)
        return written

    def _close_staged(self):
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.close()

    def flush(self):
        """Put on the disk what has been written; collective."""
        with agreement(self.peers), self._errors():
            if self.file is not None:
                self.file.flush()
        with agreement(self.peers, only=0), self._errors():
            if self.new:
                sync(self.new.partial)

    def commit(self):
        """Close the file and give it its name."""
        with agreement(self.peers), self._errors():
            self._close_staged()
            if self.file is not None:
                self.file.flush()  # fails while the file can still be dropped
                self.file.close()
                self.file = None
        with agreement(self.peers, only=0), self._errors():
            if self.new:
                self.new.publish()
                self.new.discard()
        partial_files.settle(self.argument, self.partial)
        output_lock.settle(self._lock)
        self.partial = None

    def abandon(self):
        """Remove the partial, unless it is kept for a later run; does nothing after `commit`.

        Every rank tries to remove it, since rank 0 may be the rank that failed.  The lock is rank 0's.  So is a partial
        that may be kept: rank 0 may be about to move it.
        """
        with contextlib.suppress(OSError):
            self._close_staged()
        if self.file is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self.file.close() if access.parallel() else hdf5.drop(self.file)
            self.file = None
        if self.partial is not None and not self._unfinished:
            with contextlib.suppress(OSError):
                partial_files.discard(self.partial)
        self.partial = None
        if self.new:
            self.new.discard()
