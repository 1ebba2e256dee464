"""The Slurm job of a process, and whether Slurm says that one has ended."""

import os
import subprocess
from typing import NamedTuple

SECONDS = 5.0  # for an answer
ENDED = set("BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split())


class SlurmJob(NamedTuple):
    """A job, or a task of an array, and a step of it; texts, None where there is none.

    restart: how often it has been requeued.
    """

    cluster: str | None = None
    number: str | None = None
    array: str | None = None
    task: str | None = None
    step: str | None = None
    restart: int = 0

    def __str__(self):
        return f"job {self.number}" + (f" (task {self.task} of array {self.array})" if self.array else "")


def this():
    """That of this process; its number is None outside of Slurm."""
    names = "CLUSTER_NAME", "JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID", "STEP_ID"
    restart = os.environ.get("SLURM_RESTART_COUNT", "")
    values = (os.environ.get(f"SLURM_{name}") or None for name in names)
    return SlurmJob(*values, restart=int(restart) if restart.isdigit() else 0)


def ended(job):
    """Whether a job of this cluster and user has ended; False too if Slurm does not answer.

    Of other users' jobs Slurm may not tell.
    """
    # the last task of an array has the array's number, by which Slurm would answer for all tasks
    number = f"{job.array}_{job.task}" if job.array else job.number
    states = _squeue("--jobs", number, "--states=all", "--format=%T")
    return states is not None and ENDED.issuperset(states)  # it forgets jobs that have ended


def step_ended(job):
    """As `ended`, of the job's step, while the job runs."""
    number = f"{job.array}_{job.task}" if job.array else job.number
    return job.step is not None and _squeue(f"--steps={number}.{job.step}", "--format=%i") == []


def _squeue(*options):
    """What squeue prints, a list of words; none of a job that it does not know; None if it does not answer."""
    try:
        done = subprocess.run(
            ["squeue", "--noheader", *options],
            env=os.environ | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return [] if "Invalid job id" in done.stderr else None
    return done.stdout.split()
