"""Suggestions for mistyped options."""

import re

from ..arguments import keywords
from ..system.closest import closest

ROLE = re.compile(r"(q|k|v|dout|cu_seqlens|cu_seqlens_k)=")  # how an item of --names begins
TENSOR_FILES = (".npy", ".npz", ".safetensors", ".pt", ".pth")


def of_words(message, words):
    """Text to append to an error about a command line whose words are split otherwise than they must be."""
    kind, _, rest = message.partition(": ")
    if kind == "argument --window" and rest.startswith("expected one argument"):  # argparse takes -1,0 for an option
        return "; write --window=LEFT,RIGHT, for example --window=-1,0"
    if kind != "unrecognized arguments":
        return ""
    spare = rest.split()
    if any(word.split("=")[0] == "--names" for word in words) and any(ROLE.match(word) for word in spare):
        return "; --names is one word: --names q=NAME,k=NAME,v=NAME, with commas and without spaces"
    if any(word.endswith(TENSOR_FILES) for word in spare):
        return "; `mpiattn convert` makes one HDF5 file of several files: mpiattn convert q.npy k.npy v.npy qkv.h5"
    return ""


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
