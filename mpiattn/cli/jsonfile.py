"""Results for programs: JSON files that are written whole or not at all."""

import json
import os
import sys
import tempfile

from ..errors import FileError


def write_json(path, data):
    """Write `data` as JSON to the file `path`, or to standard output if it is "-".

    A file is written beside its place and then renamed, so a reader never sees half of one and a failure
    leaves an older file as it was.  nan and inf must be given as None: JSON has no word for them.
    Raises FileError, which names --json.
    """
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            with open(path, "w") as device:         # a pipe or /dev/null must not be renamed over
                device.write(text)
        else:
            _replace(os.path.realpath(path), text)
    except OSError as error:
        raise FileError(f"--json {path}: cannot write it: {error.strerror or error}") from None


def _replace(path, text):
    handle, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o666 & ~_umask())        # mkstemp gives its owner alone access
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
