"""Kernels compiled with a site's options, by GCC and Clang, are right: setup.py sets back what makes them wrong."""

import os
import platform
import shutil
import subprocess
import sys

import launch
import pytest

from mpiattn.backends.cpu import library
from mpiattn.system import host

pytestmark = [
    pytest.mark.slow,
    pytest.mark.workshop,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="options of x86-64"),
    pytest.mark.skipif(library.missing() != "", reason=library.missing()),
]
# Compilers with options that sites give or that are their own defaults: fast arithmetic, or another processor's sets.
BUILDS = [
    ("gcc", "-O3 -ffast-math", ""),
    ("gcc", "-Ofast -march=native -fsingle-precision-constant", "-Ofast"),
    ("gcc", "-O2 -ftree-vectorize -march=sapphirerapids -fno-math-errno", ""),
    ("gcc -mavx512bf16 -mamx-bf16", "-ffp-contract=off -ffinite-math-only", ""),
    ("clang -ffp-model=fast", "-O2", ""),
    ("clang", "-Ofast -march=native", "-ffast-math"),
    ("clang", "-O2 -march=sapphirerapids -ffp-contract=off", ""),
]
TURNED_OFF = ("__FAST_MATH__", "__FINITE_MATH_ONLY__", "__ASSOCIATIVE_MATH__", "__RECIPROCAL_MATH__")
TURNED_OFF += ("__NO_SIGNED_ZEROS__",)


def run(words, timeout, **environment):
    """What a command printed; the test fails if it does."""
    outcome = subprocess.run(
        [*map(str, words)],
        cwd=launch.ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=launch.patience(timeout),
    )
    assert outcome.returncode == 0, outcome.stdout
    return outcome.stdout


@pytest.mark.parametrize(
    ("compiler", "flags", "of_linker"),
    [pytest.param(*build, marks=pytest.mark.turn(i, len(BUILDS))) for i, build in enumerate(BUILDS)],
)
def test_kernels_compiled_with_these_options_are_right(compiler, flags, of_linker, tmp_path):
    if not shutil.which(compiler.split()[0]) or int((host.version("setuptools") or "0").split(".")[0]) < 77:
        pytest.skip(f"takes {compiler.split()[0]} and setuptools from 77")
    words = "setup.py", "build_ext", "--build-temp", tmp_path / "temp", "--build-lib", tmp_path
    run([sys.executable, *words], 300, MPIATTN_BUILD_KERNELS="1", CC=compiler, CFLAGS=flags, LDFLAGS=of_linker)
    built = tmp_path / "mpiattn/backends/cpu/_kernels.so"
    assert b"set_fast_math" not in built.read_bytes()  # which turns denormal numbers off in the whole process
    if shutil.which("objdump"):
        assert "tdpbf16ps" in run(["objdump", "-d", built], 60)  # the set amx computes on tiles
    code = (
        "from mpiattn.backends.cpu import choice, library; "
        f"library.PATH = library.Path({str(built)!r}); "
        "print([choice.fault(name) for name in library.runnable()])"
    )
    assert set(run([sys.executable, "-c", code], 60).strip("[]\n").split(", ")) == {"''"}
    words = "-m", "pytest", "-q", "tests/test_cpu.py", "tests/test_cpu_pairs.py"
    run([sys.executable, *words], 300, MPIATTN_TEST_KERNELS=str(built))


def test_a_compiler_that_hides_its_options_is_found_out(tmp_path):
    """Plain kernels whose compiler says nothing of the options that it takes: the trial block sees it."""
    sources, built = launch.ROOT / "kernels/cpu", tmp_path / "_kernels.so"
    fast = ["-ffast-math", *(f"-U{name}" for name in TURNED_OFF)]
    common = ["-O2", "-std=gnu11", "-fPIC", "-fno-math-errno", "-Wno-psabi"]
    objects = []
    for real, size in (("float", 4), ("double", 8)):
        objects.append(tmp_path / f"{real}.o")
        macros = f"-DTABLE=plain_{real}", f"-DREAL_BYTES={size}"
        run(["gcc", *common, *fast, *macros, "-c", sources / "kernels.c", "-o", objects[-1]], 120)
    macros = "-DWITH_plain", f'-DDIGEST="{library._digest()}"'
    rest = sources / "choose.c", sources / "scatter.c", *objects, "-lm"
    run(["gcc", *common, "-shared", *macros, *rest, "-o", built], 60)
    code = (
        "from mpiattn import backends; from mpiattn.backends.cpu import library; "
        f"library.PATH = library.Path({str(built)!r}); "
        "print(backends.find('cpu').missing()); print(backends.get().name)"
    )
    why, name = run([sys.executable, "-c", code], 60, **{library.VARIABLE: ""}).splitlines()
    assert why.startswith("its kernels compute a trial block wrong (plain: NaN or infinity is lost")
    assert name == "numpy"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-ffast-math", "-DSET_plain"], "-ffast-math or -ffinite-math-only is in force"),
        (["-ffinite-math-only", "-DSET_plain"], "-ffast-math or -ffinite-math-only is in force"),
        (["-march=haswell", "-DSET_plain"], "plain is compiled for a processor with AVX"),
        (["-march=haswell", "-DSET_avx512"], "avx512 is compiled without AVX-512"),
        (["-march=skylake-avx512", "-DSET_avx2"], "avx2 is compiled without AVX2 or with AVX-512"),
        (["-march=cooperlake", "-DSET_avx512"], "avx512 is compiled without AVX-512 or with its bfloat16"),
        (["-march=sapphirerapids", "-DSET_avx512bf16"], "avx512bf16 is compiled without it or with AMX"),
        (["-march=cooperlake", "-DSET_amx"], "amx is compiled without AMX"),
    ],
)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_macros_that_contradict_stop_the_compiler(compiler, flags, said):
    if not shutil.which(compiler):
        pytest.skip(f"takes {compiler}")
    source = launch.ROOT / "kernels/cpu/compiler.h"
    words = [compiler, *flags, "-fsyntax-only", "-x", "c", str(source)]
    outcome = subprocess.run(words, capture_output=True, text=True, timeout=launch.patience(20))
    assert outcome.returncode and said in outcome.stderr
