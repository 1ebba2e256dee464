"""Tensors in files of several formats, read a piece at a time: .npy, .npz, safetensors, PyTorch and HDF5.

The format is recognised by a file's contents, not by its name.
"""

import contextlib
import math
import os
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import h5py
import numpy as np

from ..errors import FileError
from ..problem.problem import dtype_name
from . import hdf5
from .numbers import Numbers, missing_error
from .presence import missing_source

KINDS = ".npy, .npz, safetensors, PyTorch (.pt) and HDF5"
RAW_BFLOAT16 = np.dtype("V2")  # the dtype of bfloat16 in NumPy's files


class Tensor(NamedTuple):
    """A tensor in an open file.

    dtype: its name.  read: read((*indices, slice)) returns the elements at leading indices and a slice of the next
    axis, in that dtype.  check: raises FileError if numbers that were read are missing.
    """

    shape: tuple
    dtype: str
    read: Callable
    check: Callable = lambda: None


def pieces(shape, limit):
    """Indices for `Tensor.read` that cover the whole shape in order, each of at most `limit` consecutive elements."""
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= limit)
    step = max(1, limit // max(1, math.prod(shape[axis + 1 :])))
    for leading in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], step):
            yield (*leading, slice(start, min(start + step, shape[axis])))


@contextlib.contextmanager
def open_tensors(path, argument="IN", missing="error"):
    """Open a file and give its tensors by name, a dict; the tensor of a .npy file is named after the file.

    missing: as of `mpiattn.files.input.Input`.  Raises FileError, which names the argument.
    """
    hdf5.check_is_file(argument, path)
    with contextlib.ExitStack() as stack:
        with _errors(argument, path):
            tensors = _open(path, argument, missing, stack)
        with _errors(argument, path):
            yield tensors


@contextlib.contextmanager
def _errors(argument, path):
    try:
        with hdf5.file_errors(argument, path, "read"):
            yield
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError) as error:
        raise FileError(f"{argument} is {str(path)!r}; it cannot be read: {error}") from error


def _open(path, argument, missing, stack):
    with open(path, "rb") as file:
        start = file.read(9)
    if start.startswith(b"\x93NUMPY"):
        return {_stem(path): _of_array(np.load(path, mmap_mode="r"))}
    if start.startswith(b"PK"):
        archive = stack.enter_context(zipfile.ZipFile(path))
        members = archive.namelist()
        if members and all(name.endswith(".npy") for name in members):
            return {name[:-4]: _of_member(archive, name, stack) for name in members}
        if any(name.endswith("data.pkl") for name in members):
            return _of_torch(path, argument)
    if start.startswith(b"\x80"):  # a pickle, PyTorch's format before archives
        return _of_torch(path, argument)
    if start[8:] == b"{":
        return _of_safetensors(path, argument, stack)
    if h5py.is_hdf5(path):
        file = stack.enter_context(h5py.File(path, "r"))
        return {
            name: _of_dataset(file, name, data, argument, missing)
            for name, data in hdf5.members(file)
            if isinstance(data, h5py.Dataset)
        }
    why = hdf5.NETCDF3 if hdf5.is_netcdf3(path) else f"it is none of {KINDS}"
    raise FileError(f"{argument} is {str(path)!r}; {why}")


def _stem(path):
    return os.path.splitext(os.path.basename(path))[0]


def _bfloat16():
    """NumPy's dtype bfloat16."""
    return np.dtype(dtype_name("bfloat16"))


def _of_array(array):
    if array.dtype == RAW_BFLOAT16:
        array = array.view(_bfloat16())
    return Tensor(array.shape, array.dtype.name, array.__getitem__)


