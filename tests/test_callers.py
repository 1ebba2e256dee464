"""C and C++ programs that call attention: the example of the docs, errors, and how programs are built."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import embedded
import launch
import numpy as np
import pytest

SOURCES = launch.TESTS / "embed"
TRACERS = launch.DOCS / "callers" / "tracers.c"
WARNINGS = ["-O2", "-Wall", "-Wextra", "-Werror", "-pedantic"]


@cache
def compiler(name):
    """A compiler of the MPI whose mpiexec is used: mpicc, mpicxx or mpifort; None if it has none."""
    beside = Path(launch.mpiexec() or "").resolve().parent / name
    return str(beside) if beside.is_file() else None


pytestmark = [
    embedded.needed,
    pytest.mark.skipif(not SOURCES.is_dir(), reason="takes the sources of a checkout"),
    pytest.mark.skipif(launch.mpiexec() is None or not compiler("mpicc"), reason="no mpicc beside mpiexec"),
    pytest.mark.workshop,
]

# Of the first tracer after each step, on one rank.
SUMS = [-0.371403, -0.371402, -0.367074, -0.367074, -0.367074, -0.364924]
# What the example computes, by Python on the same ranks, bit for bit.
TWIN = """
import sys
import numpy as np
from mpi4py import MPI
from mpiattn import Layout, MeshAttention, masks
comm, grid = MPI.COMM_WORLD, (20, 31)
cart = comm.Create_cart(MPI.Compute_dims(comm.size, 2), periods=(False, True), reorder=True)
mask = masks.neighborhood(grid, (7, 9), cyclic=(False, True))
plan = MeshAttention(cart, seqlen=620, heads=2, head_dim=8, layout=Layout.grid(grid, cart), mask=mask)
n = len(plan.positions)
numbers = np.fromfile(f"{sys.argv[1]}/{cart.rank}", np.float32)
*arrays, lse = np.split(numbers, [n * 16 * i for i in range(1, 9)])
q, k, v, out, dout, dq, dk, dv = (array.reshape(1, n, 2, 8) for array in arrays)
assert np.abs(q).max() > 0.1 and np.array_equal(dout, out)
want, want_lse = plan.forward(q, k, v)
assert np.array_equal(want, out) and np.array_equal(want_lse, lse.reshape(1, 2, n))
for given, wanted in zip((dq, dk, dv), plan.backward(dout, q, k, v, out, want_lse)):
    assert np.array_equal(given, wanted) and np.abs(wanted).max() > 1e-3
