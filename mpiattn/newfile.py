"""Files that appear whole or not at all: written under another name in the same folder, then renamed."""

import os
import tempfile

from .errors import FileError


class NewFile:
    """A file being made that will be called `path`.

    `partial` is the name to write to until `publish`; it is new and nobody else's.  A symbolic link is followed, so
    that what it points to is replaced and not the link.  Raises FileError, naming the argument `name`, where no
    regular file can be made or where it would replace one of `inputs`.
    """

    def __init__(self, name, path, inputs=()):
        self.name, self.path = name, path
        self.target = check_target(name, path, inputs)
        folder, base = os.path.split(self.target)
        try:
            handle, self.partial = tempfile.mkstemp(prefix=f".{base}.", suffix=".partial", dir=folder)
        except OSError as error:
            raise FileError(f"{name} is {str(path)!r}; it cannot be written: {error.strerror}") from error
        os.fchmod(handle, 0o666 & ~_umask())             # mkstemp gives the owner alone access
        os.close(handle)

    def publish(self):
        """Put what was written on the disk and give it its name."""
        with open(self.partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self.partial, self.target)
        self.partial = None

    def discard(self):
        """Leave nothing behind; does nothing after `publish`."""
        if self.partial is not None and os.path.exists(self.partial):
            os.unlink(self.partial)
        self.partial = None


def check_target(name, path, inputs=()):
    """The real path of a file to be made; FileError unless it is, or can become, a regular file and no input."""
    def no(why):
        return FileError(f"{name} is {str(path)!r}; {why}")
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    for other in inputs:
        if target == os.path.realpath(other) or (os.path.exists(target) and os.path.exists(other)
                                                 and os.path.samefile(target, other)):
            raise no(f"it must be another file than {str(other)!r}")
    if os.path.isdir(target):
        raise no("it is a folder, it must be a file")
    if os.path.exists(target) and not os.path.isfile(target):
        raise no("it is not a regular file")
    if not os.path.isdir(folder):
        raise no(f"there is no folder {folder!r}")
    if not os.access(folder, os.W_OK):
        raise no(f"its folder {folder!r} is not writable")
    return target


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
