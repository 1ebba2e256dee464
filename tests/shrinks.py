"""Ranks that are killed at random places of a program that shrinks its communicator and goes on, and what comes of it.

    python tests/shrinks.py --trials 100 --seed 1         with this Python's MPI, which must have ULFM: Open MPI 5
    python tests/shrinks.py --trial 4/steps/1/3           one of them again, with what it wrote

A trial is RANKS/PHASE/VICTIM/CALL: of RANKS ranks, VICTIM is killed where PHASE is called for the CALL-th time after
the first, for the phase `time` in that many fiftieths of a second; +PHASE/VICTIM/CALL is one more.  Promised is that
the others soon get a PeerFailure that names it, shrink and compute what one rank alone does, and that the job ends with
code 0, long before the time limit of its waits.
"""

import argparse
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

import launch  # noqa: E402
import pytest  # noqa: E402

TIMEOUT = 300  # seconds that a rank waits for others: nothing here may last so long
SOON = 3.0  # seconds from the death to the last rank's PeerFailure
LIMIT = 60.0  # seconds for a trial, MPI's start and all
# Without the second, the others may wait for the dead in MPI_Finalize (Open MPI 5.0.11).
OPTIONS = "--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1"
PHASES = {
    "first": "comm.mesh.Home.__init__",
    "planning": "comm.mesh.Mesh.__init__",
    "steps": "engine.executor.Executor._run_block",
    "post": "comm.exchange.Exchange.receive",
    "wait": "comm.peers.Peers.until",
    "agree": "comm.peers.Peers.largest",
    "append": "decode.cache.KVCache.append",
    "decode": "decode.combine.Combiner.run",
    "close": "plan.mesh_attention.MeshAttention.close",
    "between": "plan.mesh_attention.MeshAttention.gather",
    "time": "time",
}
CALLS = {"time": 50, "steps": 20, "post": 30, "wait": 90, "agree": 40, "first": 1}  # others: 2

# Begins what every rank runs: MARK and what each victim has, PLACE/VICTIM/CALL, are its first arguments.
ARM = """
import importlib, os, runpy, signal, sys, time
from mpi4py import MPI
mark, victims = sys.argv[1:3]
world = MPI.COMM_WORLD
world.Barrier()  # all have loaded what they need

def note(when):
    with open(f"{mark}.{world.rank}", "w") as file:
        file.write(repr(when))

def arm(place, call):
    if place == "time":
        note(time.monotonic() + (call + 1) / 50)
        signal.setitimer(signal.ITIMER_REAL, (call + 1) / 50)  # wherever it is then, in MPI too
        return
    module, owner, name = place.rsplit(".", 2)
    owner = getattr(importlib.import_module(f"mpiattn.{module}"), owner)
    original, calls = getattr(owner, name), []

    def struck(*args, **how):
        calls.append(name)
        if len(calls) > call:
            note(time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **how)

    setattr(owner, name, struck)

for victim in filter(None, victims.split("+")):
    place, rank, call = victim.split("/")
    if world.rank == int(rank):
        arm(place, int(call))
"""

