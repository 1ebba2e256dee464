"""Suggestions for mistyped options."""

from ..problem import keywords
from ..system.closest import closest


def of_options(message, words, options):
    """Text to append to an error about a command line: suggestions for its mistyped options.

    words: the command line.  options: all known options; as in argparse, an option may be abbreviated.
    """
    long, text = [option for option in options if option.startswith("--")], ""
    for word in words[: words.index("--") if "--" in words else None]:  # no options after --
        name = word.split("=")[0]
        if not name.startswith("--") or any(option.startswith(name) for option in long):
            continue
        if known := keywords.option(name, long):
            text += known
        elif meant := closest(name, long):
            text += f"; did you mean {meant}?" if name in message else f"; did you mean {meant} by {name}?"
    return text
