"""What run_all.py brings along: wheels and an Open MPI, unpacked into a folder; and the environment to use them in.

No virtual environment: one would hide what the machine has, of which CuPy's and PyTorch's CUDA libraries are found by
the folder that they lie in.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tarfile
from pathlib import Path

from gpu_sections import Skip

PAIR = {"mpich", "mpi4py"}  # brought, they are used: a machine's own mpi4py may belong to another MPI
# Open MPI 4.1 refuses root, more ranks than cores, and a machine without ssh until told; smcuda is what carries device
# memory on one node.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_plm": "isolated",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,smcuda",
}
HELLO = (
    "from mpi4py import MPI; rank = MPI.COMM_WORLD.rank; total = MPI.COMM_WORLD.allreduce(rank);"
    "rank or print(f'ranks add up to {total}:', MPI.Get_library_version().splitlines()[0])"
)


def program_path(name):
    """The path of a program of CUDA's."""
    places = [shutil.which(name), *map(str, Path("/usr/local").glob(f"cuda*/bin/{name}"))]
    program = next((place for place in places if place and os.access(place, os.X_OK)), None)
    if program is None:
        raise Skip(f"{name} is neither on PATH nor in /usr/local/cuda*/bin")
    return program


def greeting(text):
    """What HELLO's first rank says, among what its MPI may say."""
    line = next((line for line in text.splitlines() if "add up to" in line), "no rank has answered")
    return line.rstrip("\0 ")  # Open MPI's text ends with a NUL


def canonical(name):
    """A distribution's name as it is compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def missing_here(folder):
    """(names of the wheels in a folder that this Python needs, names of those that it has itself)."""
    brought = {canonical(path.name.split("-")[0]) for path in folder.glob("*.whl")}
    named = (installed.metadata["Name"] for installed in importlib.metadata.distributions())
    here = {canonical(name) for name in named if name}  # what is left of a removed one may have none
    if importlib.util.find_spec("cupy"):  # by whatever name it was installed
        here |= {name for name in brought if name.startswith("cupy")}
    needed = {name for name in brought if name not in here or name in PAIR}
    several = sorted(name for name in needed if name.startswith("cupy"))
    if len(several) > 1:
        raise RuntimeError(f"{folder} has {' and '.join(several)}, which are one package; leave one")
    return sorted(needed), sorted(brought - needed)


class Installed:
    """What is unpacked in a work folder; it is there for the next run too, as long as the machine is."""

    def __init__(self, work):
        self.work, self.site, self.openmpi = work, work / "site", work / "openmpi"

    def install(self, wheels, run, record):
        """The section: the wheels that are needed, and what MPI and Python make of them."""
        record["python"] = sys.version.split()[0]
        if wheels is None:
            record["result"] = "--wheels is not given: this Python is used as it is"
            return
        needed, record["own"] = missing_here(wheels)
        names = "\n".join(sorted(path.name for path in wheels.glob("*.whl")))
        mark = self.work / "installed"
        if not (mark.is_file() and mark.read_text() == names):
            shutil.rmtree(self.site, ignore_errors=True)
            pip = [
                sys.executable,
                *"-m pip --isolated install -q --no-index --no-deps --no-compile --no-cache-dir".split(),
                *"--ignore-installed --disable-pip-version-check --root-user-action=ignore --find-links".split(),
                wheels,
                "--prefix",
                self.site,
            ]
            try:
                run([*pip, *needed], 240)
            except RuntimeError:  # one that is for another Python keeps none of the others from being used
                for name in list(needed):
                    try:
                        run([*pip, name], 120)
                    except RuntimeError as error:
                        needed.remove(name)
                        record.setdefault("failed", {})[name] = str(error)[:200]
            mark.write_text(names)
        record["installed"] = needed
        record["result"] = f"installed: {', '.join(needed)}; the machine's own: {', '.join(record['own']) or 'nothing'}"
        if "failed" in record:
            raise RuntimeError(f"not installed: {', '.join(record['failed'])}")

    def unpack_openmpi(self, archive, run, record):
        """The section: an Open MPI that build_openmpi.sh has built, and four ranks of it."""
        if archive is None:
            raise Skip("--openmpi is not given")
        if not (self.openmpi / "bin" / "mpiexec").exists():
            partial = self.work / "openmpi.partial"
            shutil.rmtree(partial, ignore_errors=True)
            with tarfile.open(archive) as packed:
                packed.extractall(partial, **({"filter": "tar"} if hasattr(tarfile, "data_filter") else {}))
            (partial / "openmpi").replace(self.openmpi)
        text = run([self.openmpi / "bin" / "mpiexec", "-n", "4", sys.executable, "-c", HELLO], 60, mpi="openmpi")
        record["result"] = greeting(text)
        if "add up to 6: Open MPI" not in record["result"]:
            raise RuntimeError(f"mpi4py has loaded another library: {record['result'][:200]}")

    def packages(self):
        """The folders of packages in the prefix; Debian's Python has a name of its own for them."""
        return [path for path in self.site.glob("**/python3*/*-packages") if path.is_dir()]

    def mpiexec(self, mpi):
        """The launcher of an MPI, "mpich" or "openmpi"; the machine's own, where no MPICH was brought."""
        if mpi == "openmpi":
            return self.openmpi / "bin" / "mpiexec"
        places = [
            *self.site.glob("**/bin/mpiexec"),
            Path(sys.executable).with_name("mpiexec"),
            *map(Path, filter(None, [shutil.which("mpiexec")])),
        ]
        place = next((path for path in places if path.is_file()), None)
        if place is None:
            raise Skip("there is no mpiexec: --wheels has no mpich, and the machine has none")
        return place

    def environment(self, root, mpi="mpich", **more):
        """Of the commands of a section."""

        def joined(paths, name):
            return os.pathsep.join(filter(None, [*map(str, paths), os.environ.get(name)]))

        env = {
            **os.environ,
            "PYTHONPATH": joined([root, *self.packages()], "PYTHONPATH"),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPYCACHEPREFIX": str(self.work / "pycache"),
            "CUPY_CACHE_DIR": str(self.work / "cupy"),
        }
        # The numbered name: a wheel's libmpi.so is a text for the linker, since wheels hold no links.
        brought = sorted(self.site.glob("lib*/libmpi.so.*")) or sorted(self.site.glob("local/lib*/libmpi.so.*"))
        if mpi == "openmpi":
            brought = [self.openmpi / "lib" / "libmpi.so"]
            env |= {**OPEN_MPI, "OPAL_PREFIX": str(self.openmpi)}
        if brought:
            env["MPI4PY_LIBMPI"] = str(brought[0])
        # CuPy and cuda-bindings look for wheels' libraries in the Python's own folders, and not in a prefix.
        libraries = [path for packages in self.packages() for path in packages.glob("nvidia/*/lib")]
        if mpi == "openmpi":
            libraries.insert(0, self.openmpi / "lib")
        if libraries:
            env["LD_LIBRARY_PATH"] = joined(libraries, "LD_LIBRARY_PATH")
        toolkit = [path.parent for path in libraries if (path.parent / "include").is_dir() and "nvidia" in path.parts]
        if toolkit and "CUDA_PATH" not in os.environ:
            env["CUDA_PATH"] = str(toolkit[0])
        return env | more
