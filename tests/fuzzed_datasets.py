"""Datasets as nobody would write them, and such as hold all their numbers in whatever way.

Each is a function of (open file, name, array, `random.Random`).
"""

import contextlib
import os
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
from files import bfloat16_type

# Datasets that hold all their numbers: (file, name, array, rng)


def chunks(rng, shape):
    return tuple(rng.randint(1, n) for n in shape)


def plain(file, name, array, rng):
    file.create_dataset(name, data=array)


def big_endian(file, name, array, rng):
    file.create_dataset(name, data=array, dtype=array.dtype.newbyteorder(">"))


def chunked(file, name, array, rng):
    how = rng.choice([{}, {"compression": "gzip"}, {"shuffle": True}, {"fletcher32": True}, {"compression": "lzf"}])
    if array.size and array.ndim:
        file.create_dataset(name, data=array, chunks=chunks(rng, array.shape), **how)
    else:
        plain(file, name, array, rng)


def unlimited(file, name, array, rng):
    if array.size and array.ndim:
        most = tuple(rng.choice([None, n, n + 3]) for n in array.shape)
        file.create_dataset(name, data=array, maxshape=most, chunks=chunks(rng, array.shape))
    else:
        plain(file, name, array, rng)


def compact(file, name, array, rng):
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_layout(h5py.h5d.COMPACT)
    if array.nbytes > 60_000:
        return plain(file, name, array, rng)
    space, kind = h5py.h5s.create_simple(array.shape), h5py.h5t.py_create(array.dtype)
    data = h5py.h5d.create(_parent(file, name).id, _last(name), kind, space, how)
    data.write(h5py.h5s.ALL, h5py.h5s.ALL, array)


def outside(file, name, array, rng):
    """Its numbers lie in one or two plain files."""
    raw, path = array.tobytes(), f"{file.filename}.{_last(name).decode()}.raw"
    cut = rng.randint(0, len(raw))
    Path(path).write_bytes(raw[:cut] + b"between" + raw[cut:])
    if not raw:
        return plain(file, name, array, rng)
    parts = [(path, 0, cut), (path, cut + 7, len(raw) - cut)]
    file.create_dataset(name, array.shape, array.dtype, external=[part for part in parts if part[2]])


def soft(file, name, array, rng):
    plain(file, f"there/{_last(name).decode()}", array, rng)
    file[name] = h5py.SoftLink(f"/there/{_last(name).decode()}")


def hard(file, name, array, rng):
    plain(file, f"there/{_last(name).decode()}", array, rng)
    file[name] = file[f"there/{_last(name).decode()}"]


def linked(file, name, array, rng):
    with _other(file, name) as other:
        rng.choice([plain, chunked, outside])(other, "x", array, rng)
    file[name] = h5py.ExternalLink(os.path.basename(other_path(file, name)), "x")


def virtual(file, name, array, rng):
    """Of one or more other datasets, perhaps of this file."""
    if not array.size or not array.ndim:
        return plain(file, name, array, rng)
    layout, cut = h5py.VirtualLayout(array.shape, array.dtype), rng.randint(0, array.shape[0])
    inside = rng.random() < 0.3
    for i, some in enumerate((slice(0, cut), slice(cut, array.shape[0]))):
        if some.start < some.stop:
            with contextlib.nullcontext(file) if inside else _other(file, name, i) as other:
                part = f"part{i} of {_last(name).decode()}"
                plain(other, part, array[some], rng)
                layout[some] = h5py.VirtualSource(
                    "." if inside else os.path.basename(other_path(file, name, i)), part, array[some].shape
                )
    file.create_virtual_dataset(name, layout, fillvalue=rng.choice([None, 0, 7]))


def packed(file, name, array, rng):
    """As netCDF's writers pack numbers; a power of 2 changes no digit."""
    if array.dtype.kind != "f":
        plain(file, name, array, rng)
        file[name].attrs["_FillValue"] = array.dtype.type(-9)
        return
    factor = array.dtype.type(0.5)
    rng.choice([plain, big_endian, chunked, unlimited])(file, name, array / factor, rng)
    file[name].attrs["scale_factor"] = factor
    fill = rng.choice([{}, {"_FillValue": np.nan}, {"missing_value": [1e30, -1e30]}, {"valid_range": [-1e30, 1e30]}])
    if array.dtype.itemsize > 2:
        file[name].attrs.update({key: np.asarray(value, array.dtype) for key, value in fill.items()})


