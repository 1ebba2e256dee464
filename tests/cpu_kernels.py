"""The back end cpu on a given instruction set, for the tests of its kernels."""

import os
from contextlib import contextmanager
from pathlib import Path

import aarch64
import pytest

from mpiattn import backends
from mpiattn.backends.cpu import library

if path := os.environ.get("MPIATTN_TEST_KERNELS"):  # those that tests/sanitize.py has compiled
    library.PATH = Path(path)
compiled = pytest.mark.skipif(not library.PATH.is_file(), reason=f"not compiled: {library.BUILD}")
SETS = ("plain", "avx2", "avx512", "avx512bf16", "amx")
EMULATED = [  # one a run
    pytest.param(
        f"aarch64 {name}", marks=[pytest.mark.slow, pytest.mark.turn(i, len(aarch64.SETS))], id=f"aarch64-{name}"
    )
    for i, name in enumerate(aarch64.SETS)
]
PAIRS = ("avx512bf16", "amx")  # round the weights of bfloat16 inputs to it
WORK = {"float64": "float64", "float32": "float32", "float16": "float32", "bfloat16": "float32"}


@contextmanager
def kernels_of(instruction_set, monkeypatch):
    """The back end on an instruction set; skips the test where this processor or the library lacks it.

    "aarch64 SET" is a set of an emulated processor.
    """
    if instruction_set.startswith("aarch64"):
        kernels = aarch64.Kernels(instruction_set.split()[1])
        monkeypatch.setattr(library, "Kernels", lambda name: kernels)
        made = backends.get("cpu")
        yield made
        made.close()
        kernels.close()
        return
    monkeypatch.setenv(library.VARIABLE, instruction_set)
    if why := backends.find("cpu").missing():
        pytest.skip(why)
    made = backends.get("cpu")
    yield made
    made.close()
