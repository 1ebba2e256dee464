"""All that there is to find out on a machine with one GPU, in one go, with nothing from outside it.

  python3 tests/gpu/run_all.py OUT --wheels WHEELS [--openmpi openmpi-X.tar.gz] [--sections NAME ...] [--limit SECONDS]

It needs the standard library only. WHEELS is made where there is a network, in a checkout, by the same Python:

  for what in '.[mpich,test]' '.[cuda-compile]' 'cupy-cuda13x[ctk]' torch; do pip download -d WHEELS "$what"; done

Every section runs even if another fails. OUT gets a log of each, JSON of each table, summary.json and summary.txt,
written anew after every section: a run that is cut off has told what it knew.

  venv         a virtual environment of what the Python that runs this has, and else of the wheels in WHEELS; without
               WHEELS that Python itself, or --python
  openmpi      an Open MPI with CUDA, built from the tarball
  compile      every kernel for this GPU: registers, spills, shared memory
  tests        pytest -m gpu, with 4 ranks on the GPU, staged
  device       4 ranks whose MPI takes device memory, on the Open MPI that was built
  memcheck, racecheck      compute-sanitizer on the small blocks, where it is found
  bench-...    mpiattn bench --kernel at several shapes

--backend numpy --quick runs what it can on a CPU, at tiny sizes: a test of this script.
"""

import argparse
import json
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
ROOT = next(folder for folder in HERE.parents if (folder / "mpiattn" / "__init__.py").is_file())
sys.path.insert(0, str(HERE))

from gpu_sections import Skip, gpu_facts, run_section, write_summary  # noqa: E402  (beside this file)

# What is installed, in turn: each is tried alone, and only the first has to succeed.  Some by one of several names.
WHEELS = (("base", [["numpy", "mpi4py", "h5py", "tqdm", "ml_dtypes", "pytest", "mpich"]]),
          ("cupy", [["cupy-cuda13x"], ["cupy-cuda12x"]]), ("compile", [["cuda-bindings", "nvidia-cuda-nvrtc"]]),
          ("cupy's toolkit", [["cupy-cuda13x[ctk]"], ["cupy-cuda12x[ctk]"]]), ("torch", [["torch"]]))
CONFIGURE = ("--with-cuda={cuda}", "--enable-mpi-fortran=no", "--without-ucx", "--without-ofi", "--without-verbs",
             "--with-hwloc=internal", "--with-libevent=internal", "--with-pmix=internal", "--disable-oshmem")
SANITIZED = "(forward or backward) and (windows or causal) and not 256"
# name: tokens, head dim, further options
BENCHES = {"bench-full": ("8192 16384", 128, ""), "bench-causal": ("8192 16384", 128, "--causal"),
           "bench-d64": ("8192", 64, ""), "bench-d64-causal": ("8192", 64, "--causal"),
           "bench-d256": ("8192", 256, ""), "bench-d256-causal": ("8192", 256, "--causal")}


