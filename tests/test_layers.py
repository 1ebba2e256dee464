"""The library's layers, read off its imports; the length of its modules; what importing it loads."""

import ast
import subprocess
import sys
from functools import cache

import launch
import pytest

pytestmark = pytest.mark.workshop

PACKAGE = launch.ROOT / "mpiattn"

# Imports go down, or sideways without cycles.  A package's name stands for all its modules.
# Packages, the lowest first, as docs/contributing.md draws them: those of the library, which programs call, and the
# tools on top of it.  Each may import from those before it, from `errors` and from `version`.
LIBRARY = [
    "system",
    "masks",
    "problem",
    "schedule",
    "model",
    "backends",
    "arguments",
    "comm",
    "engine",
    "files",
    "verify",
    "plan",
    "decode",
    "embed",
]
TOOLS = ["tuning", "check", "console", "plots", "bench", "cli"]
ROOMS = LIBRARY + TOOLS
TOP = {"", "__main__", "errors", "jax", "torch", "version"}  # the modules that are in no package
NO_MPI = {"problem", "masks", "schedule", "model", "backends", "arguments", "engine", "plots", "errors", ""}
PURE = {
    "masks",
    "problem",
    "arguments",
    "schedule",
    "model",
    "errors",
    "verify.reference",
    "verify.reference_masks",
    "verify.reference_biases",
    "files.finite",
    "decode.token_owners",
    "system.atomic_file",
    "system.partial_files",
    "system.sources",
}
ARITHMETIC = {
    "schedule.kinds",
    "schedule.route",
    "schedule.steps",
    "schedule.greedy",
    "schedule.collective",
    "schedule.validate",
    "schedule.tile",
    "schedule.bound",
    "schedule.reduction",
    "schedule.timeline",
    "model.machine",
    "errors",
    "system.sources",
    "",
}
LINES = 700


def name_of(path):
    """ "cost" for cost.py, "cli.run" for cli/run.py, "cli" for cli/__init__.py, "" for the package's own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    name_of(path): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not {launch.TESTS, launch.SLURM} & set(path.parents)
}  # which are installed inside


def part(module):
    return module.split(".")[0]


@cache
def tree(module):
    """A module's text, parsed."""
    return ast.parse(MODULES[module].read_text())


def for_types_only(node):
    """Whether a statement is one that type checkers read and Python does not run."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@cache
def imports(module, types=True):
    """(inside, outside): modules of mpiattn that a module imports anywhere, and outer packages.

    types: whether imports that only type checkers read are included.
    """
    path, inside, outside = MODULES[module], set(), set()
    package = module.split(".") if path.name == "__init__.py" and module else module.split(".")[:-1]
    skipped = {
        inner
        for node in ast.walk(tree(module))
        if for_types_only(node) and not types
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree(module)):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            outside.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            target = ".".join([*base, *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                deeper = f"{target}.{alias.name}".lstrip(".")
                inside.add(deeper if deeper in MODULES else target)
    return frozenset(inside - {module}), frozenset(outside)


def within(module, names):
    """Whether a module or a package that holds it is among the names."""
    return module in names or part(module) in names


def test_every_module_has_a_room():
    assert {part(module) for module in MODULES} - TOP == set(ROOMS)


def test_imports_go_down():
    for module in MODULES:
        inside, outside = imports(module)
        below = ROOMS if part(module) in TOP else ROOMS[: ROOMS.index(part(module)) + 1]
        up = {other for other in inside if part(other) not in {*below, "errors", "version"}}
        assert module == "__main__" or not up, f"{module} imports from a package above: {up}"
        assert "mpiattn" not in outside, f"{module}: inside the package, imports are relative"


def test_the_docs_draw_the_rooms():
    drawing = (launch.DOCS / "contributing.md").read_text().split("## Inside")[1].split("```")[1]
    rows = [line.split()[0] for line in drawing.splitlines() if line[:1].strip()]
    assert rows == ["TOOLS", *TOOLS[::-1], "LIBRARY", *LIBRARY[::-1]]


FACTS = {  # that back ends may ask for
    "system.sources",
    "system.host",
    "system.launch_variables",
    "system.gpu_aware_mpi",
    "system.closest",
    "model.machine",
    "problem.tensors",
}


def test_pure_modules_are_pure():
    for module in MODULES:
        inside, outside = imports(module, types=False)
        if within(module, PURE):
            assert not outside & {"mpi4py", "h5py", "cupy", "jax", "torch"}, module
        if within(module, NO_MPI):
            assert "mpi4py" not in outside, module
        if module in ARITHMETIC:
            assert "numpy" not in outside, module
        if part(module) == "backends":
            assert not {other for other in inside if not within(other, {"backends", "errors", *FACTS})}, module
        if module in ("verify.reference", "verify.reference_masks"):
            assert inside <= {"verify.reference_masks"}, "the oracle shares nothing with what it judges"


# Private by their spelling alone: what named tuples have, and the one way to end a process at once.
NOT_PRIVATE = {"_asdict", "_replace", "_fields", "_make", "_exit"}


def test_private_names_stay_inside():
    """A private name of an object is used where its class is, or a class that inherits from it."""
    for module in MODULES:
        nodes = list(ast.walk(tree(module)))
        attributes = [
            node
            for node in nodes
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        ]
        own = {node.attr for node in attributes if ast.unparse(node.value) in ("self", "cls", "super()")}
        own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        others = [node for node in attributes if node.attr not in own | NOT_PRIVATE]
        assert not [f"{module}, line {node.lineno}: {ast.unparse(node)}" for node in others]


def test_torch_and_jax_are_optional():
    """Nobody loads mpiattn.torch or mpiattn.jax but who asks for it."""
    assert {"torch", "jax"} <= set(MODULES)
    assert not {module for module in MODULES if {"torch", "jax"} & imports(module)[0]}


def test_matplotlib_is_optional():
    """Only pictures need it, and none loads it before it is drawn."""
    assert {part(module) for module in MODULES if "matplotlib" in imports(module)[1]} == {"plots"}
    pictures = ", ".join(f"mpiattn.{module}" for module in MODULES if part(module) == "plots")
    loaded = python(f"import sys, {pictures}; print(*sys.modules)")
    assert "matplotlib" not in loaded.split()


def test_no_cycles():
    done, path = set(), []

    def visit(module):
        assert module not in path, f"a cycle of imports: {' -> '.join([*path[path.index(module) :], module])}"
        if module in done:
            return
        path.append(module)
        for other in sorted(imports(module, types=bool(module))[0]):  # the package names types of all its modules
            visit(other)
        done.add(path.pop())

    for module in MODULES:
        visit(module)


@cache
def scripts():
    """Python's files beside the package: tests, and programs of the docs and for Slurm."""
    return [path for folder in (launch.TESTS, launch.DOCS, launch.SLURM) for path in sorted(folder.rglob("*.py"))]


