"""HDF5 files without MPI: stored types, what is in a file, the layout of outputs, and clear errors.

bfloat16 is stored as an HDF5 float of 16 bits with 8 of exponent; other readers get its values as float32.  h5py too
reports float32 as the dtype of such a dataset, so here the dtype is derived from the stored type.  h5py itself writes
arrays of ml_dtypes.bfloat16 as opaque elements of 2 bytes; these are read as bfloat16 too.
"""

import contextlib
import errno
import os
import pickle
import re
from math import prod

import h5py
import numpy as np

from ..errors import FileError, MpiattnError
from ..problem.problem import ITEMSIZE, dtype_name
from ..system.os_errors import reason
from ..system.values import path_text
from . import grids
from .presence import AbsentError, opened

LISTED = 40  # an error lists at most this many datasets
CONVERT = "`mpiattn convert` makes one of .npy, .npz, safetensors and PyTorch files: mpiattn convert FILES OUT"
NETCDF3 = "it is a netCDF-3 file; `nccopy -k nc4` makes a netCDF-4 file of it, which is an HDF5 file"
MOST_CACHE = 2**30  # bytes of chunks that are kept of a dataset, if a single chunk has not more
OTHER_CHUNKS = 2**24  # bytes of chunks of a piece that HDF5 reads between those that the next piece needs too
AXES = ("bshd", "bhsd")  # (batch, seqlen, heads, dim), and PyTorch's (batch, heads, seqlen, dim)
ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError)  # that h5py raises for odd files
FEW_ATTRIBUTES = 64, 32  # HDF5 indexes more than 8, which makes a group larger and takes twice as long
BFLOAT16_FIELDS = (15, 7, 8, 0, 7)  # bit of the sign; first bit and number of bits of exponent and mantissa


def _reason(error):
    """The operating system's message inside HDF5's long one, or what it means for locks."""
    if "unable to lock file" in str(error):
        return _why_not_locked(error)
    if "h5clear" in str(error):
        return "a program that writes it has not closed it, or was killed; in that case `h5clear -s FILE` mends it"
    match = re.search(r"errno = (\d+), error message = '([^']*)'", str(error))
    if match:
        error = OSError(int(match[1]), match[2])
    if isinstance(error, KeyError):  # whose text has quotation marks
        return str(error.args[0])
    return reason(error) if isinstance(error, OSError) else str(error)


def _why_not_locked(error):
    without = "HDF5_USE_FILE_LOCKING=FALSE, in the environment of all ranks,"
    if error.errno in (errno.EAGAIN, errno.EACCES):
        return f"another program has it open for writing, and has locked it; {without} reads it as it is now"
    return f"its file system has no locks ({os.strerror(error.errno or errno.ENOLCK)}); {without} does without"


def is_netcdf3(path):
    """Whether a file is of netCDF's own format, which is not HDF5."""
    with open(path, "rb") as file:
        return file.read(4) in (b"CDF\x01", b"CDF\x02", b"CDF\x05")


@contextlib.contextmanager
def file_errors(name, path, doing):
    """Turn errors of HDF5 and the system into a FileError that names the argument, the file and the reason."""
    try:
        yield
    except MpiattnError:
        raise
    except ERRORS as error:
        why = f"it cannot be {doing}: {_reason(error)}"
        if doing == "read" and "file signature not found" in str(error):
            why = NETCDF3 if is_netcdf3(path) else f"it is no HDF5 file; {CONVERT}"
        raise FileError(f"{name} is {str(path)!r}; {why}") from error


def check_is_file(argument, path):
    """Raise FileError, naming the argument, unless a path is a file: opening a pipe may wait for ever.

    ArgumentError if it is no path.
    """
    path_text(argument, path)
    if not os.path.isfile(path):
        what = "it is a folder" if os.path.isdir(path) else "it is a pipe or a device"
        why = f"{what}, it must be a file" if os.path.exists(path) else "there is no such file"
        raise FileError(f"{argument} is {str(path)!r}; {why}")


