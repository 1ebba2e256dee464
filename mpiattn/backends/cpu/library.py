"""The library of CPU kernels (kernels/cpu), loaded once a process; ctypes gives up the interpreter lock in its calls.

Environment: MPIATTN_CPU_KERNELS=amx, avx512bf16, avx512, avx2, sve512, sve256 or plain takes that instruction set in
place of the best that the processor has.
"""

import ctypes
import hashlib
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ...system.host import BLAS_VARIABLES, cores
from ...system.launch_variables import local_ranks
from ...system.sources import kernel_dir

VARIABLE = "MPIATTN_CPU_KERNELS"
PATH = Path(__file__).parent / "_kernels.so"
BUILD = "python setup.py build_ext --inplace"
ALL_SETS = "install mpiattn on this processor, or with MPIATTN_BUILD_KERNELS=1, which compiles all sets"
ELEMENTS = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
OPERATIONS = {"forward": 0, "backward": 1, "decode": 2, "merge": 3, "sink": 4, "delta": 5, "narrow": 6}
Poll = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_double)
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
SCATTER = [_POINTER, *[_NUMBER] * 2, *[_POINTER] * 2, *[_NUMBER] * 3, *[_POINTER] * 2, *[_NUMBER] * 2]


def threads():
    """Threads of this process's launches: as many as BLAS has by its variables, else its share of the host's cores."""
    for name in BLAS_VARIABLES:
        if os.environ.get(name, "").isdigit() and int(os.environ[name]):
            return int(os.environ[name])
    return max(1, len(cores()) // local_ranks())


class Array(ctypes.Structure):
    """`struct array` of kernels/cpu/launch.h."""

    _fields_ = [("data", ctypes.c_void_p), *((stride, ctypes.c_int64) for stride in ("token", "head", "sequence"))]


class Dropout(ctypes.Structure):
    """`struct dropout` of kernels/cpu/launch.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "keys", "heads")),
        ("seed", ctypes.c_uint64),
        ("threshold", ctypes.c_uint32),
    ]


class Launch(ctypes.Structure):
    """`struct launch` of kernels/cpu/launch.h."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in ("element", "groups", "heads", "kv_heads", "head_dim", "value_dim", "threads", "lists")
        ),
        ("tokens", ctypes.c_int64),
        ("keys", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("begin", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        *(
            (name, Array)
            for name in ("q", "k", "v", "out", "lse", "dout", "delta", "dq", "dk", "dv", "other", "other_lse")
        ),
        ("bias", Array),
        ("dbias", Array),
        ("dropout", Dropout),
        *((name, ctypes.c_int32) for name in ("bias_element", "sequences", "page_size")),
        ("pages", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("poll", Poll),
        ("scratch", ctypes.c_void_p),
    ]


@cache
def _load():
    """The library; OSError if it cannot be loaded."""
    library = ctypes.CDLL(str(PATH))
    library.mpiattn_instruction_set.restype = ctypes.c_char_p
    library.mpiattn_scratch_bytes.restype = library.mpiattn_launch_bytes.restype = ctypes.c_int64
    library.mpiattn_sources_digest.restype = ctypes.c_char_p
    for function in (library.mpiattn_scratch_bytes, library.mpiattn_run):
        function.argtypes = [ctypes.c_int, ctypes.POINTER(Launch), ctypes.c_int]
    return library


class InstructionSet(NamedTuple):
    """Whether kernels were compiled for a set, whether this processor has it, and whether a later one is faster."""

    compiled: bool
    supported: bool
    slow: bool


@cache
def instruction_sets():
    """All sets of this architecture by name, the best first."""
    library, sets = _load(), {}
    questions = library.mpiattn_compiled, library.mpiattn_supported, library.mpiattn_slow
    while name := library.mpiattn_instruction_set(len(sets)):
        sets[name.decode()] = InstructionSet(*(bool(question(len(sets))) for question in questions))
    return sets


def runnable():
    """Names of the sets that were compiled and that this processor has, the best first."""
    return [name for name, state in instruction_sets().items() if state.compiled and state.supported]


@cache
def _digest():
    """Of the kernels' sources, as setup.py makes it."""
    paths = sorted((kernel_dir() / "cpu").glob("*.[ch]"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def missing():
    """Why there are no kernels for this process and what to do; "" if there are."""
    if not PATH.is_file():
        return (
            "its kernels were not compiled; install mpiattn where there is a C compiler, or, in a checkout, run "
            f"{BUILD}"
        )
    if _load().mpiattn_sources_digest().decode() != _digest():
        return f"its kernels were compiled from other sources than these; run {BUILD}"
    if _load().mpiattn_launch_bytes() != ctypes.sizeof(Launch):
        return (
            f"its kernels take launches of {_load().mpiattn_launch_bytes()} bytes, and library.py makes them of "
            f"{ctypes.sizeof(Launch)}: give its Launch the fields of kernels/cpu/launch.h"
        )
    wanted = os.environ.get(VARIABLE)
    if wanted and wanted not in runnable():
        return f"{VARIABLE} is {wanted}; on this processor it may be {', '.join(runnable())}{_how_to_get(wanted)}"
    return ""


def _how_to_get(name):
    """Advice about a set that this processor has and that was not compiled; "" for others."""
    state = instruction_sets().get(name)
    if state is None or not state.supported:
        return ""
    return f"; {name} was not compiled: {ALL_SETS}"


class Kernels:
    """The kernels of an instruction set; `missing` must be "", and the set `runnable`."""

    def __init__(self, name):
        self._library = _load()
        self.name, self.version = name, f"{name} {_digest()[:12]}"
        self._number = list(instruction_sets()).index(name)
        self.scatter = self._library.mpiattn_scatter  # of kernels/cpu/scatter.c
        self.scatter.argtypes, self.scatter.restype = SCATTER, None

    def scratch_bytes(self, launch, operation):
        """Bytes of scratch memory that a launch needs."""
        return self._library.mpiattn_scratch_bytes(self._number, launch, OPERATIONS[operation])

    def run(self, launch, operation):
        """Run a launch; returns whether its `poll` stopped it."""
        return bool(self._library.mpiattn_run(self._number, launch, OPERATIONS[operation]))
