"""Results of a run of many problems that stay when it ends early, so that a later run goes on with them.

They are in a folder beside OUT, OUT.unfinished.  It holds the file as it will be, in which all datasets have their
place from the start, and a journal.  The first line of the journal says by what the results were made; every later one
stands for a problem whose results are on the disk.  A run that is killed, wherever that is, loses the problem at hand
alone: a line that is cut short does not count.
"""

import contextlib
import json
import os
import shutil

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

    path: of OUT.  source: path of IN, which must not have changed since.  made_by: what else results depend on, {name:
    text}; an earlier run must have had the same.  problems: how many there are.
    reports: of the finished problems, by path.  whole: whether OUT itself is there, and was made by the same.
    begun: whether the datasets have their place.  made_by: as text, for the attribute MADE_BY of OUT.
    file: on rank 0, what `Output` writes to; None where OUT is whole.
    Raises FileError on every rank where results of an earlier run were made by something else.
    """

    def __init__(self, peers, path, source, made_by, problems):
        self._peers, self._problems, self.file, self.made_by = peers, problems, None, ""

        def look():
            file = _File(path, source, made_by)
            self.file = None if file.whole else file
            return file.reports, file.begun, file.whole, file.made_by, file.lock

        self.reports, self.begun, self.whole, self.made_by, self._lock = from_rank_0(peers, look)
        if not self.whole:
            self._folder = f"{path}.unfinished"
            self._note()

    def _note(self):
        count, rest = len(self.reports), "goes on with the others"
        if count == self._problems:
            rest = "makes OUT of them"
        text = f"{count} of {self._problems} problems are in {self._folder}, and the same command with --resume {rest}"
        partial_files.keep("OUT", text if count else "", self._lock)

    def begin(self):
        """Begin the journal of a new file, whose datasets have their place now; collective."""
        from_rank_0(self._peers, lambda: self.file and self.file.begin())

    def add(self, problem, report):
        """Note that a problem is finished: its results must be on the disk; collective.  report: what JSON holds."""
        from_rank_0(self._peers, lambda: self.file and self.file.add(problem, report))
        self.reports[problem] = report
        self._note()


class _File:
    """The folder, on rank 0; to `Output` it is what a `NewFile` is."""

    def __init__(self, path, source, made_by):
        with file_errors("IN", source, "read"):
            about = os.stat(source)
        made_by = {"IN": f"{about.st_size} bytes, changed at {about.st_mtime_ns / 1e9:.6f}"} | made_by
        self._path, self._made_by, self.made_by = path, made_by, json.dumps(made_by)
        self.target = check_target("OUT", path, (source,), HDF5)
        self._folder = f"{self.target}.unfinished"
        self.partial, self._journal = (os.path.join(self._folder, name) for name in ("out.h5", "finished.jsonl"))
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
            lines = self._lines()
            self.reports = {line["problem"]: line["report"] for line in lines[1:]}
        self.begun = bool(lines)
        self.whole = not self.begun and self._is_whole()
        if self.begun:
            self._compare(lines[0][MADE_BY])
        elif self.whole:
            shutil.rmtree(self._folder, ignore_errors=True)  # of a run that was killed at its very end
        else:
            with self._errors("written"):
                shutil.rmtree(self._folder, ignore_errors=True)  # of a run that was killed before it had begun
                os.mkdir(self._folder)

    @contextlib.contextmanager
    def _errors(self, doing):
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError) as error:
            other = "it does not hold what such a run leaves"
            raise FileError(
                f"OUT is {str(self._path)!r}; {self._folder!r} cannot be {doing}: "
                f"{reason(error) if isinstance(error, OSError) else other}; to begin anew remove it"
            ) from error

    def _lines(self):
        """What the journal holds, without a last line that was cut short; nothing without the file of results."""
        try:
            with open(self._journal, "rb") as file:
                whole, _, cut = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        if not os.path.isfile(self.partial):
            return []
        if cut:
            os.truncate(self._journal, len(whole) + 1)
        return [json.loads(line) for line in whole.splitlines()]

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
                f"--resume is given, and {self._folder!r} holds results of a run with another {name}: "
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

    def add(self, problem, report):
        """Add a problem to the journal."""
        with file_errors("OUT", self._path, "written"):
            self._append({"problem": problem, "report": report})

    def _append(self, line):
        with open(self._journal, "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")
            os.fsync(file.fileno())

    def publish(self):
        """Give the file its name, and remove the folder."""
        sync(self.partial, mode_of(self.target))
        os.replace(self.partial, self.target)
        shutil.rmtree(self._folder, ignore_errors=True)
        self.lock.release()

    def discard(self):
        """Remove the folder if it holds nothing that a later run could go on with; do nothing after `publish`."""
        if not os.path.exists(self._journal):
            shutil.rmtree(self._folder, ignore_errors=True)
        self.lock.release()


def _short(value):
    text = "none" if value is None else str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
