"""Faults of random ranks at random places of commands and of programs, and whether what comes of them is as promised.

    python tests/faults.py --trials 300 --seed 1                       with this Python's MPI
    python tests/faults.py --trials 300 --python /other/bin/python     with that one's; may be given several times
    python tests/faults.py --trials 40 --slurm                         as batch jobs, on four nodes of one rank each
    python tests/faults.py --trial run/write/kill/2/0                  one of them again, with what it wrote

A trial is SUBJECT/PHASE/FAULT/RANK/CALL: rank RANK of four meets its fault where PHASE is called for the CALL-th time
after the first.  Promised is, that the job ends within the time-out and ten seconds, not with code 0, that it names the
rank and its host, once if it is a command, and that OUT is whole or not there, and nothing else left.  The subject
"many" has a file of many problems; then the same command, with --resume, must give what a run without a fault gives.
"""

import argparse
import contextlib
import functools
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import h5py  # noqa: E402
import launch  # noqa: E402
import pytest  # noqa: E402
import slurm_cluster  # noqa: E402
import slurm_jobs  # noqa: E402
from files import datasets, write_input, write_problems  # noqa: E402

RANKS = 4
TIMEOUT = 5.0  # seconds that a rank waits for others
SOON = 10.0  # seconds besides them
LIMIT = 90.0  # seconds for a trial, MPI's start and all
FAULTS = {
    "kill": "the rank is killed",
    "stop": "it stops",
    "raise": "it raises an error",
    "leave": "it calls sys.exit",
    "exit": "it calls os._exit",
}
SIGNALS = {"end": "it gets SIGUSR1", "term": "it gets SIGTERM"}  # faults of "many"
READING = {"read": "files.input.Input.chunks", "exchange": "comm.rounds.Rounds.turn"}
WRITING = {"write": "files.output.Output.write_each", "commit": "files.output.Output.commit"}
END = {"end": "console.launch.Job.end"}
FORWARD = {"planning": "comm.mesh.Mesh.__init__", "steps": "engine.executor.Executor._run_block"}
CACHE = {"append": "decode.cache.KVCache.append", "decode": "decode.combine.Combiner.run"}
KEPT = {"flush": "files.output.Output.flush", "note": "files.unfinished.Unfinished.add"}
PHASES = {
    "many": {"read": READING["read"]} | FORWARD | WRITING | KEPT | END,
    "run": READING | FORWARD | WRITING | END,
    "backward": FORWARD | {"read again": "files.input.Input.tokens"} | WRITING,
    "decode": {"read": "files.input.Input.tokens", "decode": CACHE["decode"]} | WRITING | END,
    "program": FORWARD | CACHE,
    "mpi4py program": FORWARD | CACHE,
}
CALLS = {"steps": 6, "append": 3, "decode": 3}  # a program comes to a phase that often, at least
PROBLEMS = {str(number): {"seqlen": 67 if number % 2 else 90} for number in range(5)}
# What the launcher says, or `python -m mpi4py`, before mpiattn can.
WITHOUT_A_WORD = {
    ("program", "kill"),
    ("program", "exit"),
    ("mpi4py program", "kill"),
    ("mpi4py program", "exit"),
    ("mpi4py program", "leave"),
}
COMMANDS = {
    "many": ["run", "many.h5", "out.h5", "--resume", "--schedule", "greedy", "--tile", "2x2", "--causal"],
    "run": ["run", "in.h5", "out.h5", "--schedule", "greedy", "--tile", "2x2", "--layout", "striped"],
    "backward": ["run", "in.h5", "out.h5", "--schedule", "greedy", "--backward", "--verify", "--tile", "2x2"],
    "decode": ["decode", "in.h5", "queries.h5", "out.h5", "--verify"],
}

