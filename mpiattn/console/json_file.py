"""Results as JSON, in a file that is written whole or not at all."""

import json
import os
import sys

from ..comm.agreement import agreement
from ..errors import FileError
from ..system.atomic_file import JSON, NewFile, check_target
from ..system.os_errors import reason


def is_stream(path):
    """Whether a path is standard output, a device or a pipe: these are written to, not replaced."""
    return path == "-" or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def check_json(path, inputs=()):
    """Raise FileError, naming --json, if `write_json` could not write there; call it before the work."""
    if path is not None and not is_stream(path):
        check_target("--json", path, inputs, JSON)


def write_json(path, data):
    """Write `data` as JSON to the file `path`, or to standard output if it is "-".

    JSON has no nan and inf: give None instead.  Raises FileError, which names --json.
    """
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    if not is_stream(path):
        with NewFile("--json", path, (), JSON) as new, open(new.partial, "w") as file:
            file.write(text)
        return
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError as error:
        raise FileError(f"--json is {path!r}; it cannot be written: {reason(error)}") from None


def show(path, data, text):
    """Write `data` as JSON to `path`, unless that is None, and print `text`, unless JSON goes to standard output."""
    if path:
        write_json(path, data)
    if path != "-":
        print(text, flush=True)


def report(job, path, make):
    """As `show`, on rank 0 of a `Job`, of what make() returns there, or nothing if that is None; collective.

    What fails, all ranks raise, except for the printing: a pipe that is closed ends this rank as it ends any command.
    """
    made = None
    with agreement(job.peers, only=0):
        if job.comm.rank == 0:
            made = make()
            if path and made:
                write_json(path, made[0])
    if made and path != "-":
        print(made[1], flush=True)


def report_parts(job, path, parts):
    """Report every part of a long work on rank 0 as it comes; returns 0, the exit code; collective.

    parts: yields, on every rank, all data so far and the text of the part.  A JSON file is rewritten after each part,
    so that an interrupted job keeps it; a stream gets the whole data at the end.
    """
    late, data = path is not None and is_stream(path), None
    for part in parts:
        data = part[0]
        if path != "-":
            report(job, None if late else path, lambda part=part: part)
    job.on_rank_0(lambda: write_json(path, data) if late else None)
    return 0