SOUND = [packed, plain, plain, big_endian, chunked, unlimited, compact, outside, soft, hard, linked, virtual]


# Datasets of which a part is not there


def never(file, name, array, rng):
    if array.size and array.ndim:
        file.create_dataset(name, array.shape, array.dtype, **rng.choice([{}, {"chunks": True}]))


def partly(file, name, array, rng):
    """Some chunks were never written."""
    if array.size and array.ndim and array.shape[0] > 1:
        data = file.create_dataset(
            name, array.shape, array.dtype, chunks=(1, *array.shape[1:]), compression=rng.choice([None, "gzip"])
        )
        data[: rng.randint(1, len(array) - 1)] = 1


def gap(file, name, array, rng):
    if array.size and array.ndim and array.shape[0] > 1:
        layout, short = h5py.VirtualLayout(array.shape, array.dtype), array[1:]
        with _other(file, name) as other:
            plain(other, "x", short, rng)
        layout[1:] = h5py.VirtualSource(os.path.basename(other_path(file, name)), "x", short.shape)
        file.create_virtual_dataset(name, layout)


def source_gone(file, name, array, rng):
    """A virtual one whose source lacks something."""
    if not array.size or not array.ndim:
        return
    layout, which = h5py.VirtualLayout(array.shape, array.dtype), rng.randrange(8)
    path = other_path(file, name)
    if which == 1:
        os.mkfifo(path)
    elif which == 2:
        Path(path).write_bytes(rng.choice([b"", b"none", b"\x89HDF\r\n\x1a\n"]))
    elif which == 3:
        os.mkdir(path)
    elif which > 3:
        with _other(file, name) as other:
            if which == 4:
                other.create_group("x")
            elif which == 5:
                other.create_dataset("x", array.shape, array.dtype)
            elif which == 6:
                other["x"] = h5py.SoftLink("nowhere")
            elif len(array) > 1:
                plain(other, "x", array[1:], rng)
    name_of_it = "." if which == 0 and rng.random() < 0.5 else os.path.basename(path)
    layout[...] = h5py.VirtualSource(name_of_it, rng.choice(["x", "/x"]), array.shape)
    file.create_virtual_dataset(name, layout)


def outside_gone(file, name, array, rng):
    path, size = f"{file.filename}.{_last(name).decode()}.raw", array.nbytes
    if not size:
        return
    which = rng.randrange(4)
    if which == 1:
        Path(path).write_bytes(bytes(rng.randint(0, size - 1)))
    elif which == 2:
        os.mkfifo(path)
    elif which == 3:
        os.mkdir(path)
    file.create_dataset(name, array.shape, array.dtype, external=[(path, rng.choice([0, 8]), size)])


def nowhere(file, name, array, rng):
    """Links that lead to nothing."""
    path = os.path.basename(other_path(file, name))
    which = rng.randrange(9)
    if which == 0:
        file[name] = h5py.SoftLink(rng.choice(["nowhere", "/a/b", name, f"/{name}", ".", "..", "/"]))
    elif which == 1:
        file[name], file[f"{name}2"] = h5py.SoftLink(f"/{name}2"), h5py.SoftLink(f"/{name}")
    elif which == 2:
        file[name] = h5py.ExternalLink(os.path.basename(file.filename), rng.choice([name, f"/{name}", "x"]))
    elif which == 3:
        os.mkfifo(other_path(file, name))
        file[name] = h5py.ExternalLink(path, "x")
    elif which == 4:
        os.mkdir(other_path(file, name))
        file[name] = h5py.ExternalLink(path, "x")
    elif which == 5:
        Path(other_path(file, name)).write_bytes(b"no HDF5 file")
        file[name] = h5py.ExternalLink(path, "x")
    elif which == 6:
        with _other(file, name) as other:
            other["x"] = h5py.ExternalLink(os.path.basename(file.filename), name)
        file[name] = h5py.ExternalLink(path, "x")
    elif which == 7:
        file[name] = h5py.ExternalLink(rng.choice([path, "/dev/stdin", "/dev/zero", "a\nb", "ü/%b"]), "x")
    else:
        with _other(file, name) as other:
            other["x/y"] = 3
        file[name] = h5py.ExternalLink(path, rng.choice(["x", "/", "y"]))


