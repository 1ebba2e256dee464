"""Package metadata; kernels, tests and Slurm's scripts are laid into the package as mpiattn/kernels and so on."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (here / "mpiattn" / "__init__.py").read_text())[1]

setup(
    name="mpiattn",
    version=version,
    description="Exact attention for sequences that do not fit one GPU, native to MPI",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["mpiattn", "mpiattn.*"]), "mpiattn.kernels", "mpiattn.tests",
              "mpiattn.tests.mpi", "mpiattn.tests.gpu", "mpiattn.slurm"],
    package_dir={"mpiattn.kernels": "kernels", "mpiattn.tests": "tests", "mpiattn.slurm": "slurm"},
    package_data={"mpiattn": ["py.typed"],
                  "mpiattn.kernels": ["README.md", "cuda/*", "emulation/*"],
                  "mpiattn.slurm": ["README.md", "*.sh", "*.sbatch"]},
    install_requires=["numpy>=1.25", "mpi4py>=3.1", "h5py>=3.7", "tqdm>=4.60", "ml_dtypes>=0.3", "threadpoolctl>=3.5"],
    extras_require={
        "mpich": ["mpich>=4.3"],
        "openmpi": ["openmpi>=5.0"],
        "impi": ["impi-rt>=2021.14"],
        "cuda13": ["cupy-cuda13x[ctk]>=14"],
        "cuda12": ["cupy-cuda12x[ctk]>=14"],
        "cuda-compile": ["cuda-bindings>=13", "nvidia-cuda-nvrtc>=13", "nvidia-cuda-nvdisasm>=13"],
        "convert": ["safetensors>=0.4", "torch>=2.5"],
        "plot": ["matplotlib>=3.8"],
        "test": ["pytest>=7.4", "hypothesis>=6.100"],
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