# What every rank runs: it arms the fault on its victim, then is the command or the program.
RANK = """
import importlib, os, signal, sys, time
subject, place, fault, victim, call, mark, *arguments = sys.argv[1:]
from mpiattn.cli import main
from mpiattn.console import startup, witness
from mpiattn.system.launch_variables import launch_rank
command = not subject.endswith("program")
if command:
    witness.watch(launch_rank())             # before MPI starts, as the command does
    startup.defer()
module, owner, name = place.rsplit(".", 2)
owner = getattr(importlib.import_module(f"mpiattn.{module}"), owner)
original, calls = getattr(owner, name), []

def struck(*args, **how):
    calls.append(name)
    if len(calls) > int(call):
        setattr(owner, name, original)
        with open(mark, "w") as file:
            file.write(repr(time.monotonic()))
        if fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        elif fault in ("end", "term"):
            os.kill(os.getpid(), signal.SIGUSR1 if fault == "end" else signal.SIGTERM)
        elif fault == "raise":
            raise ZeroDivisionError("on purpose")
        else:
            sys.exit(3) if fault == "leave" else os._exit(3)
    return original(*args, **how)

if launch_rank() == int(victim):
    setattr(owner, name, struck)
if command:
    sys.exit(main(arguments))
import numpy as np
from mpi4py import MPI
from mpiattn import KVCache, MeshAttention, tree_decode
how = {"timeout": float(arguments[0])}
rng = np.random.default_rng(1)
plan = MeshAttention(MPI.COMM_WORLD, seqlen=61, heads=4, head_dim=8, causal=True, tile="2x2", schedule="greedy", **how)
q, k, v = rng.standard_normal((3, 1, len(plan.positions), 4, 8), np.float32)
out, lse = plan.forward(q, k, v)
plan.backward(out, q, k, v, out, lse)
plan.close()
with KVCache(MPI.COMM_WORLD, capacity=64, kv_heads=4, head_dim=8, **how) as cache:
    for turn in range(4):
        q, k, v = np.random.default_rng(turn).standard_normal((3, 1, 9, 4, 8), np.float32)
        cache.append(k, v)
        tree_decode(q[:, :1], cache)
"""


class Trial(NamedTuple):
    """What happens to which rank, and where."""

    subject: str
    phase: str
    fault: str
    victim: int
    call: int

    def __str__(self):
        return "/".join(map(str, self))

    @classmethod
    def parse(cls, text):
        """The trial of its text."""
        subject, phase, fault, victim, call = text.split("/")
        return cls(subject, phase, fault, int(victim), int(call))

    @classmethod
    def draw(cls, rng, subject=None):
        """A random one, of this subject if it is given."""
        subject = subject or rng.choice(list(PHASES))
        phase = rng.choice(list(PHASES[subject]))
        fault = rng.choice([*FAULTS, *SIGNALS] if subject == "many" else list(FAULTS))
        often = CALLS.get(phase, 1)
        if subject == "many" and phase not in ("planning", "commit", "end"):
            often = len(PROBLEMS)
        return cls(subject, phase, fault, rng.randrange(RANKS), rng.randrange(often))

    def command(self, python, folder, timeout):
        """What each rank runs, in `folder`."""
        own = [*COMMANDS[self.subject], "--timeout", timeout] if self.subject in COMMANDS else [timeout]
        how = ["-m", "mpi4py"] if self.subject == "mpi4py program" else []
        return [
            python,
            *how,
            folder / "rank.py",
            self.subject,
            PHASES[self.subject][self.phase],
            self.fault,
            self.victim,
            self.call,
            folder / "mark",
            *own,
        ]


class Outcome(NamedTuple):
    """What came of a trial.

    code: of the job.  wrote: its standard error.  seconds: from the fault to the end; None where it did not come to the
    fault.  wrong: what was promised and is not so.
    """

    code: int
    wrote: str
    seconds: float | None
    wrong: tuple = ()


def prepare(folder):
    """What the trials of a folder need."""
    (folder / "rank.py").write_text(RANK)
    write_input(folder / "in.h5", backward=True)
    write_problems(folder / "many.h5", PROBLEMS)
    write_input(folder / "queries.h5", seqlen=1, seed=1)


def mpiexec(trial, folder, timeout):
    """Run a trial in a folder; (code, standard error)."""
    try:
        outcome = launch.mpirun(
            RANKS, trial.command(sys.executable, folder, timeout), timeout=LIMIT, cwd=folder, check=False
        )
        return outcome.returncode, outcome.stderr
    except pytest.fail.Exception as error:  # time is up
        return None, str(error)


