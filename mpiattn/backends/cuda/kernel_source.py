"""Kernel sources: one kernel as one text, and the key under which what is compiled from it may be kept.

Compilers of kernels cache by the text that they are given and not by what it includes, so the project's own headers
are put into it; a changed header is another text.
"""

import hashlib
import re
from functools import cache
from typing import NamedTuple

from ...system.sources import kernel_dir

FOLDER = "cuda"
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.MULTILINE)


class Kernel(NamedTuple):
    """A kernel and the constants that it is compiled with.

    name: of the function.  file: its source.  defines: ((name, value), ...).  threads, shared_bytes: of a thread block.
    """

    name: str
    file: str
    defines: tuple
    threads: int
    shared_bytes: int = 0

    def options(self):
        """The constants as options of a compiler."""
        return tuple(f"-D{name}={value}" for name, value in self.defines)


def path(file):
    """Where a source file is."""
    return kernel_dir() / FOLDER / file


@cache
def expanded(file):
    """The text of a source file with the project's headers in it, each once, where it is first included."""
    seen = set()

    def text_of(name):
        def include(match):
            if match[1] in seen:
                return ""
            seen.add(match[1])
            return text_of(match[1])
        return _INCLUDE.sub(include, path(name).read_text().replace("#pragma once\n", ""))
    return text_of(file)


def digest(kernel, *more):
    """A name for what is compiled from a kernel; `more`, strings: whatever else it depends on."""
    text = "\0".join((expanded(kernel.file), kernel.name, *kernel.options(), *more))
    return hashlib.sha256(text.encode()).hexdigest()[:24]
