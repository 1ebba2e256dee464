"""The trial block that every set of CPU kernels computes before it serves: what it finds, and what follows."""

import ctypes
import sys
import warnings

import launch
import numpy as np
import pytest
from cpu_kernels import compiled

from mpiattn import ArgumentError, backends
from mpiattn.backends.cpu import choice, library, trial

pytestmark = compiled


@pytest.fixture(autouse=True)
def own_choice(monkeypatch):
    """The choice of sets is made anew in each test, and after it."""
    monkeypatch.delenv(library.VARIABLE, raising=False)
    for function in (choice.fault, choice._chosen):
        function.cache_clear()
    yield
    for function in (choice.fault, choice._chosen):
        function.cache_clear()


def numbers(array, count, real):
    return np.frombuffer((ctypes.c_char * (count * np.dtype(real).itemsize)).from_address(array.data), real)


def out_of(launch):
    real = "float64" if launch.element == library.ELEMENTS["float64"] else "float32"
    return numbers(launch.out, launch.tokens * launch.value_dim, real)


def rough(launch, run):
    """Scores are a thousandth off."""
    launch.scale *= 1.001
    run()


def loses_nan(launch, run):
    run()
    out = out_of(launch)
    out[np.isnan(out)] = 0


def loses_infinity(launch, run):
    run()
    out = out_of(launch)
    out[np.isinf(out)] = 1e30


def invents_nan(launch, run):
    run()
    out_of(launch)[-1] = np.nan


def ignores_the_mask(launch, run):
    zeros = np.zeros(launch.tokens, np.int32)
    launch.begin = zeros.ctypes.data
    run()


def wrong_in_half(launch, run):
    run()
    if launch.element == library.ELEMENTS["bfloat16"]:
        out_of(launch)[...] *= 1.1


FAULTS = [rough, loses_nan, loses_infinity, invents_nan, ignores_the_mask, wrong_in_half]


def plant(monkeypatch, fault, *names):
    """Let the kernels of these sets compute wrong."""
    right = library.Kernels.run

    def run(self, launch, operation):
        if self.name not in names:
            return right(self, launch, operation)
        return fault(launch, lambda: right(self, launch, operation))

    monkeypatch.setattr(library.Kernels, "run", run)


def test_every_set_that_was_compiled_passes():
    assert {name: choice.fault(name) for name in library.runnable()} == dict.fromkeys(library.runnable(), "")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_it_finds(fault, monkeypatch):
    plant(monkeypatch, fault, "plain")
    assert choice.fault("plain")


def test_a_wrong_set_is_not_taken_and_one_warning_says_so(monkeypatch):
    best, *others = choice._candidates(None)
    if not others:
        pytest.skip("takes two instruction sets")
    plant(monkeypatch, loses_nan, best)
    said = rf"cpu takes the instruction set {others[0]}, .* \({best}: NaN or infinity is lost in out with float32\)"
    with pytest.warns(RuntimeWarning, match=said):
        assert backends.get("cpu").version.startswith(f"{others[0]} ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.get().version.startswith(f"{others[0]} ")
    monkeypatch.setenv(library.VARIABLE, best)
    with pytest.raises(ArgumentError, match=rf"compute a trial block wrong \({best}: NaN"):
        backends.get("cpu")


def test_without_a_right_set_numpy_computes(monkeypatch):
    plant(monkeypatch, rough, *library.runnable())
    assert "plain: out is off by" in backends.find("cpu").missing()
    assert backends.get().name == "numpy"


def test_one_set_is_tried_no_more_than_once(monkeypatch):
    tried = []
    monkeypatch.setattr(trial, "fault", lambda kernels: tried.append(kernels.name) or "")
    for _ in range(3):
        backends.get("cpu").close()
    assert tried == choice._candidates(None)[:1]


def test_info_says_which_sets_are_there_and_that_a_better_one_is_not():
    """As where mpiattn was installed on a login node of an older kind."""
    code = """
import sys
from mpiattn.backends.cpu import library
sets = {name: state._replace(compiled=name == "plain", supported=name in ("plain", "avx2", "sve256"))
        for name, state in library.instruction_sets().items()}
library.instruction_sets = lambda: sets
from mpiattn.cli import main
sys.exit(main(["info"]))
"""
    text = launch.mpirun(1, [sys.executable, "-c", code]).stdout
    lines = {line[:16].strip(): line[16:].strip() for line in text.splitlines()}
    assert lines["sets of cpu"] == "plain"
    better = next(name for name in ("avx2", "sve256") if name in library.instruction_sets())
    assert lines[f"not {better}"] == "it was not compiled"
    assert lines["ADVICE"].startswith(f"{better} is faster on this processor: install mpiattn on this processor, or")
