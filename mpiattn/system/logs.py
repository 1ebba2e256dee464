"""The records of the library for Python's logging: logger `mpiattn`, which is silent until a program sets it up.

Every record has an attribute `rank`: in the communicator of what it is about, or in the launch.
"""

import logging

from .launch_variables import launch_rank

LOGGER = logging.getLogger("mpiattn")
LOGGER.addHandler(logging.NullHandler())  # else Python prints warnings of a program that has set up nothing
FILES = logging.getLogger("mpiattn.files")
DEBUG, INFO, ERROR = logging.DEBUG, logging.INFO, logging.ERROR


def note(level: int, rank: int, text: str, *values: object) -> None:
    """Make a record; the values are put into the text, as by %, only if anybody reads it."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, text, *values, extra={"rank": rank}, stacklevel=2)


def note_file(text: str, *values: object) -> None:
    """Make a record of level WARNING about a file, of logger `mpiattn.files`."""
    FILES.warning(text, *values, extra={"rank": launch_rank()}, stacklevel=2)


def print_notes_of_files() -> None:
    """Print those on standard error, as the commands do."""
    if logging.lastResort is not None:
        FILES.addHandler(logging.lastResort)
