"""HDF5 input and output: whole tensors (batch, seqlen, heads, dim) in natural token order, any number of ranks.

Every rank reads its own tokens.  Where these are striped and the ranks are on several hosts, which would then read all
of the file each, it reads a slab of consecutive tokens, which the ranks exchange.  With an h5py that has MPI, all ranks
read and write one file collectively.  Without, all ranks read it independently.  On one host they write it so too, also
from memory that they share; on several, rank 0 writes what the others send, a piece at a time.  An output file appears
whole, by a rename, or not at all.
"""

import contextlib
import os
import sys
from functools import partial
from typing import NamedTuple

import h5py
import numpy as np

from ..comm.agreement import agree_on, agreement
from ..comm.exchange import MAX_MESSAGE
from ..comm.mesh import nodes_of
from ..comm.redistribute import Redistribution, all_on
from ..errors import FileError
from ..problem.layout import Layout
from ..system import partial_files
from ..system.atomic_file import HDF5, NewFile
from . import grids, hdf5, pairs
from .hdf5 import create_datasets, dtype_of, file_errors, natural, needed_bytes, place_of, read_shapes, reserve
from .lines import Lines
from .own_tokens import OwnTokens
from .staged import staged


def parallel():
    """Whether this h5py has MPI, and so reads and writes one file from many ranks."""
    return bool(h5py.get_config().mpi)


def _open(path, mode, comm):
    if parallel():
        return h5py.File(path, mode, driver="mpio", comm=comm)
    return h5py.File(path, mode) if mode == "r" else hdf5.open_to_write(path)


def _collective():
    """Transfer properties: collective where h5py has MPI."""
    how = h5py.h5p.create(h5py.h5p.DATASET_XFER)
    if parallel():
        how.set_dxpl_mpio(h5py.h5fd.MPIO_COLLECTIVE)
    return how


def _on_one_host(peers):
    """Whether all ranks are on one host, and so read and write without MPI in HDF5; collective."""
    return not any(nodes_of(peers)) and not parallel()  # by shared memory: hosts may have the same name


def _write_tokens(dataset, start, rows, axis):
    starts = [0] * rows.ndim
    starts[axis] = start
    hdf5.write(dataset, tuple(starts), np.moveaxis(rows, 0, axis), _collective(), axis)


class _Source(NamedTuple):
    """A dataset of an input file.

    shape: (batch, tokens, heads, dim).  place: (offset, shape, dtype) if its elements lie one after another, as they
    would in memory, else None.
    """

    data: h5py.Dataset
    shape: tuple
    dtype: str
    place: tuple | None


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


