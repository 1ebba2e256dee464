"""Sphinx: `sphinx-build -W -b html docs FOLDER` makes the site, with mpiattn, its extra `docs` and an MPI installed."""

import re
import sys
from pathlib import Path

import mpi4py

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
sys.path[:0] = [str(HERE), str(HERE.parent)]
mpi4py.rc.initialize = mpi4py.rc.finalize = False  # modules are read, nothing is run

import mpiattn  # noqa: E402

project = "mpiattn"
author = copyright = "the maintainers of mpiattn"
version = release = mpiattn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "numpydoc", "command_help"]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["__pycache__"]
highlight_language = "none"  # of blocks that name no language: drawings and commands, which are no Python
html_theme = "furo"
html_title = f"mpiattn {version}"

autodoc_mock_imports = ["jax", "torch"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
numpydoc_show_class_members = False  # autodoc lists them
numpydoc_validation_checks = set()

SECTION = re.compile(r"^(Parameters|Returns|Attributes|Raises|Examples)\n-+$", re.MULTILINE)
ARGUMENT = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): +(?=\S)")


# Pages of the site that include a file from elsewhere.
INCLUDED = {"kernels/README.md": "kernels.md", "slurm/README.md": "cluster.md"}


def front_page(app, docname, source):
    """Put the README into the front page, without its table of pages, which the site lists itself."""
    if docname != "index":
        return
    app.env.note_dependency(README)
    text, table, _ = README.read_text(encoding="utf-8").partition("\n## Read on\n")
    if not table or "{{ README }}" not in source[0]:
        raise ValueError("README.md has no section 'Read on', or index.md no place for the README")
    text = re.sub(r"\[docs/([^]]*)\]\(docs/", r"[\1](", text).replace("](docs/", "](")
    for file, page in INCLUDED.items():
        text = text.replace(f"]({file}", f"]({page}")
    source[0] = source[0].replace("{{ README }}", text)


def prose_to_terms(app, what, name, obj, options, lines):
    """Make a list of the arguments in docstrings without numpydoc sections, "name: meaning" and an indented rest."""
    if SECTION.search("\n".join(lines)):
        return
    made = []
    for line in lines:
        match = ARGUMENT.match(line)
        if made and made[-1] and (match if not made[-1].startswith(" ") else not line.startswith(" ")):
            made.append("")  # a list begins, or ends
        if match:
            made.append(", ".join(f"``{word}``" for word in match[1].split(", ")))
            line = " " * 4 + line[match.end() :]
        made.append(re.sub(r"(?<![`*])\*(?!\*)", r"\\*", line))  # a product, not emphasis
    lines[:] = made


def pictures_as_they_are(app, what, name, obj, options, lines):
    """Make an indented block after a line that ends with a colon a literal one: drawings of masks and layouts."""
    for number in range(len(lines) - 2):
        line, between, below = lines[number : number + 3]
        if re.search(r"[^:]:$", line) and not between and below.startswith("    "):
            lines[number] += ":"


def skip_fields(app, what, name, obj, skip, options):
    """Leave out the fields of named tuples, which their class describes."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", front_page)
    app.connect("autodoc-process-docstring", pictures_as_they_are, priority=300)
    app.connect("autodoc-process-docstring", prose_to_terms, priority=400)  # before numpydoc, at 500
    app.connect("autodoc-skip-member", skip_fields)
