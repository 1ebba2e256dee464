"""Tries mpiattn with several versions of Python, NumPy and mpi4py, each in a new virtual environment.

    python docs/packaging/matrix.py                                    # every Python of 3.10 to 3.14 that is here
    python docs/packaging/matrix.py --python python3.12 --wheel dist/mpiattn-...whl --work /tmp/matrix

For every Python: NumPy the oldest that mpiattn takes and the newest, times mpi4py likewise.  The oldest is the first
that can be had for this Python: of NumPy as a wheel, of mpi4py before 4.1 one that compiles here, with $MPICC, without
optimization, by a setuptools of its day.  The other packages that mpiattn needs go by NumPy: all oldest or all newest.
An mpi4py that comes as a wheel runs on the MPICH of PyPI, one that was compiled here on the MPI that it was compiled
with.

Each combination runs `mpiattn check` on 3 ranks, tests of NumPy's and the files' ways on 1 process, and tests/mpi's
first cases on 2 ranks.  A table closes the output; the exit code is 1 if any of them fails or takes too long, or if
there is none.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
ENDS = ("oldest", "newest")
SERIAL = "test_casts or test_load or test_reference or test_block_inputs or test_json_file or test_interval_masks"
ON_RANKS = "test_cases or test_biases or test_decode or test_cache_files or test_redistribute or test_inputs"
LIMITS = {"install": 600, "check": 120, "serial": 300, "ranks": 300}  # seconds
WITH_WHEELS = (4, 1)  # the first mpi4py that has wheels
OLD_SETUPTOOLS = "setuptools<74"  # builds those before
SHOWN = 40  # lines of what has failed
OPEN_MPI = {  # which refuses root, and more ranks than cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


class Failed(Exception):
    """A command's exit code was not 0, or it took too long."""


