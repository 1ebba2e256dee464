"""Results of a run of many problems that stay when it ends early, so that a later run goes on with them.

They are in a folder beside OUT, OUT.unfinished.  It holds the file as it will be, in which all datasets have their
place from the start, and a journal.  The first line of the journal says by what the results were made; every later one
stands for a problem whose results are on the disk.  A run that is killed, wherever that is, loses the problem at hand
alone: a line that is cut short does not count.
"""

import contextlib
import json
import os

import h5py

from ..comm.agreement import from_rank_0
from ..errors import FileError
from ..system import partial_files
from ..system.atomic_file import HDF5, check_target, mode_of, sync
from ..system.os_errors import reason
from ..system.output_lock import OutputLock
from .hdf5 import dtype_of, file_errors

MADE_BY = "made_by"  # attribute of OUT: what its results were made by


class Unfinished:
    """What an earlier run has left of OUT, or the beginning of it; made and used collectively.

    path: of OUT.  source: the `Input`, which must not have changed since.  made_by: what else results depend on, {name:
    text}; an earlier run must have had the same.  problems: how many there are.
    finished: the paths of those that are.  reports: of these on rank 0, by path.  begun: whether the datasets have
    their place.  whole: whether OUT itself is there, and was made by the same.  made_by: as text, for the attribute
    MADE_BY of OUT.  file: on rank 0, what `Output` writes to; None where OUT is whole.
    Raises FileError on every rank where results of an earlier run were made by something else.
    """

    def __init__(self, peers, path, source, made_by, problems):
        self._peers, self._problems, self.file, self.reports = peers, problems, None, {}
        self._source, self._version = source, source.version
        made_by = {"IN": self._version} | made_by
        self.made_by = json.dumps(made_by)

        def look():
            file = _File(path, source.path, made_by)
            self.file, self.reports = None if file.whole else file, file.reports
            return set(file.reports), file.begun, file.whole, file.lock, file.folder

        self.finished, self.begun, self.whole, self._lock, self._folder = from_rank_0(peers, look)
        if not self.whole:
            self._note()

    def _note(self):
        count, rest = len(self.finished), "goes on with the others"
        if count == self._problems:
            rest = "makes OUT of them"
        text = f"{count} of {self._problems} problems are in {self._folder}, and the same command with --resume {rest}"
        partial_files.keep("OUT", text if count else "", self._lock)

    def begin(self):
        """Begin the journal of a new file, whose datasets have their place now; collective."""
        from_rank_0(self._peers, lambda: self.file.begin())

    def add(self, problem, report):
        """Note that a problem is finished: its results must be on the disk; collective.

        report: on rank 0, what JSON holds.  Raises FileError if IN has changed since the run began.
        """

        def note():
            now = self._source.version
            if now != self._version:
                raise FileError(
                    f"IN is {str(self._source.path)!r}; it was changed while it was read: {self._version} at first, "
                    f"{now} now; OUT does not mix results of both"
                )
            self.file.add(problem, report)

        from_rank_0(self._peers, note)
        self.finished.add(problem)
        self._note()

    def discard(self):
        """Remove what this run has begun and nobody can go on with, and release OUT; collective or not."""
        if self.file:
            self.file.discard()


