"""The pages of docs/ that say what the code is: what is supported, the walks of values, the first program."""

import re
import subprocess
import sys

import launch
import pytest

pytestmark = [pytest.mark.workshop, pytest.mark.skipif(not launch.DOCS.is_dir(), reason="takes the docs of a checkout")]
NAME = re.compile(r"`(mpiattn(?:\.\w+)+)`")


WALKS = """
import sys
import numpy as np
from importlib import import_module
from inspect import unwrap
from mpi4py import MPI

def named(text):
    words = text.split(".")
    for stop in range(len(words), 0, -1):
        try:
            value = import_module(".".join(words[:stop]))
        except ModuleNotFoundError:
            continue
        for word in words[stop:]:
            value = getattr(value, word)
        return value
    raise ModuleNotFoundError(text)

def codes(value):
    if hasattr(value, "__code__"):
        return {unwrap(value).__code__}
    made = set()
    for member in vars(value).values():
        function = getattr(member, "fget", None) or getattr(member, "func", member)
        made |= {unwrap(function).__code__} if hasattr(function, "__code__") else set()
    return made

def window():
    from mpiattn.cli import commands
    path = sys.argv[1]
    for words in (["generate", f"{path}/in.h5", "--seqlen", "40", "--heads", "2"],
                  ["run", f"{path}/in.h5", f"{path}/out.h5", "--window", "9,0", "--json", f"{path}/out.json"]):
        if words[0] == "run" or MPI.COMM_WORLD.rank == 0:
            arguments = commands.parser_of(words[0]).parse_args(words)
            arguments.words = words
            assert arguments.run(arguments) == 0
        MPI.COMM_WORLD.Barrier()

def q():
    from mpiattn import MeshAttention
    with MeshAttention(MPI.COMM_WORLD, seqlen=40, heads=2, head_dim=8, tile="qring", schedule="greedy",
                       backend="numpy") as plan:
        plan.forward(*np.ones((3, 1, len(plan.positions), 2, 8), np.float32))

def bias():
    from mpiattn import MeshAttention
    with MeshAttention(MPI.COMM_WORLD, seqlen=40, heads=2, head_dim=8, tile="qring", backend="numpy") as plan:
        arrays, bias = np.ones((3, 1, len(plan.positions), 2, 8), np.float32), np.ones((1, 2, 40, 20), np.float32)
        out, lse = plan.forward(*arrays, bias=bias)
        plan.backward(out, *arrays, out, lse, bias=bias)

def cache():
    from mpiattn import KVCache, tree_decode
    with KVCache(MPI.COMM_WORLD, capacity=40, kv_heads=2, head_dim=8, backend="numpy") as held:
        held.append(*np.ones((2, 1, 9, 2, 8), np.float32))
        tree_decode(np.ones((1, 1, 2, 8), np.float32), held, alibi_slopes=np.ones(2, np.float32))

for walk, names in WALKS.items():
    ran = set()
    sys.setprofile(lambda frame, event, _: ran.add(frame.f_code) if event == "call" else None)
    globals()[walk]()
    sys.setprofile(None)
    for name in names:
        value = named(name)
        if MPI.COMM_WORLD.rank == 0 and not name.startswith(ELSEWHERE) and not codes(value) & ran:
            print(f"{walk} does not come to {name}")
"""
# A protocol, which runs nothing, and what takes a GPU or a C compiler; these only have to exist.
ELSEWHERE = ("mpiattn.backends.base.", "mpiattn.backends.cuda.", "mpiattn.backends.cpu.")


def test_support_matrix_is_what_the_code_takes():
    """If not: python docs/support.py."""
    launch.mpirun(1, [sys.executable, launch.DOCS / "support.py", "--check"], timeout=60)


def test_walks_are_those_that_values_take(tmp_path):
    """Every step of a walk is code that runs where such a value is used, on two ranks."""
    text = (launch.DOCS / "contributing.md").read_text().split("## Where a value goes")[1]
    walks = {re.match(r"`(\w+)`", walk)[1]: NAME.findall(walk) for walk in text.split("\n### ")[1:]}
    assert list(walks) == ["window", "q", "bias", "cache"] and min(map(len, walks.values())) > 10
    code = f"WALKS, ELSEWHERE = {walks!r}, {ELSEWHERE!r}\n{WALKS}"
    printed = launch.mpirun(2, [sys.executable, "-m", "mpi4py", "-c", code, tmp_path], timeout=60).stdout
    assert not re.findall(".*does not come to.*", printed)


def test_pages_name_files_that_there_are():
    """Paths in code spans, of modules, tests and documents, and links."""
    folders = (launch.ROOT, launch.DOCS, launch.SLURM, launch.ROOT / "kernels")
    for page in (page for folder in folders for page in folder.glob("*.md")):
        for path in re.findall(r"`((?:mpiattn|tests|docs|kernels|slurm)/[\w/.]+\.\w+)`", page.read_text()):
            assert (launch.ROOT / path).exists(), f"{page.name} names {path}"
        for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


