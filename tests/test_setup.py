"""setup.py: without a C compiler the CPU kernels are left out, and all else is there; what its variables may be."""

import os
import platform
import subprocess
import sys
import zipfile

import launch
import pytest

from mpiattn.backends.cpu import library
from mpiattn.system import host

pytestmark = pytest.mark.workshop


def setup(*words, **environment):
    """The outcome of setup.py."""
    if int((host.version("setuptools") or "0").split(".")[0]) < 77:
        pytest.skip("takes setuptools from 77")
    return subprocess.run(
        [sys.executable, "setup.py", *words],
        cwd=launch.ROOT,
        env={**os.environ, "MPIATTN_BUILD_KERNELS": "", **environment},
        capture_output=True,
        text=True,
        timeout=120 * launch.time_factor(),
    )


def sets_in(folder):
    """Names of the sets of a library of kernels, and which of all this processor has, best first."""
    built = folder / "mpiattn/backends/cpu/_kernels.so"
    code = (
        "from mpiattn.backends.cpu import library; "
        f"library.PATH = library.Path({str(built)!r}); "
        "print(*(name for name, state in library.instruction_sets().items() if state.compiled)); "
        "print(*(name for name, state in library.instruction_sets().items() if state.supported and not state.slow))"
    )
    words = [sys.executable, "-c", code]
    said = subprocess.check_output(words, cwd=launch.ROOT, text=True, timeout=launch.patience(30))
    return [line.split() for line in said.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(library.missing() != "", reason=library.missing())
def test_an_installation_has_the_set_of_this_processor(tmp_path):
    """And what that is made of, and the plain one; MPIATTN_BUILD_KERNELS=1 compiles all that the compiler knows."""
    words = "build_ext", "--build-temp", tmp_path / "temp", "--build-lib"
    for environment, folder in (({}, "own"), ({"MPIATTN_BUILD_KERNELS": "1"}, "all")):
        outcome = setup(*words, tmp_path / folder, **environment)
        assert outcome.returncode == 0, outcome.stderr
    compiled, supported = sets_in(tmp_path / "own")
    bases = {"amx": {"avx512"}, "avx512bf16": {"avx512"}}
    assert set(compiled) == {supported[0], "plain"} | bases.get(supported[0], set())
    every, supported = sets_in(tmp_path / "all")
    assert set(every) >= set(supported) | set(compiled)


@pytest.mark.parametrize("compiler", ["/bin/false", "/nowhere/cc"], ids=["broken", "absent"])
def test_without_a_compiler(tmp_path, compiler):
    """The wheel says that it is for every machine."""
    build, wheel = ("build", "--build-base", tmp_path / "base"), ("bdist_wheel", "-b", tmp_path / "b", "-d", tmp_path)
    outcome = setup(*build, *wheel, CC=compiler)
    assert outcome.returncode == 0, outcome.stderr
    assert 'building extension "mpiattn.backends.cpu._kernels" failed' in outcome.stderr
    (path,) = tmp_path.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    zipfile.ZipFile(path).extractall(tmp_path / "lib")
    built = tmp_path / "lib" / "mpiattn"
    assert (built / "backends" / "cpu" / "backend.py").is_file() and not list(built.rglob("*.so"))
    code = "import os; from mpiattn import backends; print(backends.find('cpu').missing()); print(backends.get().name)"
    outcome = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "lib")},
        capture_output=True,
        text=True,
        timeout=60 * launch.time_factor(),
    )
    assert "install mpiattn where there is a C compiler" in outcome.stdout and outcome.stdout.endswith("\nnumpy\n")


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"MPIATTN_BUILD_KERNELS": "no"}, "MPIATTN_BUILD_KERNELS is 'no'; it may be 0"),
        ({"MPIATTN_BUILD_KERNELS": "1", "CC": "/bin/false"}, "/bin/false"),
        ({"MPIATTN_BUILD_KERNELS": "1", "CC": "/nowhere/cc -m64"}, "there is no C compiler /nowhere/cc"),
        ({"_PYTHON_HOST_PLATFORM": "linux-riscv64", "CC": ""}, f"to build for riscv64 on {platform.machine()}, set CC"),
    ],
)
def test_what_fails(environment, text, tmp_path):
    words = "build_ext", "--build-temp", tmp_path / "temp", "--build-lib", tmp_path / "lib"
    outcome = setup(*words, **environment)
    assert outcome.returncode and text in outcome.stderr
    assert not list(tmp_path.rglob("*.so"))
