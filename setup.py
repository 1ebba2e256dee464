"""Package metadata; kernels, tests and Slurm's scripts are laid into the package as mpiattn/kernels and so on.

The CPU kernels are compiled into mpiattn/backends/cpu/_kernels.so, a plain library.  Without a C compiler the rest is
installed, without the back end `cpu`.  `python setup.py build_ext --inplace` compiles them in a checkout.
"""

import hashlib
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

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


version = re.search(r'__version__ = "(.+)"', (here / "mpiattn" / "__init__.py").read_text())[1]

setup(
    name="mpiattn",
    version=version,
    description="Exact attention for sequences that do not fit one GPU, native to MPI",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[
        *find_packages(include=["mpiattn", "mpiattn.*"]),
        "mpiattn.kernels",
        "mpiattn.tests",
        "mpiattn.tests.mpi",
        "mpiattn.tests.gpu",
        "mpiattn.slurm",
    ],
    package_dir={"mpiattn.kernels": "kernels", "mpiattn.tests": "tests", "mpiattn.slurm": "slurm"},
    ext_modules=[Extension("mpiattn.backends.cpu._kernels", SOURCES, optional=True)],
    cmdclass={"build_ext": BuildKernels},
    package_data={
        "mpiattn": ["py.typed"],
        "mpiattn.kernels": ["README.md", "cpu/*", "cuda/*", "emulation/*"],
        "mpiattn.slurm": ["README.md", "*.sh", "*.sbatch"],
    },
    install_requires=["numpy>=1.25", "mpi4py>=3.1", "h5py>=3.7", "tqdm>=4.60", "ml_dtypes>=0.3", "threadpoolctl>=3.5"],
    extras_require={
        "mpich": ["mpich>=4.3"],
        "openmpi": ["openmpi>=5.0"],
        "impi": ["impi-rt>=2021.14"],
        # CuPy knows bfloat16 from this NumPy on
        "cuda13": ["cupy-cuda13x[ctk]>=14", "numpy>=2.1.2"],
        "cuda12": ["cupy-cuda12x[ctk]>=14", "numpy>=2.1.2"],
        "cudnn": ["nvidia-cudnn-frontend>=1.18,<1.27", "nvidia-cudnn-cu13>=9.19"],  # later ones bring a compiler
        "cuda-compile": ["cuda-bindings>=13", "nvidia-cuda-nvrtc>=13", "nvidia-cuda-nvdisasm>=13"],
        "convert": ["safetensors>=0.4", "torch>=2.5"],
        "plot": ["matplotlib>=3.8"],
        "test": ["pytest>=7.4", "pytest-xdist>=3.7", "hypothesis>=6.100"],
        "dev": ["pre-commit>=3.5", "mypy>=1.11"],
        "bench": ["torch>=2.5"],
        "torch": ["torch>=2.5"],
        "docs": ["sphinx>=7.3", "myst-parser>=3", "numpydoc>=1.7", "furo"],
    },
    entry_points={"console_scripts": ["mpiattn = mpiattn.cli:main"]},
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering",
    ],
)