class Sections:
    """The sections by name, on what the arguments say; each is a method that runs commands by `self.run`."""

    def __init__(self, args, out):
        self.args, self.out, self.python = args, out, args.python
        self.names = ["venv", "openmpi", "compile", "tests", "device", "memcheck", "racecheck", *BENCHES]
        self.openmpi = None

    def environment(self, **more):
        """Of the commands of a section."""
        ranks = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                 "OMPI_MCA_rmaps_base_oversubscribe": "1"}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return {**os.environ, **ranks, "PYTHONPATH": path, **more}

    def pytest(self, *arguments):
        """A command; the launcher's tests find mpiexec beside this Python."""
        return [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, arguments)]

    def section(self, name, run):
        """Do what a section is; `run(command, seconds, **environment)` logs it and raises where it fails."""
        if name in BENCHES:
            return self.bench(name, run)
        if name == "openmpi":
            if not self.args.openmpi:
                raise Skip("--openmpi is not given")
            built = self.args.openmpi if self.args.openmpi.is_dir() else self.build(run)
            return self.openmpi_of(built, run)
        return getattr(self, name)(run)

    def venv(self, run):
        """Install the wheels of what is not there."""
        if not self.args.wheels:
            raise Skip(f"--wheels is not given: {self.python} is used as it is")
        folder, told = self.out / "venv", {}
        run([sys.executable, "-m", "venv", folder], 120)
        self.python = str(folder / "bin" / "python")
        # not --system-site-packages: the Python that runs this may be that of a virtual environment itself
        there = next(folder.glob("lib/python3*/site-packages"))
        (there / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
        for what, ways in WHEELS:
            for packages in ways:
                try:
                    run([self.python, "-m", "pip", "install", "-q", "--no-index", "--find-links", self.args.wheels,
                         *packages], 300)
                    told[what] = packages
                    break
                except RuntimeError as error:
                    if what == "base":
                        raise
                    told.setdefault("missing", {})[what] = str(error)
        return told

    def build(self, run):
        """Unpack, configure, make."""
        cuda = next((folder for folder in (Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")),
                                           *Path(self.python).parents[1].glob("lib/python3*/site-packages/nvidia/*"))
                     if (folder / "include" / "cuda.h").is_file()), None)
        if cuda is None:
            raise Skip("cuda.h is neither in CUDA_HOME nor among the installed wheels")
        source, prefix = self.out / "openmpi-source", self.out / "openmpi"
        source.mkdir()
        run(["tar", "xf", self.args.openmpi, "-C", source, "--strip-components=1"], 60)
        options = [option.format(cuda=cuda) for option in CONFIGURE]
        run(["sh", "-c", f"cd {source} && ./configure -q --prefix={prefix} {' '.join(options)}"], 600)
        run(["make", "-s", "-C", source, f"-j{os.cpu_count()}", "install"], 900)
        shutil.rmtree(source)
        return prefix

    def openmpi_of(self, prefix, run):
        """Note a built Open MPI, once mpi4py has loaded it."""
        found = run([prefix / "bin" / "mpiexec", "-n", "1", self.python, "-c",
                     "from mpi4py import MPI; print(MPI.Get_library_version())"], 60,
                    MPI4PY_LIBMPI=str(prefix / "lib" / "libmpi.so"))
        if "Open MPI" not in found:
            raise RuntimeError(f"mpi4py has loaded another library: {found.strip()[:100]}")
        self.openmpi = prefix
        return {"version": found.split(",")[0].strip()}

    def compile(self, run):
        """The tile table, as NVRTC and ptxas have it for this GPU."""
        capability = gpu_facts().get("compute_cap", "9.0").replace(".", "")
        table = run([self.python, TESTS / "nvrtc.py", f"sm_{capability}"], 400)
        rows = [line.rsplit(": ", 1) for line in table.splitlines()[1:] if ": " in line]
        kernels = {name: dict(zip(("registers", "spilled", "shared_bytes"), map(int, numbers.split())))
                   for name, numbers in rows}
        if not kernels:
            raise RuntimeError("no kernel was compiled")
        return {"kernels": kernels, "spilling": [name for name, of in kernels.items() if of["spilled"]]}

    def tests(self, run):
        """pytest -m gpu, and what the script's own test has in its place."""
        where = [TESTS / "test_mask.py"] if self.args.quick else ["-m", "gpu", HERE]
        text = run(self.pytest(*where, f"--junitxml={self.out / 'tests.xml'}"), 600)
        return {"result": passed(text)}

    def device(self, run):
        """The whole library, where MPI takes device memory."""
        if self.openmpi is None:
            raise Skip("there is no Open MPI with CUDA: see the section openmpi")
        cases = self.pytest(TESTS / "mpi" / "test_kernels.py")
        text = run([self.openmpi / "bin" / "mpiexec", "-n", "4", *cases], 400, MPIATTN_BACKENDS="cuda",
                   MPIATTN_TRANSPORT="device", OPENBLAS_NUM_THREADS="1",
                   MPI4PY_LIBMPI=str(self.openmpi / "lib" / "libmpi.so"))
        return {"result": passed(text)}

    def sanitize(self, tool, run):
        """compute-sanitizer over the small blocks."""
        places = [shutil.which("compute-sanitizer"), *map(str, Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))]
        found = next((place for place in places if place and os.access(place, os.X_OK)), None)
        if found is None:
            raise Skip("compute-sanitizer is neither on PATH nor in /usr/local/cuda*/bin")
        text = run([found, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all",
                    *self.pytest("-m", "gpu", HERE / "test_gpu_blocks.py", "-k", SANITIZED)], 600)
        if not re.search(r"\b0 errors", text):
            raise RuntimeError(f"{tool} does not say that there are 0 errors")
        return {"result": passed(text)}

    def memcheck(self, run):
        """Accesses outside of arrays."""
        return self.sanitize("memcheck", run)

    def racecheck(self, run):
        """Hazards in shared memory."""
        return self.sanitize("racecheck", run)

    def bench(self, name, run):
        """A table; decoding, carry-in and launches are in each."""
        tokens, dim, more = BENCHES[name]
        path = self.out / f"{name}.json"
        sizes = ["--seqlen", *tokens.split(), "--heads", "32", "--kv-heads", "8", "--dtype", "bfloat16"]
        if self.args.quick:
            sizes = ["--seqlen", "40", "--heads", "2", "--decode-keys", "100", "--carry-keys", "30", "--runs", "2"]
        text = run([self.python, "-m", "mpiattn", "bench", "--kernel", "--backend", self.args.backend, *sizes,
                    "--head-dim", str(dim), "--direction", "both", *more.split(), "--json", path], 400)
        (self.out / f"{name}.txt").write_text(text)
        return {"sections": json.loads(path.read_text())["sections"]}


def passed(text):
    """What pytest says of a run in its last line; RuntimeError where nothing has passed, since all may be skipped."""
    told = [line for line in text.splitlines() if re.search(r"\d+ passed|\d+ skipped", line)]
    if not told or " passed" not in told[-1]:
        raise RuntimeError(f"nothing was tested: {told[-1] if told else 'no tests'}")
    return told[-1].strip("= ")


def main():
    """Run the sections; the exit code is 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for logs, tables and the summary")
    parser.add_argument("--wheels", type=lambda path: Path(path).resolve(), help="folder of wheels")
    parser.add_argument("--openmpi", type=lambda path: Path(path).resolve(),
                        help="the tarball, or the folder of a build")
    parser.add_argument("--python", default=sys.executable, help="used where there are no wheels")
    parser.add_argument("--sections", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS", help="for all of it")
    parser.add_argument("--backend", default="cuda", help="of the benchmarks (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, and a test of the CPU for those of the GPU")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    sections = Sections(args, out)
    if args.sections and not set(args.sections) <= set(sections.names):
        parser.error(f"--sections may be {', '.join(sections.names)}")
    results = {}
    for name in args.sections or sections.names:
        results[name] = run_section(name, sections, args.limit)
        write_summary(out, sections.python, results)
    print((out / "summary.txt").read_text())
    return int(any(result["status"] == "failed" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
