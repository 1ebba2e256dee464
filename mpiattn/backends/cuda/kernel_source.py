"""Kernel sources: the complete text of a kernel, and the cache key of its compiled code.

CuPy and NVRTC cache by the source text and ignore changes in included files.  So the project's headers are inserted
into the text: a changed header then changes the key.
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

    name: of the function.  file: its source file.  defines: ((name, value), ...), its constants.
    threads, shared_bytes: threads and bytes of dynamic shared memory of a thread block.
    """

    name: str
    file: str
    defines: tuple
    threads: int
    shared_bytes: int = 0

    def options(self):
        """The constants as compiler options."""
        return tuple(f"-D{name}={value}" for name, value in self.defines)


def path(file):
    """The path of a source file."""
    return kernel_dir() / FOLDER / file


@cache
def expanded(file):
    """The text of a source file, with each project header inserted once, at its first include."""
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
    """A key for a kernel's compiled code, 24 hex digits.  more: strings of all else that the code depends on."""
    text = "\0".join((expanded(kernel.file), kernel.name, *kernel.options(), *more))
    return hashlib.sha256(text.encode()).hexdigest()[:24]