def judge(trial, code, wrote, seconds, folder, timeout):
    """What is not as promised, in words."""
    if code is None:
        yield f"no end within {LIMIT:g} s"
    elif seconds > timeout + SOON:
        yield f"ended {seconds:.1f} s after the fault"
    whole = _is_whole(trial, folder / "out.h5")
    if code == 0 and not (trial.fault == "end" and whole):  # SIGUSR1 in the last problem
        yield "code 0"
    said = [line for line in wrote.splitlines() if re.search("mpiattn( run)?: ", line)]  # a launcher may indent it
    host = re.escape(os.uname().nodename)  # an error that the ranks agree on is told without it
    naming = re.search(rf"rank {trial.victim} (of {RANKS} )?on {host}|\(on rank {trial.victim} of {RANKS}\)", wrote)
    if trial.subject in COMMANDS:
        if len(said) != (code != 0):
            yield f"{len(said)} messages"
        elif trial.fault in SIGNALS:
            signal = {"end": "ended by SIGUSR1", "term": "ended by SIGTERM"}[trial.fault]
            if said and signal not in said[0]:
                yield "the message does not name the signal"
        elif not naming:
            yield "the message does not name the rank and its host"
    elif not (naming or (trial.subject, trial.fault) in WITHOUT_A_WORD or "ZeroDivisionError: on purpose" in wrote):
        yield "nothing names the rank and its host"
    if (folder / "out.h5").exists() and not whole:
        yield "OUT is there and not whole"
    left = [path.name for path in folder.iterdir() if path.name.endswith((".partial", ".lock"))]
    if left and trial.fault not in ("kill", "exit"):  # then launchers kill those that could remove it
        yield f"left behind: {', '.join(left)}"


def _is_whole(trial, path):
    """Whether OUT is there and whole."""
    try:
        with h5py.File(path) as file:
            if trial.subject == "many":
                return set(file) == set(PROBLEMS) and "made_by" in file.attrs
            return {"out", "lse"} <= set(file) and "ranks" in file.attrs
    except OSError:
        return False


@functools.cache
def _undisturbed():
    """The datasets that a run of "many" makes without a fault."""
    with tempfile.TemporaryDirectory(prefix="mpiattn-fault-") as folder:
        prepare(Path(folder))
        code, wrote = mpiexec(Trial("many", "end", "kill", -1, 0), Path(folder), TIMEOUT)
        assert code == 0, wrote
        return datasets(Path(folder) / "out.h5")


def resume(trial, folder, start, timeout):
    """Run a trial's command again, without the fault; what is not as promised, in words."""
    code, wrote = start(trial._replace(victim=-1), folder, timeout)
    if code != 0:
        yield f"code {code} of the run that went on: {wrote}"
    elif datasets(folder / "out.h5") != _undisturbed():
        yield "other results than without a fault"
    elif (folder / "out.h5.unfinished").exists():
        yield "left behind: out.h5.unfinished"


def run(trial, folder, start=mpiexec, timeout=TIMEOUT):
    """Run a trial in an empty folder; the Outcome.  start(trial, folder, timeout): gives code and standard error."""
    prepare(folder)
    code, wrote = start(trial, folder, timeout)
    end, mark = time.monotonic(), folder / "mark"
    if not mark.exists():
        return Outcome(code, wrote, None, ("failed before the fault",) if code != 0 else ())
    seconds = end - float(mark.read_text())
    wrong = [*judge(trial, code, wrote, seconds, folder, timeout)]
    if trial.subject == "many":
        wrong += resume(trial, folder, start, timeout)
    return Outcome(code, wrote, seconds, tuple(wrong))


@contextlib.contextmanager
def slurm(launcher):
    """A `start` for `run` whose ranks are those of batch jobs."""
    with (
        tempfile.TemporaryDirectory(prefix="mpiattn-slurm-") as folder,
        slurm_cluster.Cluster(folder, RANKS) as cluster,
    ):

        def start(trial, folder, timeout):
            env = slurm_jobs.prepare(folder) | ({"MPIATTN_LAUNCH": launcher} if launcher else {})
            (folder / "job.sbatch").write_text(
                f'#!/bin/bash\nsource slurm/launch.sh\necho "mpiattn starts"\nlaunch {RANKS} {RANKS} "$@"\n'
            )
            job = cluster.submit(
                "job.sbatch",
                *trial.command("python3", folder, timeout),
                cwd=folder,
                env=env,
                options=[f"--nodes={RANKS}", "--ntasks-per-node=1"],
                seconds=LIMIT,
            )
            code = job.exit_code or int(job.state != "COMPLETED")
            return code if job.state in slurm_cluster.ENDED else None, job.log.split("mpiattn starts")[-1]

        yield start