print("the same bits")
"""


def compiled(folder, source, command="mpicc", options=(), prefix=None):
    """A program, compiled in a folder and linked with the library."""
    at = prefix or embedded.installed()
    program = folder / source.stem
    words = [compiler(command), *WARNINGS, *options, source, "-o", program, *at.compiler_flags(), *at.linker_flags()]
    subprocess.run([*map(str, words), "-lm"], check=True, timeout=launch.patience(60))
    return program


@pytest.fixture(scope="module")
def tracers(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("tracers"), TRACERS, options=["-std=c99"])


@pytest.mark.parametrize(
    "ranks", [1, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)]
)
def test_the_example_has_pythons_bits(tracers, tmp_path, ranks):
    text = launch.mpirun(ranks, [tracers, tmp_path]).stdout
    sums = re.findall(r"^step \d: the sum of the first tracer is (\S+)$", text, re.MULTILINE)
    assert np.abs(np.array(sums, float) - SUMS).max() < 5e-5
    computing = max(1, ranks - 1)
    # in another folder than the checkout, whose mpiattn the program does not see
    text = launch.mpirun(computing, [sys.executable, "-c", TWIN, tmp_path], cwd=tmp_path).stdout
    assert text.count("the same bits") == computing


def test_the_example_is_cpp(tmp_path):
    source = tmp_path / "tracers.cpp"
    shutil.copy(TRACERS, source)
    program = compiled(tmp_path, source, "mpicxx", ["-std=c++11"])
    assert "step 6" in launch.mpirun(2, [program]).stdout


def results(text):
    """{case: (status, text)} of tests/embed/errors.c."""
    return {
        case: (int(status), says) for case, status, says in re.findall(r"^([\w ]+): (\d+) (.*)$", text, re.MULTILINE)
    }


EXPECTED = {
    "before MPI_Init": (5, "call MPI_Init first"),
    "start": (0, ""),
    "plan": (0, ""),
    "tokens": (0, ""),
    "shape": (1, "q has shape"),
    "no data": (1, "and NULL for its data"),
    "NULL": (1, "k is NULL; it must be an array (on rank 0 of 2)"),
    "overlap": (1, "out shares memory with q"),
    "right": (0, ""),
    "no communicator": (5, "no communicator; it must be MPI_Comm_c2f(comm)"),
    "null communicator": (1, "COMM_NULL"),
    "options": (1, "options has the handle 99"),
    "free": (0, ""),
    "free again": (2, "that of no plan"),
    "freed": (2, "that of a plan that was freed"),
    "another plan": (0, ""),
    "error handlers": (0, ""),
    "locale": (0, ""),
    "traps": (0, ""),
    "after MPI_Finalize": (5, "MPI is finalized"),
    "free after MPI_Finalize": (5, "free it before MPI_Finalize"),
    "freed handle": (0, ""),
}


def test_errors_of_a_c_program(tmp_path):
    statuses = results(launch.mpirun(2, [compiled(tmp_path, SOURCES / "errors.c")]).stdout)
    assert list(statuses) == list(EXPECTED)
    for case, (status, says) in EXPECTED.items():
        assert statuses[case][0] == status and says in statuses[case][1], (case, statuses[case])


@pytest.mark.slow
def test_errors_of_a_c_program_with_sanitizers(tmp_path):
    """Nothing is read or written out of bounds; what the interpreter never frees is no fault."""
    checked = "-fsanitize=address,undefined"
    at = embedded.installed(f"{shutil.which('gcc') or 'cc'} {checked} -fno-sanitize-recover=all -g")
    program = compiled(tmp_path, SOURCES / "errors.c", options=[checked, "-g"], prefix=at)
    env = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1"}
    outcome = launch.mpirun(2, [program], env=env, timeout=120)
    assert "Sanitizer" not in outcome.stderr
    assert {case: status for case, (status, _) in results(outcome.stdout).items()} == {
        case: status for case, (status, _) in EXPECTED.items()
    }


def start_of(program, **env):
    """(status, text) of the start of a program, in an environment with other variables."""
    return results(launch.mpirun(1, [program, "start"], env=env).stdout)["start"]


def test_the_interpreter_and_the_mpi_are_found_or_named(tmp_path):
    program = compiled(tmp_path, SOURCES / "errors.c")
    status, text = start_of(program, MPIATTN_PYTHON="/no/such/python")
    assert status == 9 and "there is no program /no/such/python; set MPIATTN_PYTHON" in text
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True, timeout=launch.patience(60))
    status, text = start_of(program, MPIATTN_PYTHON=str(bare / "bin" / "python"), PYTHONPATH="")
    assert (
        status == 9
        and f"of {bare}, started as {bare}/bin/python, cannot load mpiattn: No module named 'mpiattn'" in text
    )
    assert start_of(program, MPIATTN_PYTHON=sys.executable) == (0, "")
    other = "mpich" if launch.vendor() == "openmpi" else "openmpi"
    status, text = start_of(program, MPI4PY_MPIABI=other)
    assert status == 5 and "the host program has" in text and "install mpi4py for the host program's MPI" in text


@pytest.mark.parametrize(
    "name, module",
    [("PYTHONHOME", "none"), ("PYTHONPATH", "encodings"), ("PYTHONPATH", "sitecustomize"), ("PYTHONPATH", "numpy")],
)
def test_modules_of_another_python_are_named(tmp_path, name, module):
    """The first call gives a status, and says which variable leads there; later calls do not get further."""
    program = compiled(tmp_path, SOURCES / "errors.c")
    (folder := tmp_path / "other").mkdir()
    (folder / f"{module}.py").write_text("raise SystemExit('of another Python')\n")
    statuses = results(launch.mpirun(1, [program], env={name: str(folder)}).stdout)
    assert {statuses[case][0] for case in ("before MPI_Init", "start", "plan")} == {9}
    assert f"{name} is {folder}: unset it if that is another Python's" in statuses["before MPI_Init"][1]
    if module != "numpy":
        assert statuses["plan"][1] == "Python did not start at the first call, and cannot be started again"


@pytest.mark.parametrize("own", [False, True])
def test_signals_are_the_programs(tmp_path, own):
    """No handler is changed; a handler of the program ends a call, but no later one; Ctrl-C ends the program."""
    program = compiled(tmp_path, SOURCES / "signals.c", options=["-std=c99"])
    outcome = launch.mpirun(2, [program, *(["own"] if own else [])], check=False)
    statuses = results(outcome.stdout)
    for rank in (0, 1):
        assert statuses[f"changed {rank}"] == statuses[f"outside {rank}"] == (0, "")
    assert statuses["inside 1"] == (11, "the call was interrupted")
    assert outcome.returncode and "survived" not in outcome.stdout
    if own:  # rank 0 knows only that another rank failed, and waits for that one to say why
        assert re.findall("^mpiattn: .*", outcome.stderr, re.MULTILINE) == ["mpiattn: rank 1: the call was interrupted"]
    else:
        assert statuses["inside 0"][0] == 4 and statuses["afterwards 0"] == statuses["afterwards 1"] == (0, "")


@pytest.mark.parametrize("times", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_an_error_of_all_ranks_is_printed_once(tmp_path, times):
    """Whichever rank calls MPI_Abort first, the text is not lost."""
    source = tmp_path / "wrong.c"
    source.write_text(TRACERS.read_text().replace("neighborhood %dx%d cyclic=1", "neighborhood %dx%d cyclic=5"))
    program = compiled(tmp_path, source, options=["-std=c99"])
    for _ in range(times):
        outcome = launch.mpirun(4, [program], check=False)
        (line,) = re.findall("^mpiattn: .*", outcome.stderr, re.MULTILINE)
        assert outcome.returncode and line.startswith("mpiattn: rank 0: mask is 'neighborhood 7x9 cyclic=5'")


def test_a_program_that_ends_its_python(tmp_path):
    """Nothing of the Python that is no longer there is used, also where another one has been started."""
    variable = sysconfig.get_config_var
    python = [f"-I{sysconfig.get_path('include')}", "-Wno-pedantic", f"-L{variable('LIBDIR')}"]
    python += [f"-Wl,-rpath,{variable('LIBDIR')}", f"-lpython{variable('LDVERSION')}"]
    program = compiled(tmp_path, SOURCES / "ends_python.c", options=["-Wl,--no-as-needed", *python])
    path = os.pathsep.join([str(launch.ROOT), sysconfig.get_path("purelib")])
    statuses = results(launch.mpirun(1, [program], env={"PYTHONPATH": path}).stdout)
    assert statuses.pop("before") == (0, "")
    assert list(statuses) == ["after", "free", "again"]
    for status, text in statuses.values():
        assert status == 9 and "the host program has ended Python (Py_Finalize)" in text


def test_small_stacks(tmp_path):
    """A thread's stack that is too small for Python is an error, not a crash; what the page asks for is enough."""
    program = compiled(tmp_path, SOURCES / "stack.c", options=["-pthread"])
    for size in (32, 64):
        statuses = results(launch.mpirun(1, [program, size]).stdout)
        assert list(statuses) == ["plan"]
        assert statuses["plan"][0] == 9 and "KiB of its stack left; calls of mpiattn need 96 KiB" in statuses["plan"][1]
    assert "stack of 128 KiB" in (launch.DOCS / "callers.md").read_text()
    statuses = results(launch.mpirun(1, [program, 128]).stdout)
    assert statuses["plan"] == statuses["forward"] == (0, "") and statuses["shape"][0] == 1