class _File:
    """The folder, on rank 0; to `Output` it is what a `NewFile` is."""

    def __init__(self, path, source, made_by):
        self._path, self._made_by, self._published = path, made_by, False
        self.target = check_target("OUT", path, (source,), HDF5)
        self.folder = f"{self.target}.unfinished"
        self.partial, self._journal = (os.path.join(self.folder, name) for name in ("out.h5", "finished.jsonl"))
        self.lock = OutputLock.of(self.target)
        with file_errors("OUT", path, "written"):
            refusal = self.lock.take("OUT")
        if refusal:
            raise FileError(f"OUT is {str(path)!r}; {refusal}")
        try:
            self._look()
        except BaseException:
            self.lock.release()
            raise
        if self.whole:
            self.lock.release()

    def _look(self):
        """Find out what there is, and make the folder."""
        with self._errors("read"):
            header, *lines = self._lines() or [None]
            earlier = {} if header is None else dict(header[MADE_BY])
            self.reports = {line["problem"]: line["report"] for line in lines}
        if self.reports:
            self._compare(earlier)
        self.begun = header is not None and earlier == self._made_by
        self.whole = not self.begun and self._is_whole()
        if self.whole:
            self._try_to_remove()  # that of a run that was killed at its very end
        elif not self.begun:
            with self._errors("written"):
                self._remove()  # that of a run that has finished nothing
                os.mkdir(self.folder, 0o700)  # until OUT has its name only the owner has access

    def _remove(self):
        """Remove the folder with what such a run leaves there; OSError if there is anything else."""
        for path, remove in ((self._journal, os.unlink), (self.partial, os.unlink), (self.folder, os.rmdir)):
            with contextlib.suppress(FileNotFoundError):
                remove(path)

    def _try_to_remove(self):
        with contextlib.suppress(OSError):
            self._remove()

    @contextlib.contextmanager
    def _errors(self, doing):
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError) as error:
            other = "it does not hold what such a run leaves"
            raise FileError(
                f"OUT is {str(self._path)!r}; {self.folder!r} cannot be {doing}: "
                f"{reason(error) if isinstance(error, OSError) else other}; to begin anew remove it"
            ) from error

    def _lines(self):
        """What the journal holds, up to the first line that is not whole; nothing without the file of results."""
        try:
            with open(self._journal, "rb") as file:
                data = file.read()
            os.stat(self.partial)  # any other error means that nobody knows, and nothing may be removed
        except FileNotFoundError:
            return []
        lines, kept = [], 0
        for line in data.splitlines(keepends=True):
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
            if not line.endswith(b"\n"):
                lines.pop()
                break
            kept += len(line)
        if data and not lines and data.endswith(b"\n"):
            raise ValueError("no journal")
        if kept < len(data):
            os.truncate(self._journal, kept)
        return lines

    def _is_whole(self):
        """Whether OUT is there and was made by the same."""
        if not os.path.isfile(self.target):
            return False
        with contextlib.suppress(OSError, ValueError, TypeError), h5py.File(self.target, "r") as file:
            return json.loads(file.attrs.get(MADE_BY, "null")) == self._made_by
        return False

    def _compare(self, earlier):
        names = [name for name in {**earlier, **self._made_by} if earlier.get(name) != self._made_by.get(name)]
        if names:
            name = names[0]
            raise FileError(
                f"--resume is given, and {self.folder!r} holds results of a run with another {name}: "
                f"{_short(earlier.get(name))} then, {_short(self._made_by.get(name))} now; run it as then, or remove "
                "that folder to begin anew"
            )

    def check(self, datasets):
        """Raise FileError unless the file has these datasets, {path: (shape, dtype)}."""
        with self._errors("read"), h5py.File(self.partial, "r") as file:
            for name, (shape, dtype) in datasets.items():
                data = file[name]
                if (data.shape, dtype_of(data)) != (tuple(shape), dtype.name):
                    raise ValueError

    def begin(self):
        """Begin the journal, of a file whose datasets have their place."""
        with file_errors("OUT", self._path, "written"):
            sync(self.partial)
            self._append({MADE_BY: self._made_by})
            for folder in (self.folder, os.path.dirname(self.folder)):
                sync(folder)

    def add(self, problem, report):
        """Add a problem to the journal."""
        with file_errors("OUT", self._path, "written"):
            self._append({"problem": problem, "report": report})

    def _append(self, line):
        """Add a line, on the disk, or nothing."""
        handle = os.open(self._journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        before, left = os.fstat(handle).st_size, json.dumps(line).encode() + b"\n"
        try:
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, before)
            raise
        finally:
            os.close(handle)

    def publish(self):
        """Give the file its name, and remove the folder."""
        sync(self.partial, mode_of(self.target))
        os.replace(self.partial, self.target)
        self._published = True
        with contextlib.suppress(OSError):
            sync(os.path.dirname(self.target))  # else a crash may undo the renaming alone, and not what follows
        self._try_to_remove()
        self.lock.release()

    def discard(self):
        """Remove the folder if no problem is finished, and release OUT; does nothing after `publish`."""
        if self._published:
            return
        with contextlib.suppress(OSError, FileError):
            if not any("problem" in line for line in self._lines()):
                self._remove()
        self.lock.release()


def _short(value):
    text = "none" if value is None else str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
