"""The directive `command-help`, for Sphinx: a heading and the text of `--help` of every subcommand of mpiattn."""

import os
import re

from docutils import nodes
from docutils.parsers.rst import Directive

from mpiattn.cli import commands


class CommandHelp(Directive):
    """Takes no argument; the headings are called as the commands, so that pages can link to them."""

    def run(self):
        """The sections, one a subcommand."""
        os.environ["COLUMNS"] = "110"  # argparse breaks lines there
        sections = []
        for name in commands.COMMANDS:
            section = nodes.section(ids=[f"mpiattn-{name}"], names=[f"mpiattn-{name}"])
            text = commands.parser_of(name).chosen.format_help()
            summary = _sentence(commands.COMMANDS[name])
            section += [nodes.title("", f"mpiattn {name}"), nodes.paragraph("", f"{summary}.")]
            section += nodes.literal_block(text, re.sub(r"\x1b\[[\d;]*m", "", text), language="text")
            sections.append(section)
        return sections


def _sentence(summary):
    return summary[0].upper() + summary[1:]


def setup(app):
    """Called by Sphinx."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