GONE = [never, partly, gap, source_gone, outside_gone, nowhere]


# What is no dataset of a tensor's numbers


def another_kind(file, name, array, rng):
    """A group, a type, no dataspace, or elements that are no floating-point numbers."""
    group, key = _parent(file, name), _last(name)
    which = rng.randrange(20)
    shape = array.shape or (2,)
    dtypes = [
        "i4",
        "u8",
        "i1",
        "?",
        "c8",
        "c16",
        "S5",
        "S2",
        "M8[s]",
        "g",
        "V3",
        "V2",
        "V1",
        [("a", "f4"), ("b", "i2")],
    ]
    if which == 0:
        file.create_group(name)
    elif which == 1:
        file[name] = np.dtype("f4")
    elif which == 2:
        file[name] = h5py.Empty(rng.choice(["f4", "f8"]))
    elif which == 3:
        file.create_dataset(name, shape, h5py.string_dtype(), data=np.full(shape, "text", object))
    elif which == 4:
        file.create_dataset(name, shape, h5py.vlen_dtype(np.float32))
    elif which == 5:
        file.create_dataset(name, shape, rng.choice([h5py.ref_dtype, h5py.regionref_dtype]))
    elif which == 6:
        file.create_dataset(name, shape, h5py.enum_dtype({"a": 1, "b": 2}, "i4"))
    elif which < 12:
        kinds = h5py.h5t
        kind = rng.choice(
            [
                kinds.STD_B8LE,
                kinds.STD_B16BE,
                kinds.array_create(kinds.NATIVE_FLOAT, (2, 3)),
                _float(1, (7, 3, 4, 0, 3), 7),
                _float(1, (7, 2, 5, 0, 2), 15),
                _float(2, (15, 7, 8, 0, 7), rng.choice([100, 128])),
                _float(4, (31, 20, 11, 0, 20), 1023),
                _float(8, (63, 48, 15, 0, 48), 16383),
                _float(3, (23, 16, 7, 0, 16), 63),
                _float(2, (15, 10, 5, 0, 10), 3),
            ]
        )
        data = h5py.h5d.create(group.id, key, kind, h5py.h5s.create_simple(shape))
        with contextlib.suppress(TypeError, OSError, ValueError):
            data.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ones(shape, "f4"), h5py.h5t.NATIVE_FLOAT)
    else:
        with contextlib.suppress(TypeError):  # h5py stores no times
            file.create_dataset(name, data=np.zeros(shape, rng.choice(dtypes)))


def _float(size, fields, bias):
    kind = h5py.h5t.IEEE_F64LE.copy()
    kind.set_precision(8 * size) if size == 8 else None
    kind.set_fields(*fields)
    kind.set_ebias(bias)
    if size < 8:
        kind.set_precision(8 * size)
        kind.set_size(size)
    return kind


def bfloat16(file, name, array, rng):
    """Rounded; as a float or as opaque elements."""
    narrow = array.astype(ml_dtypes.bfloat16)
    if rng.random() < 0.5:
        return plain(file, name, narrow, rng)
    h5py.h5d.create(_parent(file, name).id, _last(name), bfloat16_type(), h5py.h5s.create_simple(array.shape))
    file[name][...] = narrow.astype(np.float32)


def other_path(file, name, number=0):
    return f"{file.filename}.{_last(name).decode()}.{number}.h5"


def _other(file, name, number=0):
    return h5py.File(other_path(file, name, number), "w")


def _parent(file, name):
    return file.require_group(name.rpartition("/")[0] or "/")


def _last(name):
    return name.rpartition("/")[2].encode()
