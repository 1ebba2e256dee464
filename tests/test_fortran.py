"""The Fortran module: every procedure, and the example of the docs, whose numbers are those of Python to the bit."""

import re
import shutil
import sys

import embedded
import host_mpi
import launch
import pytest

from mpiattn.embed.build import SOURCE

pytestmark = [
    embedded.needed,
    pytest.mark.workshop,
    pytest.mark.skipif(not launch.DOCS.is_dir(), reason="takes the docs of a checkout"),
    pytest.mark.skipif(shutil.which("gfortran") is None, reason="there is no gfortran"),
]
STRICT = "-std=f2008 -Wall -Wextra -pedantic -Werror".split()
PAGE = launch.DOCS / "fortran.md"
OCEAN = launch.DOCS / "callers" / "ocean.f90"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A function of (MPI, source) that compiles a program and has its path."""
    made = {}

    def make(family, source):
        host_mpi.require(family, "mpifort")
        if (family, source) not in made:
            path = tmp_path_factory.mktemp(family) / source.stem
            at = embedded.installed()
            how = ["-O2"] if source == OCEAN else ["-g", "-fcheck=all"]
            words = [f"mpifort.{family}", *STRICT, *how, source, "-o", path]
            host_mpi.compiled([*words, *at.compiler_flags(), *at.linker_flags(fortran=True)], path.parent)
            made[family, source] = path
        return made[family, source]

    return make


def twin(ranks, *arguments):
    """Python computes again on as many ranks, and compares."""
    command = [sys.executable, "-m", "mpi4py", launch.TESTS / "fortran_twin.py", *arguments]
    launch.mpirun(ranks, command, timeout=60, cwd=arguments[0])  # where the checkout is not found


def test_the_module_is_of_the_standard(tmp_path):
    """Fortran 2008, without a warning, also with default integers and reals of 64 bits."""
    words = ["gfortran", *STRICT, "-fsyntax-only", SOURCE / "mpiattn.f90"]
    host_mpi.compiled(words, tmp_path)
    host_mpi.compiled([*words, "-fdefault-integer-8", "-fdefault-real-8"], tmp_path)


def test_the_module_has_all_functions_of_the_header():
    names = re.findall(r"^MPIATTN_API [^(]*?(mpiattn_\w+)\(", (SOURCE / "mpiattn.h").read_text(), re.M)
    bound = re.findall(r"bind\(c, name='(mpiattn_\w+)'\)", (SOURCE / "mpiattn_c.inc").read_text())
    assert len(names) > 35 and bound == names
    header = dict(re.findall(r"\b(MPIATTN_\w+) = (\d+)", (SOURCE / "mpiattn.h").read_text()))
    header |= dict(re.findall(r"#define (MPIATTN_MAX_\w+) (\d+)", (SOURCE / "mpiattn.h").read_text()))
    module = dict(re.findall(r"\b(MPIATTN_\w+) = (\d+)", (SOURCE / "mpiattn_c.inc").read_text()))
    assert len(module) > 15 and module == header


@pytest.mark.draw(1, slow=4)
@pytest.mark.parametrize(
    "family, ranks",
    [
        *((family, ranks) for family in host_mpi.FAMILIES for ranks in (1, 2)),
        *(pytest.param(family, n, marks=pytest.mark.slow) for family in host_mpi.FAMILIES for n in (3, 4)),
    ],
)
def test_every_procedure(program, tmp_path, family, ranks):
    calls = program(family, launch.TESTS / "embed" / "fortran_calls.f90")
    # a file of machines that cannot be read, of which Python warns
    (tmp_path / "mpiattn").mkdir()
    (tmp_path / "mpiattn" / "machines.json").write_text("{")
    host_mpi.mpirun(family, ranks, [calls, tmp_path], tmp_path, env={"XDG_CONFIG_HOME": str(tmp_path)})
    twin(ranks, tmp_path, "calls")


@pytest.mark.draw(2, slow=6)
@pytest.mark.parametrize(
    "family, ranks",
    [
        *((family, ranks) for family in host_mpi.FAMILIES for ranks in (1, 3, 4)),
        *(pytest.param(family, n, marks=pytest.mark.slow) for family in host_mpi.FAMILIES for n in (5, 6, 7)),
    ],
)
def test_the_ocean_has_the_bits_of_python(program, tmp_path, family, ranks):
    """One rank writes the log, if there are several; the others hold the field, also in blocks of 2x2 and 3x2."""
    printed = host_mpi.mpirun(family, ranks, [program(family, OCEAN), tmp_path], tmp_path).stdout
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+) +sensitivity \S+$", printed, re.M)]
    assert losses == pytest.approx([6.7768e-4, 4.3067e-4, 2.6705e-4], rel=1e-4)
    twin(max(1, ranks - 1), tmp_path, "ocean", re.search(r"^blocks (\d+x\d+), tile", printed)[1])


def test_the_ocean_says_what_is_wrong(program, tmp_path):
    """Another interpreter than one that has mpiattn: one rank says so, and the program ends."""
    family = next((name for name in host_mpi.FAMILIES if shutil.which(f"mpifort.{name}")), "mpich")
    env = {"MPIATTN_PYTHON": "/nowhere/python"}
    outcome = host_mpi.mpirun(family, 4, [program(family, OCEAN), tmp_path], tmp_path, env=env, check=False)
    (line,) = re.findall("mpiattn: rank .*", outcome.stderr)
    assert outcome.returncode and "mpiattn: rank 0: there is no program /nowhere/python" in line


def code_of(name):
    return re.search(rf"<!-- test: {name} -->\n```fortran\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


@pytest.mark.draw(1)
@pytest.mark.parametrize("family", host_mpi.FAMILIES)
def test_the_first_program_of_the_page(program, tmp_path, family):
    source = tmp_path / "first.f90"
    source.write_text(code_of("first"))
    host_mpi.mpirun(family, 2, [program(family, source)], tmp_path)


def test_a_program_under_the_launcher_of_another_mpi(program, tmp_path):
    """Each process is alone, and the first one is told so."""
    source = tmp_path / "alone.f90"
    source.write_text(code_of("first"))
    made = program("openmpi", source)
    host_mpi.require("mpich", "mpifort")
    said = host_mpi.mpirun("mpich", 2, [made], tmp_path, env=host_mpi.SETTINGS["openmpi"], check=False).stderr
    assert said.count("started 2 ranks, each of which is alone in Open MPI") == 1, said


def test_the_page():
    """It has the example, all calls with their arguments, and lines that another test runs."""
    text, module = PAGE.read_text(), "".join(path.read_text() for path in SOURCE.glob("mpiattn*.[fi]*"))
    assert "```{literalinclude} callers/ocean.f90\n" in text
    lines = [line.split(" !")[0].strip() for line in code_of("order").splitlines()]
    ran = (launch.TESTS / "embed" / "fortran_calls.f90").read_text()
    assert len(lines) == 4 and not [line for line in lines if line not in ran]
    public = set(re.findall(r"^  public :: (.*)$", module, re.M))
    names = {name for line in public for name in line.split(", ") if name.startswith("mpiattn_")}
    rows = text.split("## All calls")[1].split("##")[0]
    for name in names - {"mpiattn_plan", "mpiattn_cache", "mpiattn_options", "mpiattn_array", "mpiattn_output"}:
        assert name in ("mpiattn_array_of", "mpiattn_permuted", "mpiattn_measured") or f"`{name}" in rows, name
    for name, arguments in re.findall(r"^\| `(mpiattn_\w+)\(([^)]*)\)", rows, re.M):
        short = name.removeprefix("mpiattn_")
        declared = re.findall(rf"subroutine (?:mpiattn_)?{short}\((.*)\)", module)
        assert declared and set(declared) == {re.sub(r"[\[\]]", "", arguments)}, name


CMAKE = """
cmake_minimum_required(VERSION 3.18)
project(calls Fortran)
find_package(MPI REQUIRED COMPONENTS Fortran)
find_package(mpiattn REQUIRED)
add_executable(ocean {})
target_link_libraries(ocean PRIVATE mpiattn::fortran MPI::MPI_Fortran)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake")
def test_cmake_compiles_the_module(tmp_path):
    host_mpi.require("mpich", "mpifort")
    (tmp_path / "CMakeLists.txt").write_text(CMAKE.format(OCEAN))
    options = [f"-DCMAKE_PREFIX_PATH={embedded.installed().prefix}", "-DMPI_Fortran_COMPILER=mpifort.mpich"]
    host_mpi.compiled(["cmake", "-S", tmp_path, "-B", tmp_path / "made", *options])
    host_mpi.compiled(["cmake", "--build", tmp_path / "made"])
    printed = host_mpi.mpirun("mpich", 1, [tmp_path / "made" / "ocean", tmp_path], tmp_path).stdout
    assert "step 30: loss" in printed


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="there is no pkg-config")
def test_pkg_config_links_the_module(tmp_path):
    host_mpi.require("openmpi", "mpifort")
    path = f"PKG_CONFIG_PATH={embedded.installed().pkgconfig}"
    asked = ["env", path, "pkg-config", "--cflags", "--libs", "mpiattn-fortran"]
    host_mpi.compiled(["mpifort.openmpi", OCEAN, "-o", tmp_path / "ocean", *host_mpi.compiled(asked).split()], tmp_path)
    printed = host_mpi.mpirun("openmpi", 1, [tmp_path / "ocean", tmp_path], tmp_path).stdout
    assert "step 30: loss" in printed