@cache
def names(module):
    """What can be imported from a module, and some names inside its functions."""
    if not module:
        import mpiattn

        return {*mpiattn.__all__, *MODULES}
    bound = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
    return bound


def test_scripts_import_what_is_there():
    """A name that has moved is missed here, not where its script is run next."""
    for path in scripts():
        missing = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] == "mpiattn":
                module = node.module.removeprefix("mpiattn").removeprefix(".")
                assert module in MODULES, f"{path}, line {node.lineno}: no module {node.module}"
                modules_below = {name.removeprefix(f"{module}.") for name in MODULES}
                missing |= {alias.name for alias in node.names} - names(module) - modules_below
        assert not missing - {"flash"}, path  # which typed_use.py asks for, since it is not there


def test_files_are_short():
    long = [path for path in [*MODULES.values(), *scripts()] if len(path.read_text().splitlines()) >= LINES]
    assert not long


def test_names_of_test_files_differ():
    """All are collected in one process, by their names, where the whole suite runs under a launcher."""
    names = [path.name for path in launch.TESTS.rglob("test_*.py")]
    assert len(set(names)) == len(names)


def python(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=launch.environment(),
        text=True,
        capture_output=True,
        timeout=launch.patience(60),
    )
    assert not done.returncode, done.stderr
    return done.stdout


def loaded_alone(modules):
    """What each of some modules loads in a process that has loaded no other: their names, by module.

    The processes are forked from one, which has loaded nothing.
    """
    code = (
        "import os, sys\n"
        f"for module in {list(modules)!r}:\n"
        "    if not os.fork():\n"
        "        __import__(module)\n"
        "        print(module, *sys.modules, flush=True)\n"
        "        os._exit(0)\n"
        "    status = os.wait()[1]\n"
        "    assert not status, module\n"
    )
    lines = [line.split() for line in python(code).splitlines()]
    return {module: set(loaded) for module, *loaded in lines}


def test_import_loads_nothing_heavy():
    light = ["mpiattn", "mpiattn.schedule.steps", "mpiattn.schedule.greedy", "mpiattn.schedule.validate", "mpiattn.cli"]
    heavy = {"mpi4py", "numpy", "h5py", "cupy", "jax", "torch", "tqdm", "threadpoolctl"}
    assert not {module: heavy & loaded for module, loaded in loaded_alone(light).items() if heavy & loaded}


def test_pure_modules_load_no_mpi():
    """None of them, whichever is loaded first."""
    pure = ", ".join(f"mpiattn.{module}".rstrip(".") for module in MODULES if within(module, NO_MPI | PURE))
    assert "mpi4py" not in python(f"import sys, {pure}; print(*sys.modules)").split()


def test_import_loads_little():
    assert int(python("import sys; before = len(sys.modules); import mpiattn; print(len(sys.modules) - before)")) < 20


def test_names_of_the_package():
    """Every public name is what its home says, whatever was imported before and however often it is asked for."""
    code = (
        "import mpiattn\n"
        "for _ in range(2):\n"
        "    for name, home in mpiattn._HOMES.items():\n"
        "        value = getattr(mpiattn, name)\n"
        "        assert callable(value), f'mpiattn.{name} is {value}'\n"
        "        assert name in dir(mpiattn) and name in mpiattn.__all__\n"
        "assert callable(mpiattn.masks.neighborhood) and 'masks' in dir(mpiattn) and 'masks' in mpiattn.__all__\n"
    )
    python(code)


def test_types_of_the_package():
    """What type checkers read has the names, from the homes, that are loaded on first use."""
    import mpiattn

    block = next(node for node in tree("").body if for_types_only(node))
    named = {
        (alias.asname, f".{node.module}") for node in block.body for alias in node.names if alias.asname == alias.name
    }
    assert named == {*mpiattn._HOMES.items(), *((name, ".None") for name in mpiattn._MODULES)}  # from . import it


def test_unknown_name():
    import mpiattn

    with pytest.raises(AttributeError, match="no attribute 'flash'"):
        _ = mpiattn.flash
    assert mpiattn.__version__ in mpiattn.__dict__.values()
