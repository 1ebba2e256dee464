"""What is installed: kernels, tests and Slurm's scripts lie in the package as mpiattn/kernels and so on.

The CPU kernels are compiled into mpiattn/backends/cpu/_kernels.so, a plain library, which every Python takes.  Without
a C compiler the rest is installed, without the back end `cpu`.  `python setup.py build_ext --inplace` compiles them in
a checkout.  All else about the package stands in pyproject.toml.

The kernels are those of the best instruction set of this machine's processor, and `plain`, which every processor has.

Environment: CC, CPPFLAGS, CFLAGS and LDFLAGS; what Python itself was compiled with is left out, but for the name of its
compiler.  Options by which kernels would be wrong, such as -ffast-math and -march=native, are set back after these.
MPIATTN_BUILD_KERNELS=1 compiles every instruction set, and fails where that can't be done; =0 leaves the kernels out.
_PYTHON_HOST_PLATFORM=linux-aarch64 with CC=aarch64-linux-gnu-gcc builds for another processor than this one's.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError

LEAST = 77  # of pip's isolated builds too, see pyproject.toml
if int(setuptools.__version__.split(".")[0]) < LEAST:
    sys.exit(f"setuptools is {setuptools.__version__}; it must be {LEAST} or newer: pip install -U setuptools")

from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402  (older ones lack it)

SWITCH = "MPIATTN_BUILD_KERNELS"
WANTED = os.environ.get(SWITCH) or None
if WANTED not in (None, "0", "1"):
    sys.exit(
        f"{SWITCH} is {WANTED!r}; it may be 0 (no kernels), 1 (kernels for all processors, or fail) or unset (kernels "
        "for this one, if they compile)"
    )

here = Path(__file__).parent
KERNELS = "mpiattn.backends.cpu._kernels"
SOURCES = sorted(str(path.relative_to(here)) for path in (here / "kernels" / "cpu").glob("*.[ch]"))
DIGEST = hashlib.sha256(b"".join((here / path).read_bytes() for path in SOURCES)).hexdigest()
FLAGS = "-g0 -std=gnu11 -DNDEBUG -fwrapv -fPIC -fno-math-errno -fno-trapping-math -Wall -Wextra -Wno-psabi".split()
# Set back what a site's options or a compiler's defaults may have turned on.  Of these a compiler gets what it knows.
# Kernels count on fused multiply-adds; where one would be wrong they say so (rounded_now of vector.h).
RESET = """
    -fno-fast-math -fno-finite-math-only -fno-associative-math -fno-reciprocal-math -fno-unsafe-math-optimizations
    -fsigned-zeros -fhonor-nans -fhonor-infinities -fno-approx-func -fno-rounding-math -fno-single-precision-constant
    -mrecip=none -ffp-contract=fast
""".split()
# The compiler's options for every instruction set; each gets the same sources, once for float and once for double.
# Compiling is most of an installation's time, so what few processors run is optimized less.
# Sets that an older compiler or assembler does not know are left out; `plain` it must know.
SETS = {"plain": ["-O2"]}
# More sets, which differ from avx512 in products of bfloat16 alone, pair by pair.
OF_PAIRS = {}
SYSTEM, _, MACHINE = sysconfig.get_platform().rpartition("-")  # of the target, which _PYTHON_HOST_PLATFORM names
if MACHINE == "x86_64":
    # -mno-sse3 takes away all that came after SSE2, also where it was asked for by name.
    RESET += ["-march=x86-64", "-mno-sse3", "-mno-amx-bf16", "-mno-amx-tile"]
    SETS = {
        "plain": ["-O1"],
        "avx2": ["-O2", "-mavx2", "-mfma", "-mf16c"],
        "avx512": ["-O3", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"],
    }
    OF_PAIRS["avx512bf16"] = [*SETS["avx512"], "-mavx512bf16"]
    if SYSTEM == "linux":
        OF_PAIRS["amx"] = [*OF_PAIRS["avx512bf16"], "-mamx-tile", "-mamx-bf16"]
elif (SYSTEM, MACHINE) == ("linux", "aarch64"):
    RESET += ["-mcpu=generic", "-march=armv8-a", "-msve-vector-bits=scalable"]
    SVE = ["-O3", "-march=armv8.2-a+sve"]
    SETS["sve256"] = [*SVE, "-msve-vector-bits=256"]
    SETS["sve512"] = [*SVE, "-msve-vector-bits=512"]
REAL_BYTES = {"float": 4, "double": 8}


def options(*names):
    """The words of these variables of the environment."""
    return [word for name in names for word in shlex.split(os.environ.get(name, ""))]


def _known(compiler, words):
    """Those of a compiler's options that this compiler knows."""

    def knows(word):
        command = [*compiler, word, "-fsyntax-only", "-x", "c", os.devnull]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    with ThreadPoolExecutor() as pool:
        return [word for word, known in zip(words, pool.map(knows, words)) if known]


def _of_this_processor(path, names):
    """`plain`, the best instruction set of this machine's processor, and what that is made of.

    path: choose.c, compiled and linked.  All names where it cannot be asked.
    """
    try:
        library = ctypes.CDLL(os.path.abspath(path))
    except OSError:
        return names
    library.mpiattn_instruction_set.restype = ctypes.c_char_p
    number = 0
    while not library.mpiattn_supported(number) or library.mpiattn_slow(number):
        number += 1
    best = library.mpiattn_instruction_set(number).decode()
    return {"plain", best, "avx512"} if best in OF_PAIRS else {"plain", best}


