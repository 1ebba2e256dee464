"""Locks of outputs that somebody else may have taken."""

import json
import os

import pytest

from mpiattn.errors import FileError
from mpiattn.system.atomic_file import HDF5, NewFile

SLURM = {"JOB_ID": "123", "CLUSTER_NAME": "big", "STEP_ID": "4"}
ARRAY = {"ARRAY_JOB_ID": "120", "ARRAY_TASK_ID": "2"}
LOCK = ".out.h5.lock"
ELSEWHERE = {"machine": "0123456789ab"}  # a process of another machine


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def take(out):
    return NewFile("OUT", out, (), HDF5, locked=True)


def refused(out):
    with pytest.raises(FileError) as error:
        take(out)
    return str(error.value)


def change(out, process=(), job=(), **changes):
    """Change what the lock says, as if somebody else had taken it."""
    path = out.parent / LOCK
    says = json.loads(path.read_text())
    says["process"].update(process)
    says["job"].update(job)
    path.write_text(json.dumps(says | changes))


def slurm(monkeypatch):
    """A function that sets Slurm's variables, by name without SLURM_; none are set before."""
    for name in os.environ:
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)

    def become(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"SLURM_{name}", value)

    return become
