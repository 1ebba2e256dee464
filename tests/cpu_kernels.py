"""The back end cpu on a given instruction set, for the tests of its kernels."""

from contextlib import contextmanager

import pytest

from mpiattn import backends
from mpiattn.backends.cpu import library

compiled = pytest.mark.skipif(not library.PATH.is_file(), reason=f"not compiled: {library.BUILD}")
SETS = ("plain", "avx2", "avx512", "avx512bf16", "amx")
PAIRS = ("avx512bf16", "amx")  # round the weights of bfloat16 inputs to it
WORK = {"float64": "float64", "float32": "float32", "float16": "float32", "bfloat16": "float32"}


@contextmanager
def kernels_of(instruction_set, monkeypatch):
    """The back end on an instruction set; skips the test where this processor or the library lacks it."""
    monkeypatch.setenv(library.VARIABLE, instruction_set)
    if why := backends.find("cpu").missing():
        pytest.skip(why)
    made = backends.get("cpu")
    yield made
    made.close()