def _of_member(archive, member, stack):
    """A tensor of a .npz archive, which is decompressed as it is read."""
    stream = stack.enter_context(archive.open(member))
    header = np.lib.format
    version = header.read_magic(stream)
    shape, by_columns, dtype = (header.read_array_header_1_0 if version == (1, 0) else header.read_array_header_2_0)(
        stream
    )
    if by_columns:  # rows are scattered over the whole stream: read all of it
        stream.seek(0)
        return _of_array(header.read_array(stream, allow_pickle=False))
    first = stream.tell()

    def read(index):
        *leading, last = index
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        begin = sum(place * stride for place, stride in zip((*leading, last.start), strides))
        row = strides[len(leading)]
        stream.seek(first + begin * dtype.itemsize)
        data = stream.read((last.stop - last.start) * row * dtype.itemsize)
        array = np.frombuffer(data, dtype).reshape(-1, *shape[len(leading) + 1 :])
        return array.view(_bfloat16()) if dtype == RAW_BFLOAT16 else array

    return Tensor(shape, "bfloat16" if dtype == RAW_BFLOAT16 else dtype.name, read)


def not_there(path, name):
    """What HDF5 does not find of a tensor of this name in a file, in words; "" if that is not why there is none."""
    if not h5py.is_hdf5(path):
        return ""
    with h5py.File(path, "r") as file:
        return missing_source(file, name)


def _of_dataset(file, name, data, argument, missing):
    shape = data.shape

    @cache
    def numbers():
        """Looked up when they are read first: what is wrong with a dataset that nobody reads does not matter."""
        with hdf5.file_errors(argument, file.filename, "read"):
            return Numbers.of(file, name)

    def read(index):
        *leading, last = index
        starts = (*leading, last.start, *[0] * (len(shape) - len(index)))
        count = last.stop - last.start
        array = numbers().read(starts, (*[1] * len(leading), count, *shape[len(index) :]))
        return array.reshape(count, *shape[len(index) :])

    def check():
        count, first = numbers().take_missing()
        if count and missing == "error":
            raise missing_error(argument, file.filename, [numbers().missing_text(name, count, first)])

    try:
        dtype = Numbers(data).dtype
    except ValueError:
        dtype = hdf5.dtype_of(data)
    return Tensor(shape, dtype, read, check)


def _missing(argument, path, kind, package):
    return FileError(
        f"{argument} is {str(path)!r}, {kind}; reading it needs the package {package}, which is not "
        f"installed: pip install {package}, or mpiattn with its extra `convert`"
    )


SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def _of_safetensors(path, argument, stack):
    try:
        import safetensors
    except ImportError:
        raise _missing(argument, path, "safetensors", "safetensors") from None
    _bfloat16()  # registers the dtype with NumPy
    try:
        file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
    except safetensors.SafetensorError as error:
        raise FileError(f"{argument} is {str(path)!r}; it cannot be read: {error}") from None
    parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
    return {
        name: Tensor(tuple(part.get_shape()), SAFETENSORS.get(part.get_dtype(), part.get_dtype()), part.__getitem__)
        for name, part in parts.items()
    }


def _of_torch(path, argument):
    try:
        import torch
    except ImportError:
        raise _missing(argument, path, "PyTorch's", "torch") from None
    import pickle

    how = {"map_location": "cpu", "weights_only": True}  # runs no code of the file
    try:
        try:
            loaded = torch.load(path, mmap=True, **how)
        except RuntimeError:  # old files cannot be mapped
            loaded = torch.load(path, **how)
    except pickle.UnpicklingError as error:
        why = str(error).splitlines()[0]
        raise FileError(f"{argument} is {str(path)!r}; it holds more than tensors, or is damaged: {why}") from None
    return {name: _of_torch_tensor(torch, tensor) for name, tensor in _flat(torch, loaded, "", _stem(path))}


def _flat(torch, content, prefix, alone):
    """Every tensor inside nested dicts and lists with its name, a.b.0; a bare tensor is named `alone`."""
    if isinstance(content, torch.Tensor):
        if content.layout == torch.strided:
            yield prefix.rstrip(".") or alone, content.detach()
    elif isinstance(content, dict | list | tuple):
        for name, inside in content.items() if isinstance(content, dict) else enumerate(content):
            yield from _flat(torch, inside, f"{prefix}{name}.", alone)


def _of_torch_tensor(torch, tensor):
    dtype = str(tensor.dtype).removeprefix("torch.")

    def read(index):
        part = tensor[index]
        return part.view(torch.int16).numpy().view(_bfloat16()) if dtype == "bfloat16" else part.numpy()

    return Tensor(tuple(tensor.shape), dtype, read)