def stored_type(dtype):
    """The HDF5 type in which a NumPy dtype is stored."""
    if dtype.name != "bfloat16":
        return h5py.h5t.py_create(dtype, logical=True)
    kind = h5py.h5t.IEEE_F16LE.copy()
    kind.set_fields(*BFLOAT16_FIELDS)
    kind.set_ebias(127)
    return kind


def dtype_of(dataset):
    """Name of the dtype of a dataset's elements; NumPy knows "bfloat16" once `problem.dtype_name` has seen it."""
    kind = dataset.id.get_type()
    if isinstance(kind, h5py.h5t.TypeFloatID) and kind.get_size() == 2 and kind.get_fields() == BFLOAT16_FIELDS:
        return "bfloat16"
    if isinstance(kind, h5py.h5t.TypeOpaqueID):
        return "bfloat16" if kind.get_size() == 2 else f"opaque elements of {kind.get_size()} bytes"
    try:
        return dataset.dtype.name
    except (TypeError, ValueError, NotImplementedError):
        return f"a type of {kind.get_size()} bytes that NumPy does not have"


def place_of(dataset, file):
    """(offset, shape, dtype) of a dataset whose elements lie one after another in the bytes of a file, else None.

    They must lie there as they would in memory.  A link in the file may lead to a dataset of another one.
    """
    name, how = dtype_of(dataset), dataset.id.get_create_plist()
    if (
        _object(dataset).fileno != _object(file).fileno
        or name not in ITEMSIZE
        or dataset.id.get_type() != stored_type(np.dtype(dtype_name(name)))
        or how.get_layout() != h5py.h5d.CONTIGUOUS
        or how.get_external_count()
        or not dataset.id.get_storage_size() == dataset.size * ITEMSIZE[name] > 0
    ):
        return None
    return dataset.id.get_offset(), dataset.shape, np.dtype(name)


def natural(shape, axes="bshd"):
    """Convert a shape in the order `axes` to (batch, seqlen, heads, dim), and back."""
    return tuple(shape) if axes == "bshd" or len(shape) != 4 else (shape[0], shape[2], shape[1], shape[3])


def token_axis(shape, axes="bshd"):
    """The axis of the tokens of a tensor in the order `axes`, or of a row of numbers a head, (batch, heads, seqlen)."""
    return 1 if axes == "bshd" and len(shape) != 3 else 2


def _transfer(dataset, starts, array, axis, steps=None):
    """Arguments of an HDF5 transfer from or to the indices `starts`: spaces, the array, its type."""
    memory, stored = h5py.h5s.create_simple(array.shape), dataset.id.get_space()
    if array.size and steps:
        stored.select_hyperslab(starts, array.shape, steps)
    elif array.size:
        grids.select(stored, starts, array.shape, axis)
    else:
        memory.select_none()
        stored.select_none()
    plain = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
    kind = dataset.id.get_type()
    return memory, stored, plain, kind if isinstance(kind, h5py.h5t.TypeOpaqueID) else stored_type(array.dtype)


def read(dataset, starts, shape, how=None, into=None, axis=0, steps=None):
    """The elements of a dataset as they are stored, from the indices `starts` on, in native byte order.

    how: transfer properties.  into: the array of this shape and dtype to read into; by default a new one.  axis: that
    of the tokens, for which the dataset may have the axes of a grid.  steps: from an index to the next on every axis,
    of a dataset without a grid; by default 1.
    """
    if steps and steps[-1] > 1:  # HDF5 is slow where elements of a row lie apart: those between are read too
        width = max(0, (shape[-1] - 1) * steps[-1] + 1)
        return read(dataset, starts, (*shape[:-1], width), how, None, axis, (*steps[:-1], 1))[..., :: steps[-1]]
    there = into is not None and into.flags.c_contiguous
    array = into if there else np.empty(shape, dtype_of(dataset))
    dataset.id.read(*_transfer(dataset, starts, array, axis, steps), dxpl=how)
    if into is None or there:
        return array
    into[...] = array
    return into


