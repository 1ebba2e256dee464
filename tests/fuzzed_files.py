"""Input files as nobody would write them, made at random, and what is promised of them.

    python tests/fuzzed_files.py --examples 5000 --seed 1     more of them than the tests make, each in a child process

Promised is an error that names the argument and the file, or the numbers that somebody wrote; no other exception, no
wait, and no fill values for what is not there.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import h5py  # noqa: E402
import numpy as np  # noqa: E402
from files import bfloat16_type  # noqa: E402
from mpi4py import MPI  # noqa: E402

from mpiattn import KVCache  # noqa: E402
from mpiattn.cli.biases import RunBiases  # noqa: E402
from mpiattn.cli.documents import read_documents  # noqa: E402
from mpiattn.comm.peers import Peers  # noqa: E402
from mpiattn.errors import ArgumentError, FileError  # noqa: E402
from mpiattn.files.input import Input, Wanted  # noqa: E402
from mpiattn.files.shapes import read_shapes  # noqa: E402
from mpiattn.problem.layout import Layout  # noqa: E402
from mpiattn.problem.problem import Problem  # noqa: E402

SECONDS = 20  # for an example


class Made(NamedTuple):
    """A file.

    given: arguments of `files.shapes.read_shapes`.  numbers: name -> array that somebody wrote.  gone: names of datasets of
    which a part is not there.  sound: whether all fits, so that no error is right.
    """

    path: Path
    given: dict
    numbers: dict
    gone: set
    sound: bool


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


SOUND = [plain, plain, big_endian, chunked, unlimited, compact, outside, soft, hard, linked, virtual]


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
        file[name], file["there"] = h5py.SoftLink("/there"), h5py.SoftLink(f"/{name}")
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
    import ml_dtypes

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


# Files


def odd_shape(rng, shape):
    which = rng.randrange(6)
    if which == 0:
        return tuple(rng.randint(0, 3) for _ in range(rng.randint(0, 6)))
    if which == 1:
        return tuple(rng.choice([n, 0]) for n in shape)
    if which == 2:
        return shape[: rng.randint(0, len(shape))]
    if which == 3:
        return (*shape, rng.randint(1, 2))
    if which == 4:
        return tuple(rng.sample(shape, len(shape)))
    at = rng.randrange(len(shape))
    return (*shape[:at], rng.randint(1, 4), *shape[at + 1 :])


def odd_value(rng, dims):
    return rng.choice(
        [
            *["bshd", "bhsd", b"bhsd", np.bytes_(b"bhsd"), ["bhsd"], "BHSD", "", "ü", b"\xff"],
            *[0, 1, dims, float(dims), dims + 0.5, -1, 2**31, 2**63 - 1, np.nan, np.inf, -np.inf, True, 1j],
            *[[], [dims], [dims, dims], [[dims]], str(dims), np.uint8(dims), h5py.Empty("f4"), np.float128(dims)],
            np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
        ]
    )


NAMES = [
    "q",
    "/q",
    "a/q",
    "ü",
    "q q",
    "q\n",
    "a//q",
    ".",
    "..",
    "/",
    "",
    "q\0",
    "there",
    "x" * 300,
    "../q",
    "'\"",
    "%s",
]


def make(rng, folder):
    """A file in an empty folder; rng: a `random.Random`."""
    oddities = rng.choice([0, 1, 1, 1, 2, 3])
    batch, heads, tokens = rng.randint(1, 2), rng.randint(1, 2), rng.randint(3, 7)
    keys, kv_heads, dim, value = rng.choice([tokens, 9]), rng.choice([1, heads]), rng.randint(1, 4), rng.randint(1, 4)
    grid = (3, 2) if tokens == 6 and rng.random() < 0.7 else None
    axes, said = rng.choice(["bshd", "bhsd"]), rng.choice(["asked", "attribute", "both"])
    shapes = {
        "q": (batch, tokens, heads, dim),
        "k": (batch, keys, kv_heads, dim),
        "v": (batch, keys, kv_heads, value),
        "dout": (batch, tokens, heads, value),
        "bias": (1, 1, tokens, keys),
        "key_bias": (keys,),
        "cu_seqlens": (3,),
    }
    dtype = rng.choice(["f2", "f4", "f8"])
    odd = set(
        rng.sample(["q", "k", "v", "dout", "bias", "key_bias", "cu_seqlens", "axes", "value_dim", "names"], oddities)
    )
    path, numbers, gone = folder / rng.choice(["in.h5", "in.h5", "ü in.h5"]), {}, set()
    with h5py.File(
        path, "w", userblock_size=rng.choice([0, 0, 512]), libver=rng.choice(["earliest", "latest"])
    ) as file:
        for name, shape in shapes.items():
            if name in ("q", "k", "v", "dout"):
                if name in ("q", "dout") and grid:
                    shape = (batch, *grid, heads, shape[3]) if rng.random() < 0.5 else shape
                if axes == "bhsd":
                    shape = (batch, heads if name in ("q", "dout") else kv_heads, *shape[1:-2], shape[-1])
            array = np.random.default_rng(rng.randrange(2**32)).standard_normal(shape)
            of = dtype if name in ("q", "k", "v", "dout") or (name == "bias" and dtype != "f2") else "f4"
            array = array.astype(of if dtype != "f8" else "f8")
            if name == "cu_seqlens":
                array = np.array([0, rng.randint(0, keys), keys])
            _dataset(file, name, array, name in odd, rng, numbers, gone)
        if said != "asked":
            file.attrs["axes"] = axes
        for name in odd & {"axes", "value_dim"}:
            with contextlib.suppress(TypeError, OSError, ValueError):
                file.attrs[name] = odd_value(rng, value)
    given = {"axes": None if said == "attribute" else axes, "grid": grid, "backward": rng.random() < 0.5}
    if "names" in odd:
        given["names"] = {rng.choice("qkv"): rng.choice(NAMES)}
    return Made(path, given, numbers, gone, not odd)


def _dataset(file, name, array, odd, rng, numbers, gone):
    which = rng.randrange(6) if odd else 6
    if which in (0, 1):
        rng.choice(GONE)(file, name, array, rng)
        gone.add(name)
    elif which == 2:
        another_kind(file, name, array, rng)
    elif which == 3:
        array = np.ones(odd_shape(rng, array.shape), array.dtype)
        rng.choice([plain, chunked, virtual])(file, name, array, rng)
    elif which == 4:
        (bfloat16 if array.dtype.kind == "f" else plain)(file, name, array, rng)
    elif which == 6:
        rng.choice(SOUND)(file, name, array, rng)
        numbers[name] = array


def damage(rng, path):
    """Cut a file short, or change some of its bytes."""
    raw = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        del raw[rng.randint(0, len(raw)) :]
    else:
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(min(len(raw), rng.choice([100, 1000, 10**9])))
            raw[at] = rng.choice([0, 255, 1, raw[at] ^ 1 << rng.randrange(8), rng.randrange(256)])
    path.write_bytes(raw)


# What is promised


class BrokenPromise(AssertionError):
    """What is wrong."""


def _promised(work, argument, path, also=()):
    """The value of work(), or None if it raises an error as it should be."""
    try:
        return work()
    except (FileError, ArgumentError) as error:
        text = str(error)
        if not (str(path) in text or repr(str(path))[1:-1] in text or isinstance(error, ArgumentError)):
            raise BrokenPromise(f"the error does not name the file: {error}") from error
        if not (text.startswith((argument, *also)) or isinstance(error, ArgumentError)):
            raise BrokenPromise(f"the error does not name the argument: {error}") from error
        return None
    except Exception as error:
        raise BrokenPromise(f"{type(error).__name__} where a FileError is due: {error}") from error


def judge(made, damaged=False):
    """Read a file in every way that the commands have; BrokenPromise where the numbers or the error are wrong."""
    peers = Peers(MPI.COMM_SELF)
    numbers = {} if damaged else made.numbers
    look = partial(read_shapes, names=made.given.get("names"), grid=made.given["grid"], backward=made.given["backward"])
    here = {"names": made.given.get("names"), "axes": made.given["axes"], "grid": made.given["grid"]}
    source = _promised(lambda: Input(peers, made.path, look=look, **here), "IN", made.path)
    if source is None and made.sound and not damaged:
        raise BrokenPromise("a sound file is refused")
    if source is not None:
        with contextlib.closing(source):
            _judge_tensors(made, source, numbers, damaged)
            for name in ("cu_seqlens", "k", "q"):
                specs = {"cu_seqlens": ("--documents", name)}
                documents = _promised(
                    lambda specs=specs: read_documents(peers, source.file, specs), "--documents", name, ("IN",)
                )
                if documents is not None and name == "cu_seqlens" and name in numbers:
                    _same(documents["cu_seqlens"], numbers[name], name)
                if documents is not None and name in made.gone and not damaged:
                    raise BrokenPromise(f"{name} is not all there, and was read")
            _judge_biases(made, source, damaged)
    _judge_cache(made, damaged)


def _judge_tensors(made, source, numbers, damaged):
    p = source.shapes
    roles = ["q", "k", *["v"] * (not p["shared_kv"]), *["dout"] * made.given["backward"]]
    wanted = [
        Wanted(role, Layout("contiguous", p["seqlen" if role in ("q", "dout") else "seqlen_k"], 1)) for role in roles
    ]
    read = _promised(lambda: source.chunks(wanted), "IN", made.path)
    if read is None:
        if made.sound and not damaged:
            raise BrokenPromise("a sound file is not read")
        return
    for role, array in zip(roles, read):
        name = source.names.get(role, role)
        if name in made.gone and not damaged:
            raise BrokenPromise(f"{name} is not all there, and was read")
        if damaged or (name not in numbers and name != role):
            continue
        right = numbers[name] if name in numbers else _plainly(made.path, name)
        if source.axes == "bhsd":
            right = np.moveaxis(right, 1, -2)
        _same(array, right.reshape(array.shape), name)


def _plainly(path, name):
    with h5py.File(path, "r") as file:
        data = file[name]
        array = data[()]
        if array.dtype.kind == "V":
            import ml_dtypes

            array = array.view(ml_dtypes.bfloat16)
        return array


def _same(array, right, name):
    if not np.array_equal(np.asarray(array, np.float64), np.asarray(right, np.float64), equal_nan=True):
        raise BrokenPromise(f"{name} is read wrongly")


def _judge_biases(made, source, damaged):
    problem = _promised(lambda: Problem(**source.shapes), "", made.path)
    if problem is None:
        return
    for name in ("bias", "key_bias"):
        of = {f"{other}_dataset": name if name == other else None for other in ("bias", "key_bias")}
        args = SimpleNamespace(**of, dropout=0.0, seed=None, alibi=False)
        option = f"--{name.replace('_', '-')}"
        biases = _promised(
            lambda args=args: RunBiases(args, source, problem), option, made.path if damaged else "", ("IN",)
        )
        if biases is None:
            if made.sound and not damaged:
                raise BrokenPromise(f"a sound {name} is refused")
            continue
        if name in made.gone and not damaged:
            raise BrokenPromise(f"{name} is not all there, and was taken")
        plan = SimpleNamespace(
            bias_sequences=slice(0, problem.batch),
            bias_heads=slice(0, problem.heads),
            bias_positions=(np.arange(problem.seqlen), np.arange(problem.seqlen_k)),
            positions_k=np.arange(problem.seqlen_k),
        )
        read = _promised(lambda biases=biases: biases.read(source.peers, plan) or True, "IN", made.path)
        if read and name in made.numbers and not damaged:
            _same(biases.call[name], made.numbers[name], name)


def _judge_cache(made, damaged):
    cache = _promised(
        lambda: KVCache.load(MPI.COMM_SELF, str(made.path), axes=made.given["axes"], padding=True, backend="numpy"),
        "path",
        made.path,
    )
    if cache is None:
        if made.sound and not damaged:
            raise BrokenPromise("a sound cache is refused")
        return
    with cache:
        if not damaged and made.gone & {"k", "cu_seqlens", *["v"] * (len(cache.dims) == 2)}:
            raise BrokenPromise("a cache that is not all there was read")


# By hand


def _example(seed, damaged):
    """Make and judge the example of a number."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="mpiattn-fuzz-") as folder:
        made = make(rng, Path(folder))
        if damaged:
            damage(rng, made.path)
        here = os.getcwd()
        os.chdir(folder)
        try:
            judge(made, damaged)
        finally:
            os.chdir(here)


def _in_child(seeds, damaged, show):
    """Judge examples in a child process; returns the number of those that were, the last one's outcome among them."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for seed in seeds:
            signal.alarm(SECONDS)
            try:
                _example(seed, damaged)
                os.write(writing, b".")
            except BaseException as error:
                os.write(writing, b"x")
                text = traceback.format_exc() if show else f"{type(error).__name__}: {str(error)[:300]}"
                print(f"{seed}: {text}", flush=True)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        done = file.read()
    _, status = os.waitpid(child, 0)
    if status:
        print(f"{seeds[len(done)]}: ended by {signal.Signals(os.WTERMSIG(status)).name}", flush=True)
    return len(done) + bool(status), done.count(b"x") + bool(status)


def main():
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (default: %(default)s)")
    parser.add_argument("--damaged", action="store_true", help="cut them short, or change some of their bytes")
    parser.add_argument("--show", action="store_true", help="where each went wrong")
    args = parser.parse_args()
    first, end, wrong = args.seed, args.seed + args.examples, 0
    while first < end:
        done, bad = _in_child(range(first, min(first + 200, end)), args.damaged, args.show)
        first, wrong = first + done, wrong + bad
    print(f"{args.examples} examples, {wrong} went wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
