"""The store of machines that `mpiattn tune` measured, a JSON file of the user's, and which of them a launch takes.

It is $XDG_CONFIG_HOME/mpiattn/machines.json, with ~/.config where that variable is not set.  MPIATTN_MACHINE, a file of
`mpiattn tune --out` or the name of a built-in machine, goes before it.
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
FORMAT = 1                   # of the store; one of another is not read


class Key(NamedTuple):
    """What the figures of a machine depend on.

    processor: its model.  cores: that a rank may use.  blas, threads: NumPy's BLAS and how many threads of it a rank
    uses, None where they cannot be told.  backend: name, version and transport.  mpi: library and version.
    ranks_per_node: of the fullest node.  several_nodes: whether there are more than one.  head_dim: of the blocks that
    were timed.
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
    """A machine, for which launches it is, when it was measured (UTC, ISO 8601) and the samples behind its figures."""

    key: Key
    machine: Machine
    when: str
    samples: dict

    def as_dict(self):
        """For JSON."""
        return {"key": self.key._asdict(), "machine": self.machine.as_dict(), "when": self.when,
                "samples": self.samples}

    @classmethod
    def from_dict(cls, data):
        """The entry that `as_dict` wrote; raises ArgumentError."""
        try:
            key = Key(**data["key"])
            if not isinstance(key.head_dim, int) or key.head_dim < 1:
                raise ArgumentError(f"head_dim of an entry is {key.head_dim!r}; it must be a whole number, at least 1")
            return cls(key, Machine.from_dict(data["machine"]), data["when"], data["samples"])
        except (TypeError, KeyError) as error:
            raise ArgumentError(f"an entry is not one: {type(error).__name__} {error}") from None


def now():
    """The time as an entry tells it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def path():
    """Where the store is."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(folder, "mpiattn", "machines.json")


# Reading

def read():
    """The entries of the store, none where there is no file; what cannot be used is left out with one warning."""
    entries, wrong = _read()
    if wrong:
        warnings.warn(f"{path()} is not used{' in part' * bool(entries)}: {wrong}; run `mpiattn tune` again",
                      RuntimeWarning, stacklevel=2)
    return entries


def _read():
    """The entries that can be used, and what is wrong with the others or with the whole."""
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
    for one in data["entries"]:
        try:
            entries.append(Entry.from_dict(one))
        except ArgumentError as error:
            wrong = str(error)
    return entries, wrong


def lookup(key, entries):
    """The entry of a launch, None if there is none: all of its key but head_dim is the same, and that is the nearest.

    The speed of blocks changes little with head_dim, and that of links not at all.
    """
    def alike(entry):
        return entry.key._replace(head_dim=key.head_dim) == key

    def distance(entry):
        return abs(math.log(entry.key.head_dim / key.head_dim))
    return min(filter(alike, entries), key=distance, default=None)


def resolve(key, machine=None):
    """The machine for a launch, and in words where it is from: (Machine, text).

    machine: a `Machine`, the name of a built-in one or a path; None for that of MPIATTN_MACHINE, else of the store,
    else DEFAULT.  What is named is taken as it is; DEFAULT gets the launch's ranks a node.  Raises ArgumentError.
    """
    if isinstance(machine, Machine):
        return machine, "as given"
    if machine is not None:
        if not isinstance(machine, str | os.PathLike):
            raise ArgumentError(f"machine is {machine!r}; it may be None, a Machine, {', '.join(BUILT_IN)} or a file "
                                "that `mpiattn tune` wrote")
        return load(os.fspath(machine)), f"{os.fspath(machine)!r}, as given"
    named = os.environ.get(VARIABLE)
    if named:
        try:
            return load(named), f"{VARIABLE}={named}"
        except ArgumentError as error:
            raise ArgumentError(f"{VARIABLE} is {named!r}; {error}") from None
    entry = lookup(key, read())
    if entry is None:
        return DEFAULT.with_ranks(key.ranks_per_node), f"default, since {path()} has none for such a launch"
    return entry.machine, f"measured {entry.when} with head_dim {entry.key.head_dim}, {path()}"


# Writing

def check_store():
    """Make the store's folder; raises FileError where it could not be written."""
    try:
        os.makedirs(os.path.dirname(path()), exist_ok=True)
    except OSError as error:
        raise FileError(f"the store of machines is {path()!r}; its folder cannot be made: {error.strerror}") from None
    check_target("the store of machines", path())


def store(entry):
    """Put an entry in the store in place of that of the same key; returns whether there was one.

    The file is written whole or not at all.  One that cannot be used is kept beside it, as .old.  Raises FileError.
    """
    check_store()
    entries, wrong = _read()
    others = [one for one in entries if one.key != entry.key]
    data = {"format": FORMAT, "entries": [one.as_dict() for one in (*others, entry)]}
    new = NewFile("the store of machines", path())
    try:
        with open(new.partial, "w") as file:
            file.write(json.dumps(data, indent=1, allow_nan=False) + "\n")
        if wrong:
            with suppress(OSError):
                os.replace(path(), f"{path()}.old")
        new.publish()
    except OSError as error:
        raise FileError(f"the store of machines is {path()!r}; it cannot be written: {error.strerror}") from None
    finally:
        new.discard()
    return len(others) < len(entries)