def write(dataset, starts, array, how=None, axis=0):
    """Write an array into a dataset from the indices `starts` on.  how, axis: as of `read`."""
    dataset.id.write(*_transfer(dataset, starts, np.ascontiguousarray(array), axis), dxpl=how)


def members(group, datasets=True):
    """(path, object) of every group in an open file or group, and of every dataset if they are wanted.

    Links to other places are followed at last, so that a group with several names comes once, under its own.
    """
    entered, links = set(), []

    def see(item, path):
        if isinstance(item, h5py.Dataset) and datasets:
            yield path, item
        elif isinstance(item, h5py.Group) and _place(item) not in entered:
            yield path, item
            yield from inside(item, f"{path}/")

    def inside(here, path):
        entered.add(_place(here))
        for name in here:
            if isinstance(name, bytes):  # not UTF-8: no option can name it
                continue
            if here.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
                links.append((here, name, path + name))
            elif datasets or _object(here, name).type == h5py.h5g.GROUP:
                yield from see(here[name], path + name)

    yield from inside(group, "")
    while links:
        here, name, path = links.pop(0)
        with contextlib.suppress(AbsentError):
            yield from see(opened(here, name, whole=False), path)


def _place(item):
    """Which object it is, of which file."""
    about = _object(item)
    return about.fileno, about.objno


def _object(here, name="."):
    """The type and the place of an object.  h5o.get_info also reads the index of a dataset's chunks, for its size."""
    return h5py.h5g.get_objinfo(here.id, name.encode())


def contents(group):
    """The (shape, dtype name) of every dataset in an open file or group, by its path."""
    return {path: (item.shape, dtype_of(item)) for path, item in members(group) if isinstance(item, h5py.Dataset)}


def dataset_of(group, name):
    """The dataset of an open file or group, or None if there is none of that name.

    Raises ValueError if it is something else, or a part of it is not there: HDF5 would read its fill value.
    """
    data = opened(group, name)
    if data is not None and not isinstance(data, h5py.Dataset):
        raise ValueError(f"its {name!r} is a {'group' if isinstance(data, h5py.Group) else 'type'}, not a dataset")
    return data


def dataset_for_pieces(group, name, axis=None):
    """As `dataset_of`, with a cache for the compressed chunks that pieces read one after another have parts of.

    HDF5 decompresses a chunk again for every piece if the cache does not hold it.
    axis: along which pieces lie, of all there is along the others; by default pieces are consecutive in the file.
    """
    dataset = dataset_of(group, name)
    if dataset is None or not is_compressed(dataset):
        return dataset
    nbytes = min(_bytes_of_cut_chunks(dataset, axis), max(MOST_CACHE, _chunk_bytes(dataset)))
    how, file, path = h5py.h5p.create(h5py.h5p.DATASET_ACCESS), dataset.file, dataset.name
    slots, least, _ = dataset.id.get_access_plist().get_chunk_cache()
    how.set_chunk_cache(slots, max(least, nbytes), 1.0)  # chunks that were read as a whole leave it first
    del dataset  # whoever opens a dataset that is open nowhere else gives its cache a size
    return h5py.Dataset(h5py.h5d.open(file.id, path.encode(), how))


def is_compressed(dataset):
    """Whether the chunks of a dataset go through filters, such as compression."""
    return bool(dataset.chunks and dataset.id.get_create_plist().get_nfilters())


def _chunk_bytes(dataset):
    return prod(dataset.chunks) * dataset.id.get_type().get_size()