FRONT_PAGE = """
import runpy, sys
from unittest.mock import Mock
source = [open(sys.argv[2]).read()]
runpy.run_path(sys.argv[1])["front_page"](Mock(), "index", source)
print(source[0])
"""


def test_the_front_page_of_the_site_is_the_readme():
    """All of it but its list of pages; links lead to pages of the site."""
    words = [sys.executable, "-c", FRONT_PAGE, launch.DOCS / "conf.py", launch.DOCS / "index.md"]
    page = subprocess.run(
        words, env=launch.environment(), text=True, capture_output=True, check=True, timeout=launch.patience(60)
    ).stdout
    readme = (launch.ROOT / "README.md").read_text().split("## Read on")[0]
    for line in readme.splitlines():
        assert line in page or "](" in line
    assert page.startswith("# mpiattn\n") and "```{toctree}" in page.split("## Read on")[1]
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page)
    assert "testing.md" in links and "kernels.md" in links
    assert not [link for link in links if "/" in link or not (launch.DOCS / link).exists()]


def test_first_program():
    text = (launch.DOCS / "start.md").read_text()
    code = re.search(r"<!-- test: first -->\n```python\n(.*?)```", text, re.DOTALL)[1]
    printed = launch.mpirun(3, [sys.executable, "-c", code], timeout=60).stdout
    assert printed.split("(1, 1000, 8, 64)")[1].split()[0] in ("1x3", "3x1", "bands")


@pytest.mark.parametrize("ranks", [3, 4])
def test_the_program_with_a_bias_runs(ranks):
    """On 4 ranks with planes, which hold the bias by heads."""
    text = (launch.DOCS / "biases.md").read_text()
    code = re.search(r"<!-- test: biases -->\n```python\n(.*?)```", text, re.DOTALL)[1]
    code = code.replace("head_dim=16", f'head_dim=16, backend="numpy", tile="{"1x3" if ranks == 3 else "2x1x2"}"')
    code += "\n    assert dbias.shape == bias.shape and (dbias != 0).any()"
    code += "\n    assert plan.sent[0] == plan.formula() + plan.formula('backward')\n"
    launch.mpirun(ranks, [sys.executable, "-m", "mpi4py", "-c", code], timeout=60)


def test_the_program_with_pieces():
    """They have the same work, as the page says."""
    text = (launch.DOCS / "concepts.md").read_text()
    code = re.search(r"<!-- test: pieces -->\n```python\n(.*?)```", text, re.DOTALL)[1]
    printed = launch.mpirun(3, [sys.executable, "-c", code], timeout=60).stdout
    pairs = [float(of_rank) for of_rank in re.findall(r"bands ([\d.]+)", printed)]
    assert len(pairs) == 3 and all(abs(of_rank - 5050 / 3) < 60 for of_rank in pairs)


def test_the_program_that_deals_documents():
    """The work of each step's documents is balanced, as the page says."""
    text = (launch.DOCS / "training.md").read_text()
    code = re.search(r"<!-- test: dealt -->\n```python\n(.*?)```", text, re.DOTALL)[1]
    printed = launch.mpirun(7, [sys.executable, "-c", code], timeout=60).stdout
    pairs = [float(of_rank) for of_rank in re.findall(r"([\d.]+) pairs", printed)]
    steps = [1000, 100, 200, 2796], [2500, 100, 1496]
    totals = [sum(tokens * (tokens + 1) / 2 for tokens in step) for step in steps]
    assert len(pairs) == 14 and abs(sum(pairs) - sum(totals)) < 1e-6 * sum(totals)
    assert max(pairs) < 1.15 * max(totals) / 7


# Large sites

SITES = launch.DOCS / "sites.md"


def test_every_site_says_that_nobody_has_tried_it():
    _, *sections = re.split(r"^## ", SITES.read_text(), flags=re.MULTILINE)
    assert len(sections) >= 6
    for section in sections:
        title, _, rest = section.partition("\n")
        assert re.match(r"\s*\*Not run there by us\. Read on \d+ \w+ \d{4}[.,;]", rest), title


def test_what_sites_put_into_env_sh_is_what_the_scripts_read():
    """Shell without errors of syntax, whose variables of mpiattn and options of sbatch have a meaning here."""
    scripts = "".join(
        path.read_text() for path in (launch.ROOT / "slurm").iterdir() if path.suffix in (".sh", ".sbatch")
    )
    scripts += (launch.ROOT / "setup.py").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", SITES.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    for block in blocks:
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
        assert set(re.findall(r"\bMPIATTN_\w+", block)) <= set(re.findall(r"\bMPIATTN_\w+", scripts))
        assert not re.search(r"--gpus-per-task|--gpu-bind|--cpu-bind", block)
        for script in re.findall(r"slurm/\w+\.(?:sh|sbatch)", block):
            assert (launch.ROOT / script).is_file(), script
