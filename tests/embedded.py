"""The library for C programs, built once for all tests of a process, and called from Python as a C program calls it."""

import ctypes
import os
import shutil
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import mpiattn
from mpiattn.embed.arrays import NAMES
from mpiattn.embed.build import BuildError, Installed, build

NUMBERS = {name: number for number, name in NAMES.items()}
MISSING = [
    words
    for words, there in (
        ("a C compiler", shutil.which((os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0])),
        ("Python.h", Path(sysconfig.get_path("include"), "Python.h").is_file()),
    )
    if not there
]
needed = pytest.mark.skipif(bool(MISSING), reason=f"no {' and no '.join(MISSING)}")


@cache
def installed(cc=None):
    """Where the library is, compiled with this command; what it takes is in a folder that ends with the process."""
    folder = tempfile.TemporaryDirectory(prefix="mpiattn-embed-")
    installed.folders.append(folder)
    try:
        build(folder.name, cc=cc)
    except BuildError as error:
        if "libpython" not in str(error):
            raise
        pytest.skip(str(error))
    return Installed(folder.name)


installed.folders = []


class Handle(ctypes.Structure):
    """A handle of mpiattn.h."""

    _fields_ = [("number", ctypes.c_int64)]


class Array(ctypes.Structure):
    """`mpiattn_array` of mpiattn.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("axes", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 8),
        ("strides", ctypes.c_int64 * 8),
    ]


def described(array, strided=False):
    """A NumPy array as a pointer to its description, None as NULL; strided: with strides."""
    if array is None:
        return None
    strides = [n // array.itemsize for n in array.strides] if strided or not array.flags.c_contiguous else []
    shape = (ctypes.c_int64 * 8)(*array.shape)
    of = Array(array.ctypes.data, NUMBERS[array.dtype.name], array.ndim, shape, (ctypes.c_int64 * 8)(*strides))
    return ctypes.byref(of)


class Library:
    """The functions of a library as methods, which return their status."""

    def __init__(self, path):
        self._library = ctypes.CDLL(str(path))
        self._library.mpiattn_last_error.restype = self._library.mpiattn_version.restype = ctypes.c_char_p
        self._library.mpiattn_failed_ranks.restype = ctypes.c_int64

    def __getattr__(self, name):
        return getattr(self._library, f"mpiattn_{name}")

    def ok(self, name, *arguments):
        """Call a function that must succeed: NumPy arrays become descriptions, text and ints what C takes."""
        status = getattr(self, name)(*[_argument(argument) for argument in arguments])
        assert not status, f"{name}: status {status}, {self.error()}"

    def fails(self, name, *arguments):
        """(status, text) of a function that must fail."""
        status = getattr(self, name)(*[_argument(argument) for argument in arguments])
        assert status, f"{name} succeeded"
        return status, self.error()

    def error(self):
        """The text of the last error."""
        return self._library.mpiattn_last_error().decode()

    def failed_ranks(self, most=9):
        """How many ranks the last error is about, and up to `most` of them."""
        ranks = (ctypes.c_int64 * most)()
        count = self._library.mpiattn_failed_ranks(ctypes.c_int64(most), ranks)
        return count, ranks[: min(count, most)]

    def new(self, name, *arguments):
        """The handle that a function makes, which writes it into its last argument."""
        handle = Handle()
        self.ok(name, *arguments, ctypes.byref(handle))
        return handle

    def integer(self, name, *arguments):
        """The number that a function writes into its last argument."""
        value = ctypes.c_int64()
        self.ok(name, *arguments, ctypes.byref(value))
        return value.value

    def integers(self, name, count, *arguments):
        """The numbers that a function writes, of which its last two arguments are the count and the memory."""
        values = np.full(count, -1, np.int64)
        self.ok(name, *arguments, ctypes.c_int64(count), ctypes.c_void_p(values.ctypes.data))
        return values


def _argument(argument):
    if isinstance(argument, str):
        return argument.encode()
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    if isinstance(argument, np.integer):
        return ctypes.c_int64(int(argument))
    return described(argument) if isinstance(argument, np.ndarray) else argument


NONE = Handle(0)
ARGUMENT, HANDLE, CALL, PEER, OF_MPI, FILE, VERIFY = range(1, 8)


def arrays_of(plan, seed, dtype="float32"):
    """(q, k, v, dout) of this rank, drawn."""
    p, rng = plan.problem, np.random.default_rng(seed)
    tokens, tokens_k = len(plan.positions), len(plan.positions_k)
    shapes = (tokens, p.heads, p.head_dim), (tokens_k, p.kv_heads, p.head_dim), (tokens_k, p.kv_heads, p.value_dim)
    return [rng.standard_normal((p.batch, *shape)).astype(dtype) for shape in (*shapes, (tokens, p.heads, p.value_dim))]


def both(c, comm, text, **options):
    """A plan of C and the same plan of Python."""
    return c.new("plan_create_text", comm.py2f(), text), mpiattn.MeshAttention(comm, timeout=60, **options)


def text_of(c, plan, name, size=500):
    text = ctypes.create_string_buffer(size)
    c.ok("plan_text", plan, name, text, ctypes.c_size_t(size))
    return text.value.decode()


def options_of(c, **values):
    """Options of C: arrays, lists, numbers and texts, each by its own function."""
    options = c.new("options_create", "")
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            c.ok("options_set_array", options, name, value)
        elif isinstance(value, list):
            numbers = np.array(value, np.int64)
            memory = ctypes.c_void_p(numbers.ctypes.data)
            c.ok("options_set_integers", options, name, ctypes.c_int64(len(value)), memory)
        elif isinstance(value, float):
            c.ok("options_set_real", options, name, value)
        elif isinstance(value, int):
            c.ok("options_set_integer", options, name, ctypes.c_int64(value))
        else:
            c.ok("options_set_text", options, name, value)
    return options


def changed(q, **fields):
    """A description of q with other fields."""
    of = described(q)._obj
    for name, value in fields.items():
        setattr(of, name, (ctypes.c_int64 * 8)(*value) if isinstance(value, tuple) else value)
    return ctypes.byref(of)
