"""What is installed: kernels, tests and Slurm's scripts lie in the package as mpiattn/kernels and so on.

The CPU kernels are compiled into mpiattn/backends/cpu/_kernels.so, a plain library.  Without a C compiler the rest is
installed, without the back end `cpu`.  `python setup.py build_ext --inplace` compiles them in a checkout.  All else
about the package stands in pyproject.toml.
"""

import hashlib
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

LEAST = 77  # of pip's isolated builds too, see pyproject.toml
if int(setuptools.__version__.split(".")[0]) < LEAST:
    sys.exit(f"setuptools is {setuptools.__version__}; it must be {LEAST} or newer: pip install -U setuptools")

here = Path(__file__).parent
SOURCES = sorted(str(path.relative_to(here)) for path in (here / "kernels" / "cpu").glob("*.[ch]"))
DIGEST = hashlib.sha256(b"".join((here / path).read_bytes() for path in SOURCES)).hexdigest()
FLAGS = ["-g0", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-psabi"]
# The compiler's options for every instruction set; each gets the same sources, once for float and once for double.
# Compiling is most of an installation's time, so what few processors run is optimized less.
# Sets that an older compiler or assembler does not know are left out; `plain` it must know.
SETS = {"plain": ["-O2"]}
# More sets, which differ from avx512 in products of bfloat16 alone, pair by pair.
OF_PAIRS = {}
if platform.machine() in ("x86_64", "AMD64"):
    SETS = {
        "plain": ["-O1"],
        "avx2": ["-O2", "-mavx2", "-mfma", "-mf16c"],
        "avx512": ["-O3", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"],
    }
    OF_PAIRS["avx512bf16"] = [*SETS["avx512"], "-mavx512bf16"]
    if platform.system() == "Linux":
        OF_PAIRS["amx"] = [*OF_PAIRS["avx512bf16"], "-mamx-tile", "-mamx-bf16"]
elif (platform.system(), platform.machine()) == ("Linux", "aarch64"):
    SVE = ["-O3", "-march=armv8.2-a+sve"]
    SETS["sve256"] = [*SVE, "-msve-vector-bits=256"]
    SETS["sve512"] = [*SVE, "-msve-vector-bits=512"]
REAL_BYTES = {"float": 4, "double": 8}


class BuildKernels(build_ext):
    """Compiles the kernels once for every instruction set and accumulation dtype, and links them into one library."""

    def build_extension(self, ext):
        """Compile and link; CompileError or LinkError if that fails."""

        def compiled(source, name, macros, options=()):
            return self.compiler.compile(
                [f"kernels/cpu/{source}"],
                f"{self.build_temp}/{name}",
                macros,
                extra_postargs=[*FLAGS, *options],
                depends=SOURCES,
            )

        def kernels(name, table, size, options):
            try:
                return compiled("kernels.c", table, [("TABLE", table), ("REAL_BYTES", str(size))], options)
            except CompileError:
                if name == "plain":
                    raise
                return None

        parts = [
            (name, f"{name}_{real}", size, options)
            for name, options in SETS.items()
            for real, size in REAL_BYTES.items()
        ]
        parts += [(name, f"{name}_pairs", 4, options) for name, options in OF_PAIRS.items()]
        with ThreadPoolExecutor() as pool:  # a compiler takes seconds for each
            made = list(zip(parts, pool.map(kernels, *zip(*parts))))
        unknown = {name for (name, *_), objects in made if objects is None}
        macros = [(f"WITH_{name}", "1") for name in (*SETS, *OF_PAIRS) if name not in unknown]
        objects = compiled("choose.c", "choose", [("DIGEST", f'"{DIGEST}"'), *macros])
        objects += compiled("scatter.c", "scatter", [], ["-O2"])
        objects += [path for (name, *_), paths in made if name not in unknown for path in paths]
        self.compiler.link_shared_object(objects, self.get_ext_fullpath(ext.name), libraries=["m"])

    def get_ext_filename(self, fullname):
        """No name of a Python extension, which this is not."""
        return fullname.replace(".", "/") + ".so"


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
    ext_modules=[Extension("mpiattn.backends.cpu._kernels", SOURCES, optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
