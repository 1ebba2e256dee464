"""Compiles the library for C, C++ and Fortran programs, and puts it where compilers, pkg-config and CMake look."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import MpiattnError
from ..version import __version__

SOURCE = Path(__file__).parent / "source"
WARNINGS = ["-Wall", "-Wextra"]


class BuildError(MpiattnError):
    """The library cannot be compiled."""


class Installed:
    """Where things are under a prefix, such as that of a virtual environment."""

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = Path(prefix).absolute()
        # Folders that have nothing else: beside a wheel of an MPI, -I and -L of the whole environment would bring its
        # mpi.h and libmpi into programs that another mpicc compiles.
        self.include, self.lib = self.prefix / "include" / "mpiattn", self.prefix / "lib" / "mpiattn"
        self.library = self.lib / "libmpiattn.so"
        self.fortran_library = self.lib / "libmpiattn_fortran.a"
        self.fortran_source = self.include / "mpiattn.f90"
        self.pkgconfig, self.cmake = self.prefix / "lib" / "pkgconfig", self.prefix / "lib" / "cmake" / "mpiattn"

    def compiler_flags(self) -> list[str]:
        """Options of a C, C++ or Fortran compiler that find the header and the module."""
        return [f"-I{self.include}"]

    def linker_flags(self, fortran: bool = False) -> list[str]:
        """Options of a linker that find the library, also when the program runs."""
        of_fortran = ["-lmpiattn_fortran"] if fortran else []
        return [f"-L{self.lib}", f"-Wl,-rpath,{self.lib}", *of_fortran, "-lmpiattn"]


def build(prefix: str | os.PathLike[str], cc: str | None = None, fc: str | None = None) -> list[Path]:
    """Compile the library for this interpreter and install it; the files that were made.

    prefix: folder that gets lib and include.
    cc, fc: commands of the compilers, None for those of the environment's CC and FC, else Python's own and gfortran.
        Where no Fortran compiler is named, and there is no gfortran or it fails, the module is installed as a source.
    Raises BuildError.
    """
    at = Installed(prefix)
    compiler = _command(cc or os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc", "--cc")
    fortran = fc or os.environ.get("FC")
    fortran_compiler = _command(fortran or "gfortran", "--fc", optional=fortran is None)
    try:
        for folder in (at.include, at.lib, at.pkgconfig, at.cmake):
            folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory() as name:
            work = Path(name)
            made = {at.library: _shared_library(compiler, work)}
            try:
                made |= _fortran(fortran_compiler, work, at) if fortran_compiler else {}
            except BuildError as error:
                if fortran is not None:
                    raise
                print(f"the Fortran module is installed as a source alone: {error}", file=sys.stderr)
            for name in ("mpiattn.h", "mpiattn.f90", *(path.name for path in SOURCE.glob("*.inc"))):
                made[at.include / name] = SOURCE / name
            for path, text in _descriptions(at).items():
                made[path] = work / path.name
                made[path].write_text(text)
            for path, of in made.items():  # a program that runs goes on with the library that it has opened
                unfinished = path.with_name(f"{path.name}.{os.getpid()}.new")
                shutil.copyfile(of, unfinished)
                unfinished.chmod(0o755 if path == at.library else 0o644)
                unfinished.replace(path)
    except OSError as error:
        raise BuildError(f"cannot install to {at.prefix}, which --prefix names: {error}") from error
    return list(made)


def _command(text: str, option: str, optional: bool = False) -> list[str]:
    """A command as a list of words; empty if it is optional and not there.  Raises BuildError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BuildError(f"{option} is {text!r}, which is not a command: {error}") from error
    if words and shutil.which(words[0]):
        return words
    if optional:
        return []
    raise BuildError(f"there is no program {words[0] if words else text}; {option} names a compiler")


def _run(command: list[str], what: str) -> None:
    try:
        result = subprocess.run(command, text=True, capture_output=True, check=False)
    except OSError as error:
        raise BuildError(f"{what} does not compile: {command[0]}: {error}") from error
    if result.returncode:
        raise BuildError(f"{what} does not compile: {shlex.join(command)}\n{result.stderr.strip()}")


def _shared_library(compiler: list[str], work: Path) -> Path:
    include, made = sysconfig.get_path("include"), work / "libmpiattn.so"
    if not Path(include, "Python.h").is_file():
        raise BuildError(
            f"Python's header {include}/Python.h is not there; install the package that has it, such as python3-dev "
            f"or python{sys.version_info[0]}.{sys.version_info[1]}-devel"
        )
    library = _libpython()
    _run(
        [
            *compiler,
            *("-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-shared", *WARNINGS),
            f"-DMPIATTN_BUILT_FOR={_in_c(sys.executable)}",
            *("-I", include, "-I", str(SOURCE), *(str(SOURCE / f"{name}.c") for name in ("mpiattn", "interpreter"))),
            *("-o", str(made)),
            "-Wl,-soname,libmpiattn.so",
            *(str(library), f"-Wl,-rpath,{library.parent}", "-ldl", "-lm"),
        ],
        "the library",
    )
    return made


def _in_c(text: str) -> str:
    """A text as C writes it."""
    return '"{}"'.format(text.replace("\\", r"\\").replace('"', r"\""))


def _libpython() -> Path:
    """The shared library of this interpreter.  Raises BuildError if it has none."""
    value = sysconfig.get_config_var
    folders = [value("LIBDIR"), Path(value("LIBDIR") or "/usr/lib", value("MULTIARCH") or ""), sys.base_prefix + "/lib"]
    # Where the interpreter itself was linked without it, as in conda, INSTSONAME names an archive.
    names = [value("INSTSONAME"), f"libpython{value('LDVERSION')}.so.1.0", f"libpython{value('LDVERSION')}.so"]
    for folder in filter(None, folders):
        for name in names:
            if name and ".so" in name and Path(folder, name).is_file():
                return Path(folder, name)
    raise BuildError(
        f"{sys.executable} has no shared library libpython{value('LDVERSION')}.so, which programs in C need; install "
        "it (on Debian the package libpython3-dev has it), or take a Python that was built with --enable-shared"
    )


def _fortran(compiler: list[str], work: Path, at: Installed) -> dict[Path, Path]:
    """The compiled module and its description for programs that use the same compiler."""
    compiled, archive = work / "mpiattn.o", work / "libmpiattn_fortran.a"
    module_folder = ["-J", str(work)] if "gfortran" in Path(compiler[0]).name else ["-module", str(work)]
    source = str(SOURCE / "mpiattn.f90")
    _run([*compiler, "-O2", "-fPIC", *module_folder, "-c", source, "-o", str(compiled)], "the Fortran module")
    _run(["ar", "rcs", str(archive), str(compiled)], "the Fortran module's archive")
    return {at.fortran_library: archive} | {at.include / path.name: path for path in work.glob("*.mod")}


def _descriptions(at: Installed) -> dict[Path, str]:
    """The text of files for pkg-config and CMake, which find the rest by their own place."""
    texts = {}
    for path in (at.pkgconfig / "mpiattn.pc", at.pkgconfig / "mpiattn-fortran.pc"):
        texts[path] = (SOURCE / f"{path.name}.in").read_text().replace("@VERSION@", __version__)
    for path in (at.cmake / "mpiattnConfig.cmake", at.cmake / "mpiattnConfigVersion.cmake"):
        texts[path] = (SOURCE / f"{path.name}.in").read_text().replace("@VERSION@", __version__)
    return texts
