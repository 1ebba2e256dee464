"""The user's JSON file of machines measured by `mpiattn tune`, and the choice of a machine for a launch.

The file is $XDG_CONFIG_HOME/mpiattn/machines.json, with ~/.config if that variable is not set.  MPIATTN_MACHINE takes
precedence over it: a file that `mpiattn tune --out` wrote or the name of a built-in machine.
"""

import json
import math
import os
import time
import warnings
from contextlib import suppress
from typing import NamedTuple

from ..errors import ArgumentError, FileError
from ..system.atomic_file import NewFile, check_target
from .machine import BUILT_IN, DEFAULT, Machine, load

VARIABLE = "MPIATTN_MACHINE"
FORMAT = 1  # of the file; other formats are not read


class Key(NamedTuple):
    """The conditions under which the figures of a machine hold.

    processor: model of the CPU.
    cores: cores that a rank may use.
    blas, threads: NumPy's BLAS and its threads per rank; None if unknown.
    backend: name, version and transport.
    mpi: library and version.
    ranks_per_node: ranks of the fullest node.
    several_nodes: whether the launch has more than one node.
    head_dim: of the timed blocks.
    """

    processor: str
    cores: int
    blas: str
    threads: int
    backend: str
    mpi: str
    ranks_per_node: int
    several_nodes: bool
    head_dim: int


class Entry(NamedTuple):
    """A machine, its key, the time of its measurement (UTC, ISO 8601) and the samples behind its figures."""

    key: Key
    machine: Machine
    when: str
    samples: dict

    def as_dict(self):
        """The entry as a dict that JSON can hold."""
        return {
            "key": self.key._asdict(),
            "machine": self.machine.as_dict(),
            "when": self.when,
            "samples": self.samples,
        }

    @classmethod
    def from_dict(cls, data):
        """The entry of a dict from `as_dict`.  Raises ArgumentError."""
        try:
            key = Key(**data["key"])
            if not isinstance(key.head_dim, int) or key.head_dim < 1:
                raise ArgumentError(f"head_dim of an entry is {key.head_dim!r}; it must be a whole number, at least 1")
            return cls(key, Machine.from_dict(data["machine"]), data["when"], data["samples"])
        except (TypeError, KeyError) as error:
            raise ArgumentError(f"an entry is damaged: {type(error).__name__} {error}") from None


def now():
    """The current time as entries hold it: UTC, ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def path():
    """The path of the store."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(folder, "mpiattn", "machines.json")


# Reading


def read():
    """The usable entries of the store, [] without a file; one RuntimeWarning if others cannot be used."""
    entries, wrong = _read()
    if wrong:
        warnings.warn(
            f"{path()} is not used{' in part' * bool(entries)}: {wrong}; run `mpiattn tune` again",
            RuntimeWarning,
            stacklevel=2,
        )
    return entries


def _read():
    """The usable entries, and what is wrong with the others or with the file; None if nothing is."""
    try:
        with open(path()) as file:
            data = json.load(file)
    except FileNotFoundError:
        return [], None
    except OSError as error:
        return [], f"it cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        return [], f"it is not JSON ({error})"
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("entries"), list):
        return [], f"it is not a store of format {FORMAT}"
    entries, wrong = [], None
    for entry in data["entries"]:
        try:
            entries.append(Entry.from_dict(entry))
        except ArgumentError as error:
            wrong = str(error)
    return entries, wrong


def lookup(key, entries):
    """The entry for a launch, None if there is none: its key equals the launch's, with the nearest head_dim.

    The speed of blocks depends little on head_dim, and the speed of links not at all.
    """

    def alike(entry):
        return entry.key._replace(head_dim=key.head_dim) == key

    def distance(entry):
        return abs(math.log(entry.key.head_dim / key.head_dim))

    return min(filter(alike, entries), key=distance, default=None)


def resolve(key, machine=None, assumed=DEFAULT):
    """The machine for a launch and its origin in words: (Machine, str).

    machine: a `Machine`, the name of a built-in one or a path.  None: MPIATTN_MACHINE, else the store, else `assumed`.
    A machine that is given or named is used unchanged.  `assumed` takes the launch's ranks per node.  Raises
    ArgumentError.
    """
    if isinstance(machine, Machine):
        return machine, "as given"
    if machine is not None:
        if not isinstance(machine, str | os.PathLike):
            raise ArgumentError(
                f"machine is {machine!r}; it may be None, a Machine, {', '.join(BUILT_IN)} or a file "
                "that `mpiattn tune` wrote"
            )
        return load(os.fspath(machine)), f"{os.fspath(machine)!r}, as given"
    named = os.environ.get(VARIABLE)
    if named:
        try:
            return load(named), f"{VARIABLE}={named}"
        except ArgumentError as error:
            raise ArgumentError(f"{VARIABLE} is {named!r}; {error}") from None
    entry = lookup(key, read())
    if entry is None:
        return assumed.with_ranks(key.ranks_per_node), f"{assumed.name}, since {path()} has none for such a launch"
    return entry.machine, f"measured {entry.when} with head_dim {entry.key.head_dim}, {path()}"


# Writing


def check_store():
    """Make the store's folder.  Raises FileError if it cannot be made or the store could not be written."""
    try:
        os.makedirs(os.path.dirname(path()), exist_ok=True)
    except OSError as error:
        raise FileError(f"the store of machines is {path()!r}; its folder cannot be made: {error.strerror}") from None
    check_target("the store of machines", path())


def store(entry):
    """Store an entry; it replaces an entry with the same key.  Returns whether there was one.

    The file is written whole or not at all.  If part of the previous file was unusable, it is kept as .old.  Raises
    FileError.
    """
    check_store()
    entries, wrong = _read()
    others = [other for other in entries if other.key != entry.key]
    data = {"format": FORMAT, "entries": [other.as_dict() for other in (*others, entry)]}
    with NewFile("the store of machines", path()) as new:
        with open(new.partial, "w") as file:
            file.write(json.dumps(data, indent=1, allow_nan=False) + "\n")
        if wrong:
            with suppress(OSError):
                os.replace(path(), f"{path()}.old")
    return len(others) < len(entries)
