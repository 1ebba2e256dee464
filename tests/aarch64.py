"""The kernels of the back end cpu compiled for aarch64, which QEMU runs: NEON, and SVE of 256 and 512 bits.

A launch is sent to a process that is emulated (kernels/emulation/launches.c), with copies of its arrays.
"""

import ctypes
import functools
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import launch
import numpy as np
import pytest

from mpiattn.backends.cpu import library
from mpiattn.system.sources import kernel_dir

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
FLAGS = ("-O2", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-static", "-pthread", "-Wall", "-Wno-psabi")
# Options of the compiler for each instruction set, and the emulated processor that takes it.
SVE = ("-O3", "-march=armv8.2-a+sve")
SETS = {
    "plain": ((), "max,sve-default-vector-length=16"),
    "sve256": ((*SVE, "-msve-vector-bits=256"), "max,sve-default-vector-length=32"),
    "sve512": ((*SVE, "-msve-vector-bits=512"), "max,sve-default-vector-length=64"),
}
NAME = 16  # bytes
POSITIONS = "rows", "keys", "heads"  # of dropout
LISTS = "begin", "end", "pages", "tables", *POSITIONS
ARRAYS = "q", "k", "v", "out", "lse", "dout", "delta", "dq", "dk", "dv", "other", "other_lse", "bias", "dbias"
PAIRS = "bias", "dbias"  # with a number of each pair of a row and a key
OF_KEYS = "k", "v", "dk", "dv"  # with rows of keys and KV heads, the others of tokens and heads
OF_HEAD_DIM = "q", "k", "dq", "dk"
NUMBERS = "lse", "delta", "other_lse"  # one a row
INPUTS = "q", "k", "v", "dout"  # of the inputs' dtype
RESULTS = {
    "forward": ("out", "lse"),
    "decode": ("out", "lse"),
    "merge": ("out", "lse"),
    "sink": ("out", "lse"),
    "backward": ("dq", "dk", "dv", "dbias"),
    "delta": ("delta",),
    "narrow": ("out",),
}
BYTES = 4, 8, 2, 2  # of a number, by element
REAL = "float32", "float64", "float32", "float32"  # of a launch, by its inputs' element


@functools.cache
def _program():
    """The compiled program: its folder, removed at exit, and path; skips the test where it cannot be had."""
    for name in (COMPILER, EMULATOR):
        if not shutil.which(name):
            pytest.skip(f"no {name} on this machine")
    temporary, sources = tempfile.TemporaryDirectory(), kernel_dir()
    folder = Path(temporary.name)
    parts = [
        (f"{name}_{real}", "cpu/kernels.c", f"-DTABLE={name}_{real}", f"-DREAL_BYTES={size}", f"-DSET_{name}", *options)
        for name, (options, _) in SETS.items()
        for real, size in (("float", 4), ("double", 8))
    ]
    parts.append(("choose", "cpu/choose.c", '-DDIGEST=""', *(f"-DWITH_{name}" for name in SETS)))
    parts.append(("launches", "emulation/launches.c"))
    objects = []
    for name, source, *options in parts:
        objects.append(folder / f"{name}.o")
        subprocess.run(
            [COMPILER, *FLAGS, f"-I{sources / 'cpu'}", *options, "-c", sources / source, "-o", objects[-1]],
            check=True,
            timeout=launch.patience(300),
        )
    subprocess.run(
        [COMPILER, *FLAGS, *objects, "-lm", "-o", folder / "launches"], check=True, timeout=launch.patience(60)
    )
    return temporary, folder / "launches"


class Kernels:
    """As `mpiattn.backends.cpu.library.Kernels`, on an emulated processor; never asks its caller meanwhile.

    The processor is one whose best instruction set is that of the name.  program: the words that follow the emulator's
    options, if not what is compiled here.
    """

    def __init__(self, name, program=()):
        self.name, self.version = name, f"{name} aarch64"
        command = [EMULATOR, "-cpu", SETS[name][1], *(program or [_program()[1]])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._read(NAME).rstrip(b"\0").decode() == name

    def scratch_bytes(self, launch, operation):
        return 0  # the other process has its own

    def run(self, launch, operation):
        arrays = {
            name: _pairs(launch, operation, name) if name in PAIRS else _rows(launch, operation, name)
            for name in ARRAYS
            if getattr(launch, name).data
        }
        if launch.dv.data == launch.dk.data:  # shared keys and values: both gradients are added to one array
            arrays.pop("dv", None)
        results = [name for name in RESULTS[operation] if name in arrays]
        lists = [name for name in LISTS if getattr(launch.dropout if name in POSITIONS else launch, name)]
        data = {name: _list(launch, operation, name) for name in lists}
        sent = type(launch).from_buffer_copy(launch)
        for name, array in arrays.items():
            data[name] = array.tobytes()
            place = library.Array(0, array.itemsize * array.shape[1], array.itemsize)
            if name in PAIRS:  # contiguous, an axis of length 1 with a stride of 0
                sequence, head, token = (
                    0 if length == 1 else stride for length, stride in zip(array.shape, array.copy().strides)
                )
                if operation != "decode":
                    sequence -= _heads_of_sequence(launch) * head
                place = library.Array(0, token, head, sequence)
            setattr(sent, name, place)
        if "dv" not in arrays:
            sent.dv = sent.dk
        names = (*LISTS, *ARRAYS)
        header = struct.pack(
            f"=ii{len(names)}q",
            library.OPERATIONS[operation],
            sum(1 << names.index(name) for name in results),
            *(len(data.get(name, "")) for name in names),
        )
        self._process.stdin.write(b"".join([header, bytes(sent), *(data[name] for name in names if name in data)]))
        self._process.stdin.flush()
        _, stopped = struct.unpack("=qi", self._read(12))
        for name in sorted(results, key=names.index):
            array = arrays[name]
            array[...] = np.frombuffer(self._read(len(data[name])), array.dtype).reshape(array.shape)
        return bool(stopped)

    def close(self):
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        self._process.stdout.close()

    def _read(self, count):
        data = self._process.stdout.read(count)
        assert len(data) == count, f"the emulated process ended with {self._process.wait(60)}"
        return data


def program_of(path, folder):
    """The words by which the emulator starts the same program with a library's kernels.  folder: for what is made."""
    compiler, root = shutil.which(COMPILER), Path("/usr/aarch64-linux-gnu")  # with the C library
    if not compiler or not shutil.which(EMULATOR) or not root.is_dir():
        pytest.skip(f"no {COMPILER}, {EMULATOR} or {root} on this machine")
    sources, program = kernel_dir(), folder / "launches"
    flags = [flag for flag in FLAGS if flag != "-static"]
    command = [compiler, *flags, f"-I{sources / 'cpu'}", sources / "emulation/launches.c", path, "-o", program]
    subprocess.run([*command, f"-Wl,-rpath,{path.parent}"], check=True, timeout=launch.patience(60))
    return "-L", root, program


def _rows(launch, operation, name):
    """A launch's array as one of rows, each of them one item."""
    field, of_keys = getattr(launch, name), name in OF_KEYS
    count, heads = (launch.keys, launch.kv_heads) if of_keys else (launch.tokens, launch.heads)
    if operation == "decode" and of_keys:
        pages = _numbers(launch.pages, _numbers(launch.tables, launch.sequences + 1, np.int64)[-1], np.int32)
        count = (pages.max(initial=-1) + 1) * launch.page_size
    dim = 1 if name in NUMBERS else launch.head_dim if name in OF_HEAD_DIM else launch.value_dim
    element = library.ELEMENTS[REAL[launch.element]]
    if name in INPUTS or (name == "out" and operation in ("delta", "narrow")):
        element = launch.element
    described = {
        "shape": (count, heads),
        "strides": (field.token, field.head),
        "typestr": f"|V{dim * BYTES[element]}",
        "data": (field.data, False),
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=described))


def _heads_of_sequence(launch):
    return launch.heads // max(launch.sequences, 1)


def _pairs(launch, operation, name):
    """A bias or its gradient, (sequences, heads, tokens) of rows, each of them one item; 1 sequence with pages."""
    field, heads = getattr(launch, name), _heads_of_sequence(launch)
    element = launch.bias_element if name == "bias" else library.ELEMENTS[REAL[launch.element]]
    strides = field.sequence + heads * field.head, field.head, field.token
    shape, keys = [launch.sequences, heads, launch.tokens], launch.keys
    if operation == "decode":
        strides, shape, keys = (0, *strides[1:]), [1, launch.heads, launch.tokens], field.head // BYTES[element]
    described = {
        "shape": tuple(length if stride else 1 for length, stride in zip(shape, strides)),
        "strides": strides,
        "typestr": f"|V{keys * BYTES[element]}",
        "data": (field.data, False),
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=described))


def _list(launch, operation, name):
    if name in POSITIONS:
        count = {"rows": launch.tokens, "keys": launch.keys, "heads": launch.heads}[name]
        numbers = _numbers(getattr(launch.dropout, name), count, np.int32)
    elif name == "tables":
        numbers = _numbers(launch.tables, launch.sequences + 1, np.int64)
    elif name == "pages":
        numbers = _numbers(launch.pages, _numbers(launch.tables, launch.sequences + 1, np.int64)[-1], np.int32)
    else:
        rows = launch.tokens if operation == "decode" else launch.groups * launch.tokens * launch.lists
        numbers = _numbers(getattr(launch, name), rows, np.int32)
    return numbers.tobytes()


def _numbers(address, count, dtype):
    memory = (ctypes.c_char * (int(count) * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)
