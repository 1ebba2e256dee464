"""What the benchmarks share that are programs of their own: `python -m mpiattn.bench.halo`, `.flex` and `.sdpa`."""

import argparse

from ..console import options
from ..console.json_file import report_parts
from ..console.launch import on_all_ranks
from ..console.parser import Parser


def parser_of(name, about, *numbers):
    """The parser of a program.  about: its docstring.  numbers: as of `options.add_numbers`."""
    parser = Parser(
        prog=f"python -m mpiattn.bench.{name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_numbers(parser, *numbers)
    return parser


def run(args, measure):
    """Run measure(job, args), which yields data and text, on all ranks; returns the exit code."""
    return on_all_ranks(lambda job: report_parts(job, args.json, measure(job, args)))
