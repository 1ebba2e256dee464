"""The registry of back ends: what each name means, and that names stand nowhere else."""

import ast
import re

import launch
import pytest

from mpiattn import ArgumentError, backends
from mpiattn.backends import registry
from mpiattn.backends.base import Backend
from mpiattn.backends.cuda import arrays, cudnn_library
from mpiattn.backends.numpy.backend import NumpyBackend
from mpiattn.comm.available import _described

PACKAGE = launch.ROOT / "mpiattn"


@pytest.mark.parametrize("entry", registry.REGISTRY.values(), ids=lambda entry: entry.name)
def test_entries(entry):
    backend_class = entry.load()
    assert entry.parameters or backend_class.name == entry.name
    assert "float32" in backend_class.dtypes and isinstance(entry.missing(), str)
    lacks = [name for name in vars(Backend) if not name.startswith("_") and not hasattr(backend_class, name)]
    assert not set(lacks) - {"transport", "version"}, "of the protocol, besides what instances have"


def test_properties():
    assert backends.usages(on_gpu=True) == ["cuda", "cuda+cudnn"]
    assert backends.usages(tests=False) == ["numpy", "cpu[:THREADS]", "cuda", "cuda+cudnn"]
    assert not any(backends.find(name).tests for name in registry.AUTO), "auto is never a back end for tests"
    assert backends.candidates("auto") == registry.AUTO and backends.candidates("deferred") == ("deferred",)


@pytest.mark.parametrize(
    "name", ["abacus", "numpy:", "cuda:0", "cuda+", "cuda+cudnn:1", "paced", "numpy:2", "auto:1", "", None, 3]
)
def test_names_that_are_none(name):
    message = f"backend is {name!r}; it may be auto, numpy, cpu[:THREADS], cuda, cuda+cudnn, def"
    with pytest.raises(ArgumentError, match=re.escape(message)):
        backends.find(name)


def test_a_broken_installation_is_a_reason(monkeypatch):
    """Whatever it raises: a rank that raised alone would leave the others waiting."""

    def broken():
        raise OSError("libcuda.so.1: too short")

    monkeypatch.setattr(NumpyBackend, "missing", broken)
    assert backends.find("numpy").missing() == "OSError: libcuda.so.1: too short"
    with pytest.raises(ArgumentError, match=r"backend is 'numpy', which cannot run on .*: OSError: libcuda\.so\.1"):
        backends.get("numpy")


def test_auto_is_the_first_that_runs(monkeypatch):
    monkeypatch.setattr(registry, "AUTO", ("emulated", "numpy"))
    monkeypatch.setattr("mpiattn.backends.testing.emulated.compiler", lambda: None)
    assert backends.get().name == "numpy"
    monkeypatch.setattr("mpiattn.backends.testing.emulated.compiler", lambda: "c++")
    assert backends.get().name == "emulated"


def test_hosts_and_reasons():
    ranks = [("a", "no GPU"), ("a", "no GPU"), ("b", ""), ("c", "no GPU"), ("d", "no CuPy")]
    assert _described(ranks) == "on a (ranks 0, 1), c (rank 3): no GPU; on d (rank 4): no CuPy"
    many = [(f"node{i}", "no GPU") for i in range(9)]
    assert _described(many).startswith("on node0 (rank 0), ") and "and 5 more hosts: no GPU" in _described(many)


@pytest.mark.workshop
def test_the_extras_exist():
    project = (launch.ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in project for extra in (*arrays.EXTRAS, cudnn_library.EXTRA))


@pytest.mark.workshop
def test_names_stand_nowhere_else():
    """No module but those of the back ends compares with a name of one."""
    places = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if {PACKAGE / "backends", launch.TESTS, launch.SLURM} & set(path.parents):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and "device.type" not in ast.unparse(node):  # torch's names
                places += [
                    f"{path.name}:{node.lineno}"
                    for part in ast.walk(node)
                    if isinstance(part, ast.Constant) and part.value in registry.REGISTRY
                ]
            elif isinstance(node, ast.Constant) and node.value in registry.usages(tests=True):
                places.append(f"{path.name}:{node.lineno}")
    assert not places