class Input:
    """An input file, open on every rank; made, used and closed collectively.

    shapes, axes: what look(path, axes) returns: by default the keyword arguments of `Problem` that the file determines,
    and the order of dimensions in the file, one of `mpiattn.files.hdf5.AXES`.  Arrays are returned in the order bshd.
    max_message: as for `MeshAttention`.  argument: its name in errors.  names: role ("q", ...) -> name of the dataset,
    where they differ.  axes: the order, None if nobody says it.  call: as for `agreement`.  grid: the shape of a grid
    whose points are the tokens, if datasets may have its axes for them; see `grid_of`.
    """

    def __init__(
        self, peers, path, max_message=MAX_MESSAGE, look=None, argument="IN", names=None, axes=None, call="", grid=None
    ):
        self.peers, self.path, self.max_message, self.argument = peers, path, max_message, argument
        self.names, self._watched, self._sources, self._grid = names or {}, None, {}, grid
        with agreement(peers, call=call):  # every rank looks itself: hosts may see different files
            look = look or partial(read_shapes, names=names)
            self.shapes, self.axes = look(path, axes)
        agree_on(peers, {f"the content of {argument}, {str(path)!r}": (self.shapes, self.axes)})
        with agreement(peers), file_errors(argument, path, "read"):
            self.file = _open(path, "r", peers.comm)
            self._watched = open(path, "rb")  # noqa: SIM115  (keeps this file even if the name is replaced)
            self.needed = needed_bytes(self.file)
        self._own = None
        if _on_one_host(peers) and sys.byteorder == "little":
            with agreement(peers), file_errors(argument, path, "read"):
                self._own = OwnTokens(self._watched, self._reading)
        self.check()

    def check(self):
        """Raise FileError on every rank if the file has been cut short since it was opened; collective."""
        with agreement(self.peers):
            self._check_length()

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
            data = self.file[self.names.get(name, name)]
            place, shape = place_of(data, self.file), grids.flat(data.shape, self._token_axis, self._grid)
            if place:
                place = place[0], shape, place[2]
            self._sources[name] = _Source(data, natural(shape, self.axes), dtype_of(data), place)
        return self._sources[name]

    @property
    def _token_axis(self):
        return hdf5.token_axis("bshd", self.axes)

    def grid_of(self, name):
        """The grid if a dataset has its axes for the tokens, else None."""
        return self._grid if self._source(name).data.ndim > 4 else None

    def chunks(self, wanted, progress=None):
        """This rank's chunks: arrays (batch, tokens, heads, dim), with tokens outermost in memory; collective.

        wanted: a list of `Wanted`.  progress: called with the number of tokens that this rank has just read.
        """
        if self._own is None or not all(self._source(some.name).place for some in wanted):  # alike on every rank
            return [self._read_slabs(some, progress) for some in wanted]
        with agreement(self.peers):
            wanted = [some if some.into is not None else some._replace(into=self._memory(some)) for some in wanted]
            self._own.read_each(map(self._lines, wanted), self.peers.rank, progress)
            self._check_length()
        return [some.into for some in wanted]

    def _memory(self, wanted):
        """A new array for this rank's tokens."""
        _, (batch, _, *row), dtype, _ = self._source(wanted.name)
        shape = wanted.layout.length(self.peers.rank), batch if wanted.entry is None else 1, *row
        return np.empty(shape, dtype).swapaxes(0, 1)

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
        _, (batch, _, *row), dtype, _ = self._source(name)

        def read(tokens, rows):
            self.tokens(name, first + tokens.start, first + tokens.stop, entry, _collective(), rows.swapaxes(0, 1))
            self._check_length()
            if progress:
                progress(len(tokens))

        slabs = Layout("contiguous", layout.seqlen, self.peers.size)
        shape = (batch if entry is None else 1, *row)
        move = Redistribution(self.peers, slabs, layout, shape, dtype, self.max_message)
        return move.to_chunk(read, None if into is None else into.swapaxes(0, 1)).swapaxes(0, 1)

    def tokens(self, name, start, stop, entry=None, how=None, into=None):
        """Tokens [start, stop) of a dataset, (batch, tokens, heads, dim); not collective unless `how` is.

        entry: read only this batch entry.  how: transfer properties.  into: the array to read into; by default a new
        one.  `check` reports a file that was cut short.
        """
        data, (batch, _, *row), _, _ = self._source(name)
        place = (entry or 0, start, 0, 0), (1 if entry is not None else batch, stop - start, *row)
        if into is not None and self.axes == "bhsd":
            into = into.swapaxes(1, 2)
        with file_errors(self.argument, self.path, "read"):
            place = [natural(numbers, self.axes) for numbers in place]
            array = hdf5.read(data, *place, how, into, self._token_axis)
        return array if self.axes == "bshd" else array.swapaxes(1, 2)

    def close(self):
        """Close the file; collective."""
        if self._own is not None:
            self._own.close()
        self._own, self._sources = None, {}
        self._watched.close()
        self.file.close()


