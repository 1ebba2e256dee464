"""What docs/packaging/wheels.py builds: tags, contents, and an installation where nothing else can be had."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import aarch64
import launch
import pytest
from blocks import chunks, dense, partial, windows
from dense import error

from mpiattn import backends
from mpiattn.backends.block import BlockInputs
from mpiattn.backends.cpu import library
from mpiattn.system import host
from mpiattn.version import __version__

pytestmark = [pytest.mark.workshop, pytest.mark.skipif(not launch.DOCS.is_dir(), reason="takes the docs of a checkout")]
PACKAGING = launch.DOCS / "packaging"
WHEELS = PACKAGING / "wheels.py"
MADE = "MPIATTN_WHEELS"  # a folder of what wheels.py has built of this checkout
FOLDERS = "docs", "kernels", "mpiattn", "slurm", "tests"
FILES = "LICENSE", "README.md", "pyproject.toml", "setup.py"
NO_COMPILER = {"PATH": "/nowhere", "CC": ""}


def run(words, timeout=300, **environment):
    """What a command printed, and its errors; the test fails if it does."""
    outcome = subprocess.run(
        [*map(str, words)],
        env={**os.environ, "PYTHONPATH": "", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=launch.patience(timeout),
    )
    assert outcome.returncode == 0, outcome.stdout
    return outcome.stdout


def build(out, *words):
    if int((host.version("setuptools") or "0").split(".")[0]) < 77:
        pytest.skip("takes setuptools from 77")
    run([sys.executable, WHEELS, "--out", out, *words], timeout=600)
    return out


def only(folder, pattern):
    (path,) = folder.glob(pattern)
    return path


def wheel_for(every, machine):
    if MADE in os.environ and not list(every.glob(f"*_{machine}.whl")):
        pytest.skip(f"{MADE} has no wheel for {machine}")
    return only(every, f"*_{machine}.whl")


@pytest.fixture(scope="module")
def pure(tmp_path_factory):
    """A folder with the source distribution and the wheel without kernels."""
    return build(tmp_path_factory.mktemp("pure"), "--only", "pure")


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """A folder with all that wheels.py builds."""
    if MADE in os.environ:
        return Path(os.environ[MADE])
    if not importlib.util.find_spec("auditwheel") or not shutil.which(aarch64.COMPILER):
        pytest.skip(f"takes auditwheel and {aarch64.COMPILER}")
    return build(tmp_path_factory.mktemp("every"))


@pytest.fixture(scope="module")
def packages(tmp_path_factory, every):
    """A folder with all packages that an installation takes, besides mpiattn."""
    folder = tmp_path_factory.mktemp("packages")
    wheel = only(every, "*-any.whl")
    words = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "-d", folder]
    run([*words, f"mpiattn[mpich] @ {wheel.as_uri()}", "setuptools>=77"])
    only(folder, "mpiattn-*").unlink()
    return folder


def tracked(folder):
    """Files of a folder of the checkout, without what is built or left there."""
    for path in (launch.ROOT / folder).rglob("*"):
        if path.is_file() and path.suffix not in (".so", ".pyc") and "egg-info" not in str(path):
            yield path.relative_to(launch.ROOT).as_posix()


def contents(wheel):
    """{name: bytes} of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def test_recipes_ask_for_what_the_package_asks():
    """The lower bounds of pyproject.toml, its Python and setuptools, and this version."""
    text = (launch.ROOT / "pyproject.toml").read_text()
    bounds = re.findall(r'"([\w-]+)>=([\d.]+)[^"]*"', re.search(r"^dependencies = \[(.*)\]$", text, re.MULTILINE)[1])
    recipe, spack = ((PACKAGING / name).read_text() for name in ("recipe.yaml", "spack/package.py"))
    assert len(bounds) == 6
    for name, version in [*bounds, re.search(r'requires = \["(setuptools)>=([\d.]+)"', text).groups()]:
        assert re.search(rf"^    - {name} >={version}(,!=[\d.]+)*$", recipe, re.MULTILINE)
        assert f'depends_on("py-{name.replace("_", "-")}@{version}:"' in spack
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', text)
    assert f'depends_on("python@{python}:"' in spack
    assert f"version: {__version__}\n" in recipe and f'version("{__version__}"' in spack
    easybuild = only(PACKAGING, f"mpiattn-{__version__}-*.eb").read_text()
    assert f"\nversion = '{__version__}'\n" in easybuild


def test_source(pure):
    """Every file of the checkout's folders, and no more but what setuptools adds."""
    with tarfile.open(only(pure, "*.tar.gz")) as archive:
        names = {name.name.split("/", 1)[1] for name in archive.getmembers() if name.isfile()}
    expected = {*FILES, *(name for folder in FOLDERS for name in tracked(folder))}
    assert names - {"PKG-INFO", "setup.cfg"} - {name for name in names if "egg-info" in name} == expected