# Another program, with its arguments.
OTHER = (
    ARM
    + """
sys.argv[:] = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
)

PROGRAM = (
    """
import numpy as np
from mpiattn import KVCache, MeshAttention, PeerFailure, tree_decode
"""
    + ARM
    + """

def dense(q, k, v, causal):
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    if causal:
        scores += np.triu(np.full(scores.shape[2:], -np.inf), 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)

def turn(comm, number):
    whole = np.random.default_rng(number).standard_normal((3, 1, 61, 4, 8), np.float32)
    how = {"tile": (1, comm.size) if number else "auto", "schedule": "collective" if number == 1 else "greedy"}
    with MeshAttention(comm, seqlen=61, heads=4, head_dim=8, causal=True, timeout=timeout, **how) as plan:
        q, k, v = whole[:, :, plan.positions]
        out, lse = plan.forward(q, k, v)
        plan.backward(out, q, k, v, out, lse)
        assert np.allclose(out, dense(*whole, True)[:, plan.positions], atol=1e-5), "out is wrong"
        plan.verify(q, k, v, out, lse)
        plan.gather(out)
    with KVCache(comm, capacity=64, kv_heads=4, head_dim=8, timeout=timeout) as cache:
        cache.append(*whole[1:])
        out, _ = tree_decode(whole[0, :, -1:], cache)
        assert np.allclose(out, dense(whole[0, :, -1:], *whole[1:], False), atol=1e-5), "decoded is wrong"

comm, timeout, done, lost = world, float(sys.argv[3]), 0, []
while done < 3:
    whole, failure = True, None
    try:
        turn(comm, done)
    except PeerFailure as error:
        whole, failure = False, error
        os.write(1, f"{time.monotonic()!r} {world.rank} caught {error.ranks}: {error}\\n".encode())
        assert error.ranks, error
    try:
        whole = bool(comm.Agree(whole))
    except MPI.Exception:
        whole = False
    if whole:
        done += 1
        continue
    old, comm = comm, comm.Shrink()
    lost.append(old.size - comm.size)
    if failure:
        gone = set(MPI.Group.Translate_ranks(old.Get_group(), list(failure.ranks), comm.Get_group()))
        assert gone == {MPI.UNDEFINED}, (failure.ranks, gone)
signal.setitimer(signal.ITIMER_REAL, 0)
if os.path.exists(f"{mark}.{world.rank}"):  # its time has not come
    os.remove(f"{mark}.{world.rank}")
os.write(1, f"rank {world.rank} is done, without {sum(lost)}\\n".encode())
"""
)


def require_ulfm():
    """Skip the calling test where MPI does not let ranks go on when one has ended."""
    launch.require_launch()
    says = subprocess.run([launch.mpiexec(), "--version"], text=True, capture_output=True, timeout=60).stdout
    version = re.search(r"\(Open MPI\) (\d+)", says)
    if not (version and int(version[1]) >= 5):
        pytest.skip("takes an MPI that has ULFM: Open MPI 5")


class Death(NamedTuple):
    """Which rank is killed, and where."""

    phase: str
    victim: int
    call: int


class Trial(NamedTuple):
    """The ranks, and those that are killed."""

    ranks: int
    deaths: tuple

    def __str__(self):
        return f"{self.ranks}/" + "+".join("/".join(map(str, death)) for death in self.deaths)

    @classmethod
    def parse(cls, text):
        """The trial of its text."""
        ranks, deaths = text.split("/", 1)
        parts = [death.split("/") for death in deaths.split("+")]
        return cls(int(ranks), tuple(Death(phase, int(victim), int(call)) for phase, victim, call in parts))

    @classmethod
    def draw(cls, rng):
        """A random one."""
        ranks = rng.randint(3, 5)
        victims = rng.sample(range(ranks), rng.choice((1, 1, 1, 2)))
        phases = [rng.choice(list(PHASES)) for _ in victims]
        return cls(
            ranks,
            tuple(Death(phase, victim, rng.randrange(CALLS.get(phase, 2))) for phase, victim in zip(phases, victims)),
        )


def run(trial, folder, timeout=TIMEOUT):
    """Run a trial in an empty folder; (what is not as promised, seconds to the last PeerFailure, what it wrote)."""
    victims = "+".join(f"{PHASES[phase]}/{victim}/{call}" for phase, victim, call in trial.deaths)
    (folder / "rank.py").write_text(PROGRAM)
    command = [*OPTIONS, sys.executable, folder / "rank.py", folder / "mark", victims, timeout]
    try:
        done = launch.mpirun(trial.ranks, command, timeout=LIMIT, check=False)
    except pytest.fail.Exception as error:  # time is up
        return [f"no end within {LIMIT:g} s"], None, str(error)
    marks = {int(path.suffix[1:]): float(path.read_text()) for path in folder.glob("mark.*")}
    caught = re.findall(r"^(\S+) (\d+) caught \((.*?),?\): (.*)", done.stdout, re.MULTILINE)
    alive, crashes = trial.ranks - len(marks), done.stderr.count("Process received signal")
    wrong = [f"code {done.returncode}"] if done.returncode else []
    if crashes:  # of which the launcher makes no code
        wrong.append(f"{crashes} ranks crashed")
    if done.stdout.count(f"is done, without {len(marks)}\n") != alive:
        wrong.append("not all others are done")
    named = {int(rank) for _, _, ranks, _ in caught for rank in ranks.split(", ")}
    if len(trial.deaths) == 1 and named - set(marks):  # after the first death ranks have other numbers
        wrong.append(f"failed: {set(marks)}, named: {named}")
    host = f"on {os.uname().nodename} ended"
    if any(host not in text and "first plan or cache" not in text for *_, text in caught):
        wrong.append("no host, or no end")
    late = max((float(at) for at, *_ in caught), default=0) - max(marks.values(), default=0) if caught else 0.0
    if marks and late > SOON * launch.time_factor():
        wrong.append(f"PeerFailure after {late:.1f} s")
    return wrong, late if marks else None, done.stdout + done.stderr


def main():
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--trial", action="append", default=[], metavar="RANKS/PHASE/VICTIM/CALL", help="this one")
    args = parser.parse_args()
    rng, begin, reached, bad, slowest = random.Random(args.seed), time.monotonic(), 0, 0, 0.0
    trials = [Trial.parse(text) for text in args.trial] or [Trial.draw(rng) for _ in range(args.trials)]
    places = {}
    for trial in trials:
        with tempfile.TemporaryDirectory(prefix="mpiattn-shrink-") as folder:
            wrong, seconds, wrote = run(trial, Path(folder))
        reached += seconds is not None
        slowest, bad = max(slowest, seconds or 0), bad + bool(wrong)
        for death in trial.deaths:
            places[death.phase] = places.get(death.phase, 0) + (seconds is not None)
        if wrong or args.trial:
            print(f"{trial}: {'; '.join(wrong)}\n{wrote}", flush=True)
    took = time.monotonic() - begin
    print(f"{len(trials)} trials in {took:.0f} s, in {reached} of them a rank was killed, {bad} went wrong")
    print(f"the last PeerFailure came {slowest:.2f} s after the last death; deaths: {places}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
