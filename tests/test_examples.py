"""The examples in the docstrings of what mpiattn offers, on one rank."""

import sys

import launch

WITH_EXAMPLE = (
    "MeshAttention",
    "MeshAttention.verify",
    "attention",
    "merge",
    "Layout",
    "KVCache",
    "tree_decode",
    "ring_decode",
    "query_ring_decode",
    "masks.blocks",
    "masks.chunked",
    "masks.function",
    "masks.global_tokens",
    "masks.intervals",
    "masks.neighborhood",
    "masks.parse",
    "masks.ranges",
    "masks.share_question",
    "masks.sphere",
    "masks.tree",
    "masks.window",
)
CODE = f"""
import doctest, inspect, mpiattn, operator
tried = set()
for name in {{*mpiattn.__all__, *{WITH_EXAMPLE}}}:
    value = operator.attrgetter(name)(mpiattn)
    if callable(value):
        for test in doctest.DocTestFinder(recurse=True).find(value, name, inspect.getmodule(value), globs={{}}):
            runner = doctest.DocTestRunner()
            assert not runner.run(test).failed, test.name
            tried |= {{test.name}} if test.examples else set()
missing = set({WITH_EXAMPLE}) - tried
assert not missing, f"no examples in {{missing}}"
"""


def test_examples_do_what_they_say():
    launch.mpirun(1, [sys.executable, "-c", CODE], timeout=60)


def test_public_names_that_have_sections():
    """Shapes, dtypes, defaults, results and errors are where numpydoc looks for them."""
    code = (
        f"import inspect, mpiattn, operator\nfor name in {WITH_EXAMPLE}:\n"
        "    text = operator.attrgetter(name)(mpiattn).__doc__\n"
        "    for section in ('Parameters', 'Raises', 'Examples'):\n"
        "        assert f'\\n{section}\\n{\"-\" * len(section)}\\n' in inspect.cleandoc(text), (name, section)\n"
    )
    launch.mpirun(1, [sys.executable, "-c", code], timeout=60)
