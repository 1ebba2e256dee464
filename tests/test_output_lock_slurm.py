"""Locks of OUT whose owners were Slurm jobs of other machines: what Slurm says of them."""

import os

import locks
import pytest
from locks import ARRAY, ELSEWHERE, SLURM, change, refused, take

from mpiattn.system import slurm_job


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.h5"


@pytest.fixture(autouse=True)
def slurm(monkeypatch):
    return locks.slurm(monkeypatch)


@pytest.fixture
def squeue(tmp_path_factory, monkeypatch):
    """A function that makes Slurm's command a shell script, whose calls it returns as a path of a file."""
    folder = tmp_path_factory.mktemp("bin")

    def make(script):
        (folder / "squeue").write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n{script}\n')
        (folder / "squeue").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return folder / "calls"

    return make


@pytest.mark.parametrize(
    "own, other, gone",
    [
        ({"RESTART_COUNT": "1"}, {}, True),  # the job was requeued
        ({"RESTART_COUNT": "1"}, {"restart": 2}, False),
        ({}, {}, None),  # a step of it: Slurm is asked
        ({"RESTART_COUNT": "1"}, {"cluster": "small"}, False),
    ],
)
def test_the_same_job(out, slurm, squeue, own, other, gone):
    calls = squeue("echo 123.4")
    slurm(**SLURM)
    take(out)
    change(out, process=ELSEWHERE, job=other)
    slurm(**own)
    if gone:
        take(out).publish()
    else:
        refused(out)
    if gone is None:
        assert calls.read_text() == "--noheader --steps=123.4 --format=%i\n"
        squeue("exit 0")  # it does not run
        take(out).publish()


def test_the_same_job_without_steps(out, slurm, squeue):
    """Ranks that were started without srun: nobody knows whether they run on another machine."""
    squeue("exit 0")
    slurm(JOB_ID="123")
    take(out)
    change(out, process=ELSEWHERE)
    assert refused(out).endswith("if that process has ended")


@pytest.mark.parametrize(
    "script, gone",
    [
        ("echo RUNNING", False),
        ("echo COMPLETING", False),
        ("echo PENDING", False),  # to be requeued: it will want the file
        ("echo TIMEOUT", True),
        ("echo CANCELLED", True),
        ("exit 0", True),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", True),
        ("echo Unable to contact slurm controller >&2; exit 1", False),
        ("sleep 30", False),
    ],
)
def test_another_job(out, slurm, squeue, monkeypatch, script, gone):
    monkeypatch.setattr(slurm_job, "SECONDS", 0.5)
    calls = squeue(f"{script.replace('sleep', 'exec sleep')}")
    slurm(**SLURM, **ARRAY)
    take(out)
    change(out, process=ELSEWHERE)
    slurm(JOB_ID="124")
    if gone:
        take(out).publish()
    else:
        refused(out)
    assert calls.read_text() == "--noheader --jobs 120_2 --states=all --format=%T\n"


@pytest.mark.parametrize("change_of", [{"user": "bob"}, {"job": {"cluster": "small"}}])
def test_slurm_may_not_tell_of_others(out, slurm, squeue, change_of):
    """Sites hide jobs of other users; other clusters have jobs of the same numbers."""
    calls = squeue("exit 0")
    slurm(**SLURM)
    take(out)
    change(out, process=ELSEWHERE, **change_of)
    slurm(JOB_ID="124")
    refused(out)
    assert not calls.exists()


def test_a_job_knows_nothing_of_processes_without_one(out, slurm, squeue):
    calls = squeue("exit 0")
    take(out)
    change(out, process=ELSEWHERE)
    slurm(JOB_ID="124")
    refused(out)
    assert not calls.exists()


def test_without_slurms_commands(out, slurm, monkeypatch):
    monkeypatch.setenv("PATH", str(out.parent))
    slurm(**SLURM)
    take(out)
    change(out, process=ELSEWHERE)
    slurm(JOB_ID="124")
    assert "job 123 on " in refused(out)