def test_the_folders_that_compilers_get_have_nothing_else():
    """Beside a wheel of MPICH, -I and -L of the whole environment would bring its mpi.h and libmpi.so along."""
    at = embedded.installed()
    for path in (*at.include.iterdir(), *at.lib.iterdir()):
        assert path.name.removeprefix("lib").startswith("mpiattn")


# Another MPI than the host's, which mpi4py would have: it reports another version.
IMPOSTOR = """
import mpi4py.MPI
mpi4py.MPI.Get_library_version = lambda: "Another MPI 1.0"
"""


def test_another_mpi_of_the_same_family(tmp_path):
    """Two libraries of one family in a process are told apart by what they say of themselves."""
    program = compiled(tmp_path, SOURCES / "errors.c")
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import mpi4py\nmpi4py.rc.initialize = mpi4py.rc.finalize = False\n" + IMPOSTOR
    )
    path = os.pathsep.join([str(site), launch.environment().get("PYTHONPATH", "")])
    status, text = start_of(program, PYTHONPATH=path)
    assert status == 5 and "that of mpi4py is 'Another MPI 1.0'; they must be the same" in text


def test_compiler_options(tmp_path):
    """mpiattn-config and pkg-config find the library and its header; without a library it is said how to build it."""
    at = embedded.installed()

    def config(*options):
        command = [sys.executable, "-m", "mpiattn.embed.config", *options]
        return subprocess.run(
            command, text=True, capture_output=True, timeout=launch.patience(60), env=launch.environment()
        )

    said = config("--prefix", at.prefix, "--cflags", "--libs").stdout.split()
    assert said == [*at.compiler_flags(), *at.linker_flags()]
    missing = config("--prefix", tmp_path, "--libs")
    assert missing.returncode == 1 and f"run mpiattn-config --build --prefix {tmp_path}" in missing.stderr
    assert config().returncode == 2
    broken = config("--build", "--prefix", tmp_path, "--cc", "no-such-compiler")
    assert broken.returncode == 1 and "there is no program no-such-compiler; --cc names a compiler" in broken.stderr
    if shutil.which("pkg-config"):
        env = launch.environment({"PKG_CONFIG_PATH": str(at.pkgconfig)})
        words = subprocess.check_output(["pkg-config", "--cflags", "--libs", "mpiattn"], env=env, text=True).split()
        assert f"-I{at.include}" in map(os.path.normpath, words) or Path(words[0][2:]).resolve() == at.include.resolve()
        assert words[-1] == "-lmpiattn"


PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(example C)
add_executable(program {source})
{page}
target_link_libraries(program m)
"""


@pytest.mark.skipif(not shutil.which("cmake"), reason="no cmake")
def test_cmake(tmp_path):
    (page,) = re.findall(r"```\n(find_package.*?)```", (launch.DOCS / "callers.md").read_text(), re.DOTALL)
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(source=TRACERS, page=page))
    built = tmp_path / "build"
    options = [f"-DCMAKE_PREFIX_PATH={embedded.installed().prefix}", f"-DMPI_C_COMPILER={compiler('mpicc')}"]
    for command in (["-S", tmp_path, "-B", built, *options], ["--build", built]):
        subprocess.run(["cmake", *command], check=True, timeout=launch.patience(60), stdout=subprocess.DEVNULL)
    assert "step 6" in launch.mpirun(1, [built / "program"]).stdout


def test_the_code_of_the_page(tmp_path):
    """The first program of the page compiles as it stands there, and runs; the lines about options compile."""
    blocks = re.findall(r"```c\n(.*?)```", (launch.DOCS / "callers.md").read_text(), re.DOTALL)
    source = tmp_path / "page.c"
    source.write_text(blocks[0])
    outcome = launch.mpirun(2, [compiled(tmp_path, source)])
    assert outcome.stdout.count("status 0 \n") == 2
    arrays = (
        "mpiattn_array q, mpiattn_array k, mpiattn_array v, mpiattn_array out, mpiattn_array lse, mpiattn_array tile"
    )
    source.write_text(
        f'#include "mpiattn.h"\nint main(void) {{ return 0; }}\n'
        f"static void f(mpiattn_plan plan, {arrays}) {{\n{blocks[1]}\n}}\n"
    )
    compiled(tmp_path, source, options=["-Wno-unused-function"])