def _bytes_of_cut_chunks(dataset, axis):
    """Bytes of the chunks that two pieces in a row may both have parts of."""
    counts = [-(-length // of_chunk) for length, of_chunk in zip(dataset.shape, dataset.chunks)]
    if axis is None or axis >= len(counts):
        axis = next((axis for axis, of_chunk in enumerate(dataset.chunks) if of_chunk > 1), 0)
        counts[:axis] = [1] * axis
    counts[axis] = 1
    return 2 * prod(counts) * _chunk_bytes(dataset) + OTHER_CHUNKS


def listing(tensors):
    """Names, shapes and dtypes, a line each, for errors.  tensors: name -> (shape, dtype name)."""
    lines = [f"\n  {name} {shape} {dtype}" for name, (shape, dtype) in tensors.items()]
    return "".join(lines[:LISTED]) + (f"\n  and {len(lines) - LISTED} more" if len(lines) > LISTED else "")


def needed_bytes(file):
    """The length in bytes that a file must have to hold all its datasets."""
    ends = [file.id.get_filesize()]

    def see(name, about):
        if about.type == h5py.h5o.TYPE_DATASET:
            data = h5py.h5d.open(file.id, name)
            if data.get_offset() is not None:  # contiguous
                ends.append(data.get_offset() + data.get_storage_size())

    h5py.h5o.visit(file.id, see, info=True)
    return max(ends)


def open_to_write(path, create=False):
    """Open a file for writing without MPI.  create: start with an empty file; old contents are lost."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_LATEST)
    access.set_sieve_buf_size(0)  # unbuffered: errors appear in the write, not when a dataset closes
    if create:
        kind = h5py.h5p.create(h5py.h5p.FILE_CREATE)
        kind.set_obj_track_times(False)  # files with the same contents are the same bytes
        return h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, kind, access))
    return h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDWR, fapl=access))


@contextlib.contextmanager
def writing(path, create=False):
    """`open_to_write` as a context; if the body or the flush fails, the contents are lost."""
    file = open_to_write(path, create)
    try:
        yield file
        file.flush()
    except BaseException:
        drop(file)
        raise
    file.close()


def drop(file):
    """Close a file that is not needed: HDF5 flushes to memory instead of to the file.

    On a full or failing file system closing would fail, and HDF5 would crash the process with SIGSEGV at its exit.
    """
    if file.id.valid:
        spare = os.memfd_create("mpiattn")
        os.dup2(spare, file.id.get_vfd_handle(), inheritable=False)
        os.close(spare)
        with contextlib.suppress(KeyError, OSError, RuntimeError):
            for name in list(file):  # memory too may be limited to the length of a file: make it short
                del file[name]
        with contextlib.suppress(OSError, RuntimeError):  # what failed before is what the caller must hear of
            file.close()


def reserve(path):
    """Allocate a file's disk blocks, so that a full disk is reported now and not hours later."""
    with open(path, "r+b") as file, contextlib.suppress(AttributeError):
        length = os.fstat(file.fileno()).st_size
        if length:
            os.posix_fallocate(file.fileno(), 0, length)


def group(file, path):
    """The group of an open file at a path, "" for the file; it and those above it are created where they are not."""
    here = file
    for name in filter(None, path.split("/")):
        here = here[name] if name in here else _new_group(here, name)
    return here


def group_with(file, path, attributes, models):
    """As `group`, with attributes.

    models: a dict that keeps, for more groups of the file, one without a name for each set of attributes: HDF5 copies
    them ten times as fast as it makes them.
    """
    if not path or path in file:
        here = group(file, path)
        here.attrs.update(attributes)
        return here
    key = pickle.dumps(dict(attributes))
    if key not in models:
        models[key] = _new_group(file, None)
        models[key].attrs.update(attributes)
    above, _, name = path.rpartition("/")
    h5py.h5o.copy(models[key].id, b".", group(file, above).id, name.encode())
    return file[path]


def _new_group(here, name):
    """A new group; None for one without a name, which the file loses when it is closed."""
    how = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    how.set_obj_track_times(False)  # files with the same contents are the same bytes
    how.set_attr_phase_change(*FEW_ATTRIBUTES)
    return h5py.Group(h5py.h5g.create(here.id, name and name.encode(), gcpl=how))


def create_datasets(group, shapes):
    """Create empty contiguous datasets in a group, allocated at once.  shapes: name -> (shape, dtype)."""
    for name, (shape, dtype) in shapes.items():
        how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        how.set_obj_track_times(False)  # files with the same contents are the same bytes
        h5py.h5d.create(group.id, name.encode(), stored_type(np.dtype(dtype)), h5py.h5s.create_simple(shape), how)