class Output:
    """An output file that appears when it is committed; made, used, committed and abandoned collectively.

    shapes: name -> (shape, dtype).  attributes: of the file; axes among them, one of `files.hdf5.AXES`, is the order of
    dimensions in the file for tensors of four dimensions, which `write` takes in the order bshd.  inputs: files that
    must not be overwritten.  argument: its name in errors.  Attributes are written and the disk space of all datasets
    is allocated at the start, so that the file can be completed even if others fill the disk meanwhile.
    grid: the shape of a grid whose points are the tokens, if datasets are to have its axes for them.
    plain: names of datasets that have the dimensions of their shape, whatever `axes` and `grid` are.
    """

    def __init__(
        self,
        peers,
        path,
        shapes,
        attributes=None,
        inputs=(),
        max_message=MAX_MESSAGE,
        argument="OUT",
        grid=None,
        plain=(),
    ):
        self.peers, self.path, self.max_message, self.argument = peers, path, max_message, argument
        self.axes = axes = (attributes or {}).get("axes", "bshd")
        self.new = self.file = self.partial = self._staged = None
        try:
            with agreement(peers, only=0), file_errors(argument, path, "written"):
                if peers.rank == 0:
                    self.new = NewFile(argument, path, inputs, HDF5, locked=True)
                    with hdf5.writing(self.new.partial, create=True) as file:
                        stored = {name: natural(shape, axes) for name, (shape, _) in shapes.items()}
                        stored = {
                            name: grids.spread(shape, hdf5.token_axis(shape, axes), grid)
                            for name, shape in stored.items()
                        } | {name: shapes[name][0] for name in plain}
                        create_datasets(file, {name: (stored[name], dtype) for name, (_, dtype) in shapes.items()})
                        file.attrs.update(attributes or {})
                    reserve(self.new.partial)
            self.partial, lock = peers.allgather(self.new and (self.new.partial, self.new.lock))[0]
            partial_files.share(argument, self.partial, lock)
            with agreement(peers), file_errors(argument, path, "written"):
                if parallel() or peers.rank == 0:
                    self.file = _open(self.partial, "r+", peers.comm)
            places = peers.allgather(self.file and {name: self.file[name].id.get_offset() for name in shapes})[0]
            self._places = {
                name: (places[name], shape if name in plain else natural(shape, axes), np.dtype(dtype))
                for name, (shape, dtype) in shapes.items()
            }
            if _on_one_host(peers):
                self._staged = staged(peers, self.partial, partial(file_errors, argument, path, "written"))
        except BaseException:
            self.abandon()
            raise

    def write(self, name, chunk, layout, axis=1, progress=None):
        """Write every rank's chunk of a dataset; arguments as of `write_each` and `Written`."""
        self.write_each([Written(name, chunk, layout, axis)], progress)

    def write_each(self, written, progress=None):
        """Write every rank's chunks; collective.

        written: `Written`, of the same datasets and layouts on every rank.  They may be made one by one: what making
        one raises is raised on every rank.  progress: called with the number of tokens that have just been written.
        """
        written = map(self._in_file_order, written)
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
        shape = self._places[name][1]

        def write(starts, rows):
            with file_errors(self.argument, self.path, "written"):
                hdf5.write(self.file[name], starts, rows)

        pairs.write_pairs(self.peers, tile, place, shape, write, progress)

    def write_whole(self, name, array):
        """Write a dataset that every rank has; collective."""
        with agreement(self.peers, only=0), file_errors(self.argument, self.path, "written"):
            if self.peers.rank == 0:
                hdf5.write(self.file[name], (0,) * array.ndim, array)

    def _write_slabs(self, written, progress):
        """Send tokens to the ranks that write them; collective."""
        _, chunk, _, axis, _ = written
        slabs, writers = all_on(0, written.layout), 1
        if parallel():
            slabs, writers = Layout("contiguous", written.layout.seqlen, self.peers.size), self.peers.size

        def write(tokens, rows):
            if self.file is None:
                return
            with file_errors(self.argument, self.path, "written"):
                _write_tokens(self.file[written.name], written.first + tokens.start, rows, axis)
            if progress:
                progress(len(tokens) * writers)

        rows = np.moveaxis(chunk, axis, 0)
        move = Redistribution(self.peers, slabs, written.layout, rows.shape[1:], rows.dtype, self.max_message)
        move.from_chunk(rows, write)

    def _in_file_order(self, written):
        """A chunk with its dimensions in the order of the file."""
        if written.chunk.ndim == 4 and self.axes == "bhsd":
            return written._replace(chunk=written.chunk.swapaxes(1, 2), axis=2)
        return written

    def _close_staged(self):
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.close()

    def commit(self):
        """Close the file and give it its name."""
        with agreement(self.peers), file_errors(self.argument, self.path, "written"):
            self._close_staged()
            if self.file is not None:
                self.file.flush()  # fails while the file can still be dropped
                self.file.close()
                self.file = None
        with agreement(self.peers, only=0), file_errors(self.argument, self.path, "written"):
            if self.new:
                self.new.publish()
        if not self.new:
            partial_files.settle(self.partial)
        self.partial = None

    def abandon(self):
        """Remove the partial; does nothing after `commit`.

        Every rank tries to remove it, since rank 0 may be the rank that failed.
        """
        with contextlib.suppress(OSError):
            self._close_staged()
        if self.file is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self.file.close() if parallel() else hdf5.drop(self.file)
            self.file = None
        if self.partial is not None:
            with contextlib.suppress(OSError):
                partial_files.discard(self.partial)
            self.partial = None
        if self.new:
            self.new.discard()