def call(command, limit, cwd, **environment):
    """Run a command with a limit in seconds; returns what it printed.  Its ranks end with it."""
    env = {**os.environ, **OPEN_MPI, "OPENBLAS_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1", **environment}
    env.pop("PYTHONPATH", None)
    process = subprocess.Popen(
        [*map(str, command)],
        cwd=cwd,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()  # a launcher ends its ranks when it is asked to
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            output = ""
        raise Failed(f"{output}\nno end after {limit} s: {' '.join(map(str, command))}") from None
    if process.returncode:
        raise Failed(f"{output}\nexit code {process.returncode}: {' '.join(map(str, command))}")
    return output


def pythons():
    """Paths of interpreters by version, of those on PATH and of pyenv."""
    at_hand = {}
    for version in PYTHONS:
        paths = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
        for path in filter(None, paths):
            if subprocess.run([path, "-c", "import ensurepip"], capture_output=True).returncode == 0:
                at_hand[version] = Path(path)
    return at_hand


class Environments:
    """Virtual environments of one Python, and which versions of packages there are for it."""

    def __init__(self, version, python, work, bounds, mpicc):
        self.version, self.python, self.work, self.bounds, self.mpicc = version, python, work, bounds, mpicc
        self.first = {}  # the oldest version of a package, once it is known
        self.base = self.new("base")
        self.compiled = work / f"compiled-{version}"
        self.compiled.mkdir(exist_ok=True)

    def new(self, name):
        """A new environment's folder."""
        folder = self.work / f"{self.version}-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        call([self.python, "-m", "venv", folder], LIMITS["install"], self.work)
        return folder

    def pip(self, folder, *words, **environment):
        """What a pip command of an environment printed."""
        return call([folder / "bin/python", "-m", "pip", *words], LIMITS["install"], self.work, **environment)

    def versions(self, package):
        """Versions of a package from mpiattn's lower bound on, oldest first."""
        line = re.search("Available versions: (.*)", self.pip(self.base, "index", "versions", package))[1]
        numbers = [text.strip() for text in line.split(",")]
        least, *excluded = self.bounds[package]
        return [text for text in reversed(numbers) if parts(text) >= parts(least) and text not in excluded]

    def oldest(self, package):
        """The first version that has a wheel for this Python; of mpi4py, that compiles where there is no wheel."""
        if package in self.first:
            return self.first[package]
        for version in self.versions(package):
            wanted = f"{package}=={version}"
            words = ("install", "-q", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary=:all:", wanted)
            try:
                if package == "mpi4py" and parts(version) < WITH_WHEELS:
                    self.compile(version)
                else:
                    self.pip(self.base, *words)
            except Failed as error:
                why = str(error).strip().splitlines()
                errors = [
                    line.strip() for line in why if re.search(r"\w+Error: |error: (?!subprocess)|ERROR: No", line)
                ]
                print(f"Python {self.version}: no {package} {version}: {(errors or why)[0]}", flush=True)
                continue
            self.first[package] = version
            return version
        raise Failed(f"no version of {package} can be had for Python {self.version}")

    def compile(self, version):
        """A wheel of mpi4py for the MPI of MPICC, beside the others that were compiled."""
        if not self.mpicc:
            raise Failed("error: no mpicc on PATH, and MPICC is not set")
        if not list(self.compiled.glob(f"mpi4py-{version}-*.whl")):
            constraint = self.work / "setuptools.txt"
            constraint.write_text(OLD_SETUPTOOLS)
            words = ("wheel", "-q", "--no-deps", "--no-cache-dir", "-w", self.compiled, f"mpi4py=={version}")
            self.pip(self.base, *words, MPICC=self.mpicc, CFLAGS="-O0", PIP_CONSTRAINT=str(constraint))

    def try_out(self, wheel, numpy, mpi4py):
        """Install and run one combination; returns the versions that were installed.  numpy, mpi4py: of ENDS."""
        folder, own = self.new(f"{numpy}-{mpi4py}"), []
        if numpy == "oldest":
            own = [f"{package}=={self.oldest(package)}" for package in self.bounds if package != "mpi4py"]
        version = self.oldest("mpi4py") if mpi4py == "oldest" else None
        own += [f"mpi4py=={version}"] if version else []
        built = version and next(self.compiled.glob(f"mpi4py-{version}-*.whl"), None)
        extras = "test" if built else "mpich,test"
        words = ("-q", "--only-binary=:all:", "--find-links", self.compiled, "--upgrade-strategy", "eager")
        self.pip(folder, "install", *words, f"mpiattn[{extras}] @ {wheel.as_uri()}", *own)
        mpiexec = launcher(self.mpicc) if built else folder / "bin/mpiexec"
        call([mpiexec, "-n", 3, folder / "bin/mpiattn", "check"], LIMITS["check"], folder)
        tests = next(folder.glob("lib/python*/site-packages/mpiattn/tests"))
        options = ("-q", "-p", "no:cacheprovider", "-m", "not workshop", "--most", "1", "-k")
        call([folder / "bin/python", "-m", "pytest", tests, *options, SERIAL], LIMITS["serial"], folder)
        ranks = [mpiexec, "-n", 2, folder / "bin/python", "-m", "pytest", tests / "mpi", *options, ON_RANKS]
        call(ranks, LIMITS["ranks"], folder)
        names = ", ".join(repr(name) for name in self.bounds)
        code = f"from importlib.metadata import version; print(*map(version, ({names})))"
        return dict(zip(self.bounds, call([folder / "bin/python", "-c", code], 60, folder).split()))


def parts(version):
    """The numbers of a version, without an end such as "rc1"."""
    return tuple(int(number) for number in re.match(r"\d+(?:\.\d+)*", version)[0].split("."))


def launcher(mpicc):
    """The mpiexec beside an mpicc, with what follows its name: /usr/bin/mpiexec.mpich for /usr/bin/mpicc.mpich."""
    path = Path(shutil.which(mpicc))
    return path.with_name(path.name.replace("mpicc", "mpiexec"))


def bounds_of(wheel):
    """What a wheel needs, {package: [oldest version, versions that it refuses...]}."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        needs = re.findall(r"^Requires-Dist: ([\w-]+)([<>=!,.\d]+)$", archive.read(name).decode(), re.MULTILINE)
    return {
        name.replace("-", "_"): [*re.findall(r">=([\d.]+)", versions), *re.findall(r"!=([\d.]+)", versions)]
        for name, versions in needs
    }


def main(words=None):
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--python", action="append", metavar="PATH", help="an interpreter; may be given several times")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="of mpiattn (default: built here)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keeps environments (default: a temporary folder)")
    arguments = parser.parse_args(words)
    mpicc, rows, failed = os.environ.get("MPICC") or shutil.which("mpicc"), [], 0
    with tempfile.TemporaryDirectory() as name:
        work = (arguments.work or Path(name)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        wheel = arguments.wheel
        if not wheel:
            command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", work / "wheel", ROOT]
            call(command, LIMITS["install"], work)
            (wheel,) = (work / "wheel").glob("mpiattn-*.whl")
        bounds = bounds_of(wheel)
        if arguments.python:
            code = "import sys; print('%d.%d' % sys.version_info[:2])"
            chosen = {call([path, "-c", code], 60, work).strip(): Path(path) for path in arguments.python}
        else:
            chosen = pythons()
            rows += [
                (version, "", "", "not tried: no such Python here", 0) for version in PYTHONS if version not in chosen
            ]
        for version, python in chosen.items():
            environments, done = Environments(version, python, work, bounds, mpicc), set()
            for numpy in ENDS:
                for mpi4py in ENDS:
                    start, used = time.monotonic(), {"numpy": numpy, "mpi4py": mpi4py}
                    try:
                        used = environments.try_out(wheel.resolve(), numpy, mpi4py)
                        result = "the same as before" if tuple(used.values()) in done else "passed"
                        done.add(tuple(used.values()))
                    except Failed as error:
                        result, failed = "FAILED", failed + 1
                        print(f"== Python {version}, {numpy} NumPy, {mpi4py} mpi4py:", flush=True)
                        print("\n".join(str(error).splitlines()[-SHOWN:]), flush=True)
                    others = " ".join(f"{name} {used[name]}" for name in used if name not in ("numpy", "mpi4py"))
                    rows.append((version, used["numpy"], used["mpi4py"], result, time.monotonic() - start, others))
                    print(f"Python {version}, NumPy {used['numpy']}, mpi4py {used['mpi4py']}: {result}", flush=True)
    print("\n| Python | NumPy | mpi4py | result | seconds | with |\n|---|---|---|---|---|---|")
    for version, numpy, mpi4py, result, seconds, *others in sorted(rows, key=lambda row: parts(row[0])):
        print(f"| {version} | {numpy} | {mpi4py} | {result} | {seconds:.0f} | {' '.join(others)} |")
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
