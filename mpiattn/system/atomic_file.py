"""Files that appear whole or not at all: written under another name in the same folder, then renamed."""

import contextlib
import os
import stat

from ..errors import FileError
from . import partial_files
from .os_errors import reason
from .output_lock import OutputLock


class NewFile:
    """A file that will appear under the name `path`.

    signature: bytes with which an existing file must begin to be replaced; an empty one may always be.
    locked: whether this process must be the only one that writes the file.
    Write to `partial`, a new and unique name, until `publish`, then `discard`; as a context, it is published only if
    the body succeeds.  Symbolic links are followed: the file they point to is replaced, not the link.  The new file
    keeps the permissions of the replaced one.  Partials of the same file that killed jobs have left are removed.
    Raises FileError, naming the argument `name`, where no regular file can be made, where it must not be written, where
    it would replace one of `inputs`, or where another job has its lock.
    """

    def __init__(self, name, path, inputs=(), signature=b"", locked=False):
        self.name, self.path = name, path
        self.target = check_target(name, path, inputs, signature)
        folder, base = os.path.split(self.target)
        partial_files.remove_stale(folder, base)
        self.lock, self.partial = OutputLock(self.target), None
        try:
            refusal = self.lock.take() if locked else None
            if not refusal:
                self.partial = partial_files.create(name, folder, base)
        except OSError as error:
            self.discard()
            raise FileError(f"{name} is {str(path)!r}; it cannot be written: {reason(error)}") from error
        if refusal:
            raise FileError(f"{name} is {str(path)!r}; {refusal}")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            if error is None:
                self.publish()
        except OSError as caught:
            error = caught
        finally:
            self.discard()
        if isinstance(error, OSError) and not isinstance(error, FileError):
            raise FileError(f"{self.name} is {str(self.path)!r}; it cannot be written: {reason(error)}") from error

    def publish(self):
        """Flush the file to disk and give it its name."""
        sync(self.partial, mode_of(self.target))  # until now only the owner had access
        partial_files.publish(self.name, self.partial, self.target)
        self.partial = None

    def discard(self):
        """Remove the partial, unless it is published, and release the lock."""
        if self.partial is not None:
            with contextlib.suppress(OSError):
                partial_files.discard(self.partial)
        self.partial = None
        self.lock.release()


def sync(path, mode=None):
    """Put a file or a folder on the disk.  mode: the permissions that it is to have."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if mode is not None:
            os.fchmod(handle, mode)
        os.fsync(handle)
    finally:
        os.close(handle)


def mode_of(target):
    """Permissions of the file that is to be replaced, else those of any new file."""
    try:
        return stat.S_IMODE(os.stat(target).st_mode) & 0o777
    except OSError:
        return 0o666 & ~_umask()


HDF5, JSON = b"\x89HDF\r\n\x1a\n", b"{"  # how their files begin


def check_target(name, path, inputs=(), signature=b""):
    """The real path of an output file; FileError unless it is, or can become, a regular file that is not an input.

    signature: as of `NewFile`.
    """

    def no(why):
        return FileError(f"{name} is {str(path)!r}; {why}")

    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    for other in inputs:
        if target == os.path.realpath(other) or (
            os.path.exists(target) and os.path.exists(other) and os.path.samefile(target, other)
        ):
            raise no(f"it must be another file than {str(other)!r}")
    if os.path.isdir(target):
        raise no("it is a folder, it must be a file")
    if os.path.exists(target) and not os.path.isfile(target):
        raise no("it is not a regular file")
    if os.path.exists(target) and not (os.access(target, os.W_OK) and os.stat(target).st_mode & 0o222):
        raise no("it exists and is read-only; remove it or make it writable (chmod u+w) to have it replaced")
    if signature and os.path.exists(target) and _beginning(target, len(signature)) not in (b"", signature):
        taken = "" if name.startswith("-") else f"was taken for {name}, which would be replaced, but it "
        advice = "another name" if name.startswith("-") else f"the name of {name} too"
        raise no(f"it {taken}holds something else; give {advice}, or remove the file")
    if not os.path.isdir(folder):
        raise no(f"there is no folder {folder!r}")
    if not os.access(folder, os.W_OK):
        raise no(f"its folder {folder!r} is not writable")
    return target


def _beginning(path, count):
    """The first bytes of a file; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(count)
    except OSError:
        return b""


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
