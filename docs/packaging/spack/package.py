"""Spack's recipe: packages/py_mpiattn/package.py of a repository of packages (API v2.2)."""

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMpiattn(PythonPackage):
    """Exact attention for sequences that do not fit one GPU, native to MPI."""

    pypi = "mpiattn/mpiattn-0.1.0.tar.gz"

    license("Apache-2.0")

    import_modules = ["mpiattn", "mpiattn.cli"]  # of those that Spack tries, not the tests, which need pytest

    # PLACEHOLDER: the checksum of the source distribution, which docs/packaging/wheels.py prints
    version("0.1.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    depends_on("c", type="build")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")

    # It links no MPI: one build serves every MPI that py-mpi4py is built with, so there are no variants.
    depends_on("py-mpi4py@3.1:", type="run")
    depends_on("py-numpy@2.0:", type="run")
    conflicts("^py-numpy@2.1.0:2.1.1")  # which promote numbers by other rules in threads
    depends_on("py-h5py@3.11:", type="run")
    depends_on("py-ml-dtypes@0.4:", type="run")
    depends_on("py-threadpoolctl@3.5:", type="run")
    depends_on("py-tqdm@4.60:", type="run")

    def setup_build_environment(self, env):
        """Fail where the kernels do not compile."""
        env.set("MPIATTN_BUILD_KERNELS", "1")
