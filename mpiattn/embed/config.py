"""The command `mpiattn-config`: builds the library for C, C++ and Fortran, and says how to compile with it."""

from __future__ import annotations

import argparse
import shlex
import sys

from ..version import __version__
from .build import BuildError, Installed, build

DESCRIPTION = """Build the library that C, C++ and Fortran programs call, and print compiler options.

  mpiattn-config --build                                  once, with a C compiler and Python's headers
  mpicc program.c $(mpiattn-config --cflags --libs)
  mpifort program.f90 $(mpiattn-config --fflags --fortran-libs)

pkg-config finds `mpiattn` and `mpiattn-fortran` in PREFIX/lib/pkgconfig, CMake's find_package(mpiattn) in PREFIX.
A program runs the interpreter that built the library, unless MPIATTN_PYTHON names another one of the same version."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(
        "mpiattn-config", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--build", action="store_true", help="compile and install the library and the Fortran module")
    parser.add_argument(
        "--prefix",
        default=sys.prefix,
        metavar="DIR",
        help="folder whose lib and include have the library (default: %(default)s)",
    )
    parser.add_argument("--cc", metavar="COMMAND", help="C compiler of --build (default: $CC, else Python's own)")
    parser.add_argument(
        "--fc",
        metavar="COMMAND",
        help="Fortran compiler of --build (default: $FC, else gfortran where there is one); programs that use the "
        "compiled module need the same compiler",
    )
    printed = parser.add_argument_group("what is printed, on one line in this order")
    printed.add_argument("--cflags", action="store_true", help="options of a C or C++ compiler")
    printed.add_argument("--fflags", action="store_true", help="options of a Fortran compiler")
    printed.add_argument("--libs", action="store_true", help="options of a linker for C and C++")
    printed.add_argument("--fortran-libs", action="store_true", help="options of a linker for Fortran")
    printed.add_argument("--print-prefix", action="store_true", help="the prefix, for CMAKE_PREFIX_PATH")
    printed.add_argument("--python", action="store_true", help="the interpreter that runs this command")
    args = parser.parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):  # paths are printed as the file system has them, whatever the locale says
        sys.stdout.reconfigure(encoding=sys.getfilesystemencoding(), errors=sys.getfilesystemencodeerrors())
    at = Installed(args.prefix)
    printing = args.cflags, args.fflags, args.libs, args.fortran_libs, args.print_prefix, args.python
    if not args.build and not any(printing):
        parser.error("nothing to do; give --build, or what to print, such as --cflags --libs")
    try:
        if args.build:
            for path in build(args.prefix, args.cc, args.fc):
                print(path, file=sys.stderr if any(printing) else sys.stdout)
        if (args.libs or args.cflags or args.fflags or args.fortran_libs) and not at.library.is_file():
            raise BuildError(f"there is no {at.library}; run mpiattn-config --build --prefix {at.prefix}")
        if (args.fortran_libs or args.fflags) and not at.fortran_library.is_file():
            raise BuildError(
                f"there is no {at.fortran_library}; run mpiattn-config --build --prefix {at.prefix} --fc gfortran, or "
                f"compile {at.fortran_source} in your program"
            )
    except BuildError as error:
        print(f"mpiattn-config: {error}", file=sys.stderr)
        return 1
    words = at.compiler_flags() * (args.cflags or args.fflags)
    words += at.linker_flags() * args.libs * (not args.fortran_libs) + at.linker_flags(True) * args.fortran_libs
    words += [str(at.prefix)] * args.print_prefix + [sys.executable] * args.python
    if words:
        print(shlex.join(words))
    return 0


if __name__ == "__main__":
    sys.exit(main())