class BuildKernels(build_ext):
    """Compiles the kernels once for every instruction set and accumulation dtype, and links them into one library."""

    def build_extension(self, ext):
        """Compile and link; CompileError or LinkError if that fails."""
        if SYSTEM == "linux" and platform.machine() != MACHINE and not os.environ.get("CC"):
            sys.exit(f"to build for {MACHINE} on {platform.machine()}, set CC to a compiler for {MACHINE}")
        target = self.get_ext_fullpath(ext.name)
        Path(target).unlink(missing_ok=True)  # so that a failure leaves no older one
        # The options of Python's own build name its folders, and may be for another processor.
        compiler = options("CC") or shlex.split(sysconfig.get_config_var("CC") or "cc")
        self.compiler.set_executables(
            compiler_so=[*compiler, *options("CPPFLAGS", "CFLAGS")],
            linker_so=[*compiler, "-shared", *options("CFLAGS", "LDFLAGS")],
        )
        if shutil.which(compiler[0]) is None:
            raise CompileError(f"there is no C compiler {compiler[0]}")
        reset = _known(compiler, RESET)

        def compiled(source, name, macros, arguments=()):
            return self.compiler.compile(
                [f"kernels/cpu/{source}"],
                f"{self.build_temp}/{name}",
                macros,
                extra_postargs=[*reset, *FLAGS, *arguments],
                depends=SOURCES,
            )

        def chooser(name, sets):
            macros = [("DIGEST", f'"{DIGEST}"'), *((f"WITH_{each}", "1") for each in sets)]
            return compiled("choose.c", name, macros, ["-O2"])

        def linked(objects, path):
            # -Ofast or -ffast-math would link code that turns denormal numbers off in all of the process.
            self.compiler.link_shared_object(objects, path, libraries=["m"], extra_postargs=[*reset, "-O2"])

        def kernels(name, table, size, arguments):
            macros = [("TABLE", table), ("REAL_BYTES", str(size)), (f"SET_{name}", "1")]
            try:
                return compiled("kernels.c", table, macros, arguments)
            except CompileError:
                if name == "plain":
                    raise
                return None

        wanted = {*SETS, *OF_PAIRS}
        if WANTED is None and platform.machine() == MACHINE:
            asked = f"{self.build_temp}/asked.so"
            linked(chooser("asked", []), asked)
            wanted = _of_this_processor(asked, wanted)
        parts = [
            (name, f"{name}_{real}", size, arguments)
            for name, arguments in SETS.items()
            for real, size in REAL_BYTES.items()
        ]
        parts += [(name, f"{name}_pairs", 4, arguments) for name, arguments in OF_PAIRS.items()]
        # The slowest to compile come first, so that no core waits for one that began last.
        parts = [part for part in reversed(parts) if part[0] in wanted]
        with ThreadPoolExecutor() as pool:  # a compiler takes seconds for each
            made = list(zip(parts, pool.map(kernels, *zip(*parts))))
        unknown = {name for (name, *_), objects in made if objects is None}
        if "avx512" in unknown:
            unknown.update(OF_PAIRS)
        objects = chooser("choose", [name for name in (*SETS, *OF_PAIRS) if name in wanted - unknown])
        objects += compiled("scatter.c", "scatter", [], ["-O2"])
        objects += [path for (name, *_), paths in made if name not in unknown for path in paths]
        linked(objects, target)

    def get_ext_filename(self, fullname):
        """No name of a Python extension, which this is not."""
        return fullname.replace(".", "/") + ".so"


class Wheel(bdist_wheel):
    """One wheel for every Python, as the kernels are no Python extension; for every machine if they aren't there."""

    def run(self):
        """Build first, since only then it is known whether there are kernels."""
        self.reinitialize_command("build_ext").inplace = False
        self.run_command("build")
        self.skip_build = True
        built = Path(self.get_finalized_command("build").build_lib)
        if not (built / KERNELS.replace(".", "/")).with_suffix(".so").is_file():
            self.distribution.ext_modules, self.root_is_pure = [], True
        super().run()

    def get_tag(self):
        """("py3", "none", platform)."""
        return ("py3", "none", super().get_tag()[2])


class Source(sdist):
    """With docs/, to which the README links, and all of tests/."""

    def make_release_tree(self, base_dir, files):
        """Copy what setuptools finds, and those."""
        paths = [path for folder in ("docs", "tests") for path in Path(folder).rglob("*") if path.is_file()]
        more = {str(path) for path in paths if "__pycache__" not in path.parts}
        super().make_release_tree(base_dir, sorted({*files, *more}))


setup(
    packages=[
        *find_packages(include=["mpiattn", "mpiattn.*"]),
        "mpiattn.kernels",
        "mpiattn.tests",
        "mpiattn.tests.mpi",
        "mpiattn.tests.gpu",
        "mpiattn.slurm",
    ],
    package_dir={"mpiattn.kernels": "kernels", "mpiattn.tests": "tests", "mpiattn.slurm": "slurm"},
    package_data={
        "mpiattn": ["py.typed"],
        "mpiattn.embed": ["source/*"],
        "mpiattn.kernels": ["README.md", "cpu/*", "cuda/*", "emulation/*"],
        "mpiattn.slurm": ["README.md", "*.sh", "*.sbatch"],
    },
    ext_modules=[Extension(KERNELS, SOURCES, optional=WANTED is None)] if WANTED != "0" else [],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel, "sdist": Source},
)