def table(outcomes):
    """Trials, and how many of them went wrong, by fault and place."""
    cells = {}
    for trial, outcome in outcomes:
        cells.setdefault((trial.subject, trial.phase), {}).setdefault(trial.fault, []).append(outcome)
    lines = [f"{'trials, wrong ones':34}" + "".join(f"{fault:>10}" for fault in (*FAULTS, *SIGNALS))]
    for (subject, phase), row in sorted(cells.items()):
        shown = []
        for fault in (*FAULTS, *SIGNALS):
            met = [outcome for outcome in row.get(fault, []) if outcome.seconds is not None or outcome.wrong]
            wrong = sum(bool(outcome.wrong) for outcome in met)
            shown.append(f"{len(met)}{f', {wrong}' if wrong else ''}" if met else "-")
        lines.append(f"{subject + ': ' + phase:34}" + "".join(f"{text:>10}" for text in shown))
    return "\n".join(lines)


def _trials(args):
    rng = random.Random(args.seed)
    return [Trial.parse(text) for text in args.trial] or [Trial.draw(rng, args.subject) for _ in range(args.trials)]


def _run_all(args):
    outcomes, options = [], " --slurm" * args.slurm + (f" --launcher {args.launcher!r}" if args.launcher else "")
    with slurm(args.launcher) if args.slurm else contextlib.nullcontext(mpiexec) as start:
        for trial in _trials(args):
            with tempfile.TemporaryDirectory(prefix="mpiattn-fault-") as folder:
                outcome = run(trial, Path(folder), start, args.timeout)
            outcomes.append((trial, outcome))
            if outcome.wrong:
                print(
                    f"{'; '.join(outcome.wrong)}:\n    {sys.executable} {__file__}{options} --trial '{trial}'",
                    flush=True,
                )
            if args.trial:
                print(f"code {outcome.code}, {outcome.seconds} s after the fault\n{outcome.wrote}")
    wrong = sum(bool(outcome.wrong) for _, outcome in outcomes)
    reached = sum(outcome.seconds is not None for _, outcome in outcomes)
    slowest = max((outcome.seconds for _, outcome in outcomes if outcome.seconds is not None), default=0)
    print(
        f"\n{launch.mpiexec()}{options}, seed {args.seed}\n{table(outcomes)}\n{len(outcomes)} trials, {reached} "
        f"of them came to their fault, {wrong} went wrong; the last end was {slowest:.1f} s after it",
        flush=True,
    )
    return int(wrong > 0)


def main():
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--trial",
        action="append",
        default=[],
        metavar="SUBJECT/PHASE/FAULT/RANK/CALL",
        help="this one, and show what it wrote",
    )
    parser.add_argument("--subject", choices=PHASES, help="of all trials (default: any)")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="of the ranks (default: %(default)s)")
    parser.add_argument(
        "--python", action="append", default=[], help="whose mpiexec and MPI to use (default: this one)"
    )
    parser.add_argument("--slurm", action="store_true", help="as batch jobs of a Slurm that is started here")
    parser.add_argument("--launcher", default="", help="with --slurm, what starts the ranks (MPIATTN_LAUNCH)")
    args = parser.parse_args()
    if not args.python:
        return _run_all(args)
    given = [f"--{name}={getattr(args, name)}" for name in ("trials", "seed", "timeout", "launcher")]
    given += [f"--subject={args.subject}"] * bool(args.subject)
    given += ["--slurm"] * args.slurm + [f"--trial={trial}" for trial in args.trial]
    return max(subprocess.run([python, __file__, *given]).returncode for python in args.python)


if __name__ == "__main__":
    sys.exit(main())
