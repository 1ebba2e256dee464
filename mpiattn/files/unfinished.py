"""Results of a run of many problems that stay when it ends early, so that a later run goes on with them.

Until a problem is finished, OUT is a partial like any other, and goes with the run.  Then it moves into a folder beside
OUT, OUT.unfinished, which holds

    RUN.h5        the file as it will be: all datasets have their place, and an attribute says what made them
    RUN.0.json    path and report of the problem that was finished first
    RUN.1.json    of the next one, and so on

A report gets its name once it is whole and the problem's results are on the disk.  RUN is unique: a report whose RUN.h5
is missing belongs to another run and does not count.  A run that is killed, at whatever moment, loses the problem at
hand alone.
"""

import contextlib
import json
import os
import re
import secrets

import h5py

from ..comm.agreement import from_rank_0
from ..errors import FileError
from ..system import partial_files
from ..system.atomic_file import HDF5, NewFile, sync
from ..system.logs import note_file
from ..system.os_errors import reason
from .hdf5 import dtype_of, file_errors

MADE_BY = "made_by"  # attribute of OUT: what its results were made by
OURS = re.compile(r"([0-9a-f]{8})\.(h5|\d+\.json|draft)")  # names of files in the folder


class Unfinished:
    """What an earlier run has left of OUT, or the beginning of it; made and used collectively.

    path: of OUT.  source: the `Input`, which must not have changed since.  made_by: what else results depend on, {name:
    text}; an earlier run must have had the same.  problems: how many there are.
    finished: the paths of those that are.  reports: of these on rank 0, by path.  begun: whether the file of an earlier
    run is taken up.  whole: whether OUT itself is there, and was made by the same.  made_by: as text, for the attribute
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
            self.file, self.reports = file, file.reports
            if file.whole:
                file.discard()
                self.file = None
            return set(file.reports), file.whole, file.folder

        self.finished, self.whole, self._folder = from_rank_0(peers, look)
        self.begun = bool(self.finished)
        if self.begun:
            self._note()

    def _note(self):
        count, rest = len(self.finished), "goes on with the others"
        if count == self._problems:
            rest = "makes OUT of them"
        text = f"{count} of {self._problems} problems are in {self._folder}"
        partial_files.keep("OUT", f"{text}, and the same command with --resume {rest}")

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
            self._finish(problem)

        from_rank_0(self._peers, note)
        self._finish(problem)  # at once: a signal may end the run while the disk is waited for
        from_rank_0(self._peers, lambda: self.file.sync())

    def _finish(self, problem):
        self.finished.add(problem)
        self._note()

    def discard(self):
        """Remove what nobody can go on with, and release OUT; collective or not."""
        if self.file:
            self.file.discard()


class _File(NewFile):
    """OUT on rank 0: a partial, or once a problem is finished, a file of the folder.

    reports: of the problems that are finished, by path.  whole: whether OUT is there, made by the same.
    """

    def __init__(self, path, source, made_by):
        super().__init__("OUT", path, (source,), HDF5, locked=True)
        self.folder, self.reports, self.whole = f"{self.target}.unfinished", {}, False
        self._run = secrets.token_hex(4)
        try:
            self._look(made_by)
        except BaseException:
            super().discard()
            raise

    def _look(self, made_by):
        """Take up what an earlier run has finished, or find out that there is nothing to do."""
        with self._errors("read"):
            run, reports = self._left()
            earlier = self._made_by(self._path_of(run, "h5")) if reports else made_by
        differing = [name for name in {**earlier, **made_by} if earlier.get(name) != made_by.get(name)]
        if differing:
            name = differing[0]
            raise FileError(
                f"--resume is given, and {self.folder!r} holds results of a run with another {name}: "
                f"{_short(earlier.get(name))} then, {_short(made_by.get(name))} now; run it as then, or remove "
                "that folder to begin anew"
            )
        if reports:
            partial_files.discard(self.partial)
            self._run, self.reports, self.partial = run, reports, self._path_of(run, "h5")
            return
        with self._errors("written"):
            self._remove()  # what a run has left that was killed as it began the folder, or at its very end
        with contextlib.suppress(OSError, KeyError, ValueError, TypeError):
            self.whole = self._made_by(self.target) == made_by

    def _path_of(self, run, end):
        return os.path.join(self.folder, f"{run}.{end}")

    def _names(self):
        try:
            return sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return []

    def _left(self):
        """The run of whose problems some are finished, and their reports, by path; (None, {}) without one."""
        matches = [match for match in (OURS.fullmatch(name) for name in self._names()) if match]
        for run in [match[1] for match in matches if match[2] == "h5"]:
            reports = {}
            for match in matches:
                if match[1] == run and match[2].endswith("json"):
                    with open(os.path.join(self.folder, match[0])) as file:
                        report = json.load(file)
                    reports[report["problem"]] = report["report"]
            if reports:
                return run, reports
        return None, {}

    def _made_by(self, path):
        with h5py.File(path, "r") as file:
            return dict(json.loads(file.attrs[MADE_BY]))

    def _remove(self):
        """Remove the folder with what runs leave there; OSError if there is anything else."""
        for name in self._names():
            if OURS.fullmatch(name):
                os.unlink(os.path.join(self.folder, name))
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(self.folder)

    @contextlib.contextmanager
    def _errors(self, doing):
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError) as error:
            other = "it does not hold what such a run leaves"
            raise FileError(
                f"OUT is {str(self.path)!r}; {self.folder!r} cannot be {doing}: "
                f"{reason(error) if isinstance(error, OSError) else other}; to begin anew remove it"
            ) from error

    def check(self, datasets):
        """Raise FileError unless the file has these datasets, {path: (shape, dtype)}."""
        with self._errors("read"), h5py.File(self.partial, "r") as file:
            for name, (shape, dtype) in datasets.items():
                data = file[name]
                if (data.shape, dtype_of(data)) != (tuple(shape), dtype.name):
                    raise ValueError

    def add(self, problem, report):
        """Keep the results of a problem."""
        with file_errors("OUT", self.path, "written"):
            if not self.reports:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.folder, 0o700)  # until OUT has its name only the owner has access
            self._write_report(problem, report)
            if not self.reports:
                self._move()
        self.reports[problem] = report

    def _write_report(self, problem, report):
        draft = self._path_of(self._run, "draft")
        with open(draft, "w") as file:
            json.dump({"problem": problem, "report": report}, file)
        sync(draft)
        if self.reports and not os.path.exists(self.partial):
            raise FileNotFoundError(f"{self.partial!r} is no longer there: another job has removed it")
        os.replace(draft, self._path_of(self._run, f"{len(self.reports)}.json"))

    def _move(self):
        """Move the file into the folder, from which on it is kept."""
        kept = self._path_of(self._run, "h5")
        os.replace(self.partial, kept)
        partial_files.discard(self.partial)  # which is not there any more
        self.partial = kept

    def sync(self):
        """Put on the disk which files there are."""
        with file_errors("OUT", self.path, "written"):
            sync(self.folder)
            if len(self.reports) == 1:
                sync(os.path.dirname(self.folder))

    def publish(self):
        """Give the file its name, and remove the folder."""
        super().publish()
        with contextlib.suppress(OSError):
            sync(os.path.dirname(self.target))  # else a crash may undo the renaming, and not what follows
            self._remove()

    def discard(self):
        """Remove the partial, or leave it in the folder, and release OUT; does nothing after `publish`."""
        if self.reports:
            self.partial = None  # it stays
        elif self.partial is not None:
            with contextlib.suppress(OSError):
                self._remove()  # of which `add` has made no more than a draft
        super().discard()


def note_unused(path):
    """Say that an earlier run with --resume has left results, of which a run without it takes no notice."""
    folder = f"{os.path.realpath(path)}.unfinished"
    with contextlib.suppress(OSError):  # no folder, or another user's
        if any(name.endswith(".h5") for name in os.listdir(folder)):
            note_file("mpiattn: %r holds results of a run with --resume, which this run leaves there unused", folder)


def _short(value):
    text = "none" if value is None else str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
