"""The pages of docs/ that say what the code is: what is supported, the walks of values, the first program."""

import re
import sys
from importlib import import_module

import launch
import pytest

pytestmark = [pytest.mark.workshop,
              pytest.mark.skipif(not launch.DOCS.is_dir(), reason="takes the docs of a checkout")]
NAME = re.compile(r"`(mpiattn(?:\.\w+)+)`")


def named(text):
    """What a dotted name stands for."""
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


def test_support_matrix_is_what_the_code_takes():
    """If not: python docs/support.py."""
    launch.mpirun(1, [sys.executable, launch.DOCS / "support.py", "--check"], timeout=60)


def test_walks_name_what_there_is():
    """Every step of a walk names a module, class or function that exists, and what it imports is where it leads."""
    text = (launch.DOCS / "contributing.md").read_text().split("## Where a value goes")[1]
    code = [f"named({name!r})" for name in NAME.findall(text)]
    assert len(code) > 35 and text.count("\n### ") == 3
    launch.mpirun(1, [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(launch.TESTS)!r})\n"
                                            f"from test_docs import named\n{chr(10).join(code)}"], timeout=60)


def test_pages_name_files_that_there_are():
    """Paths in code spans, of modules, tests and documents, and links."""
    folders = (launch.ROOT, launch.DOCS, launch.SLURM, launch.ROOT / "kernels")
    for page in (page for folder in folders for page in folder.glob("*.md")):
        for path in re.findall(r"`((?:mpiattn|tests|docs|kernels|slurm)/[\w/.]+\.\w+)`", page.read_text()):
            assert (launch.ROOT / path).exists(), f"{page.name} names {path}"
        for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_first_program():
    text = (launch.DOCS / "start.md").read_text()
    code = re.search(r"<!-- test: first -->\n```python\n(.*?)```", text, re.DOTALL)[1]
    printed = launch.mpirun(3, [sys.executable, "-c", code], timeout=60).stdout
    assert printed.split("(1, 1000, 8, 64)")[1].split()[0] in ("(1,", "(3,")