def assert_whole(files, wheel):
    """A wheel has the package with tests, kernels and batch scripts, and nothing that names this machine's folders."""
    expected = set(tracked("mpiattn")) | {
        f"mpiattn/{name}" for folder in ("kernels", "slurm") for name in tracked(folder)
    }
    expected |= {f"mpiattn/{name}" for name in tracked("tests") if name.endswith(".py")}
    rest = {name for name in files if ".dist-info/" not in name}
    assert rest - {"mpiattn/backends/cpu/_kernels.so"} == expected
    assert {"mpiattn/py.typed", "mpiattn/slurm/run.sbatch", "mpiattn/tests/launch.py"} <= rest
    for path in {str(launch.ROOT), str(Path.home()), sys.prefix, str(wheel.parent)}:
        assert not [name for name, data in files.items() if path.encode() + b"/" in data], f"{path} is in them"


def test_pure_wheel(pure, tmp_path):
    wheel = only(pure, "*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    files = contents(wheel)
    assert_whole(files, wheel)
    assert not [name for name in files if name.endswith(".so")]
    (tags,) = (data.decode() for name, data in files.items() if name.endswith("/WHEEL"))
    assert "Root-Is-Purelib: true" in tags and "Tag: py3-none-any\n" in tags


@pytest.mark.slow
def test_the_same_source_gives_the_same_wheel(pure, tmp_path):
    assert only(build(tmp_path, "--only", "pure"), "*.whl").read_bytes() == only(pure, "*.whl").read_bytes()


def needed_glibc(data):
    """The newest version of glibc of which a library uses a symbol, by its string table."""
    names = {name for name in data.split(b"\0") if name.startswith(b"GLIBC_2.")}
    return max(tuple(int(number) for number in name[6:].split(b".")) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "number"), [("x86_64", 62), ("aarch64", 183)], ids=["x86_64", "aarch64"])
def test_wheels_with_kernels(machine, number, every):
    """number: of the processor, in ELF's header."""
    wheel = wheel_for(every, machine)
    files = contents(wheel)
    assert_whole(files, wheel)
    kernels = files["mpiattn/backends/cpu/_kernels.so"]
    assert kernels[:4] == b"\x7fELF" and int.from_bytes(kernels[18:20], "little") == number
    assert {name for name in kernels.split(b"\0") if b".so." in name} == {b"libc.so.6", b"libm.so.6"}
    tag = "py3-none-manylinux_{}_{}_".format(*needed_glibc(kernels)) + machine
    assert wheel.name.endswith(f"-{tag}.whl")
    (tags,) = (data.decode() for name, data in files.items() if name.endswith("/WHEEL"))
    assert "Root-Is-Purelib: false" in tags and [line for line in tags.splitlines() if "Tag:" in line] == [
        f"Tag: {tag}"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["*.tar.gz", "*-any.whl", f"*_{platform.machine()}.whl"])
def test_installed_without_a_network_or_a_compiler(file, every, packages, tmp_path):
    """In a bare environment, of these files alone; then generate, run and info on two ranks."""
    venv.create(tmp_path / "venv", with_pip=False)
    bin, words = tmp_path / "venv/bin", ["install", "-q", "--no-index", "--find-links", packages]
    target = f"mpiattn[mpich] @ {only(every, file).as_uri()}"
    lone = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_NO_CACHE_DIR": "1"}
    run([sys.executable, "-m", "pip", "--python", bin / "python", *words, target], **NO_COMPILER, **lone)
    lone = {"PATH": f"{bin}:/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1"}
    sizes = "--seqlen", "300", "--heads", "2", "--head-dim", "16"
    run([bin / "mpiattn", "generate", tmp_path / "qkv.h5", *sizes], **lone)
    arguments = "run", tmp_path / "qkv.h5", tmp_path / "out.h5", "--causal", "--verify"
    assert (
        ": passed"
        in launch.limited(
            [bin / "mpiexec", "-n", "2", bin / "mpiattn", *arguments], 60, {**os.environ, "PYTHONPATH": "", **lone}
        ).stdout
    )
    said = run([bin / "mpiattn", "info"], **lone)
    assert ("install mpiattn where there is a C compiler" in said) == ("_" not in file)


@pytest.mark.slow
@pytest.mark.parametrize("name", aarch64.SETS)
def test_kernels_of_the_wheel_for_aarch64(name, every, tmp_path, monkeypatch):
    """They load, take the emulated processor's set, and attend."""
    path = tmp_path / "_kernels.so"
    path.write_bytes(contents(wheel_for(every, "aarch64"))["mpiattn/backends/cpu/_kernels.so"])
    kernels = aarch64.Kernels(name, aarch64.program_of(path, tmp_path))
    monkeypatch.setattr(library, "Kernels", lambda name: kernels)
    backend, inputs = backends.get("cpu"), (*chunks(40, 50, dtype="float32"), *windows(40, 50))
    out, lse = partial(backend, 40, 2, 6, "float32")
    backend.attend(BlockInputs(*inputs, 0.3, None), out, lse)
    backend.close()
    kernels.close()
    assert error(out, dense(*inputs, 0.3)[0]) < 1e-5
