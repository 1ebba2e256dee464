"""A Slurm cluster on this machine: slurmctld, several slurmd and a munged of its own, all in one folder.

    with Cluster(folder) as cluster:
        job = cluster.submit("slurm/run.sbatch", "in.h5", "out.h5", options=["--nodes=3"], cwd=folder)
        assert job.state == "COMPLETED", job.log

Nothing outside the folder is read or written: other clusters and munged of the system are left alone.  A second process
ends all that the cluster has started, jobs too, when `with` ends or when this process is gone, killed or not.
"""

import contextlib
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import launch
import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE")
START_SECONDS = 30
# What Slurm 22.05 says where its plugin pmi2 has cut a long message of MPICH 5 in two, which happens now and then: the
# ranks then wait for each other in MPI_Init.
GARBLED = "mpi/pmi2: invalid client request"
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])  # daemons are in sbin

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
PlugStackConfig={folder}/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
MpiDefault=none
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""


class NotUpError(RuntimeError):
    """The daemons do not come up on this machine."""


class Job(NamedTuple):
    """A job that has ended, or an array, of which `state` has every task's, and `log` what all have written."""

    state: str
    exit_code: int
    log: str


def missing():
    """Which programs of a cluster are not on this machine, as a list."""
    return [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]


def processes(conf):
    """Numbers of the processes that were started with this configuration and have not ended."""
    mark = f"SLURM_CONF={conf}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if mark in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


def _reap(conf):
    """Wait for the end of standard input, then end the cluster's processes."""
    sys.stdin.read()
    while left := list(processes(conf)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


class Cluster:
    """`nodes` nodes of 4 cores, 8 hardware threads and 2 GPUs (by name only), called n1, n2, ...; started by `with`.

    NotUpError, with the end of the daemons' logs, if they do not come up.
    """

    def __init__(self, folder, nodes=4):
        self.folder, self.names, self._daemons = Path(folder), [f"n{i + 1}" for i in range(nodes)], []
        self.conf = self.folder / "slurm.conf"

    def __enter__(self):
        self._reaper = subprocess.Popen(
            [sys.executable, __file__, self.conf], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._reaper.communicate()
        for daemon in self._daemons:
            daemon.wait(20)

    def _start(self):
        host, (*ports,) = socket.gethostname().split(".")[0], _free_ports(1 + len(self.names))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 Sockets=1 "
            "CoresPerSocket=4 ThreadsPerCore=2 Gres=gpu:2"
            for name, port in zip(self.names, ports[1:])
        )
        self.conf.write_text(
            CONF.format(folder=self.folder, host=host, ports=ports, nodes=nodes, user=pwd.getpwuid(os.getuid()).pw_name)
        )
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            f"--socket={self.folder}/munge.socket",
            f"--key-file={key}",
            f"--pid-file={self.folder}/munged.pid",
            f"--seed-file={self.folder}/munged.seed",
            f"--log-file={self.folder}/munged.log",
        )
        self._until((self.folder / "munge.socket").exists)
        self._daemon("slurmctld", "-D", "-f", self.conf)
        for name in self.names:
            self._daemon("slurmd", "-D", "-N", name, "-f", self.conf, log=name)
        self._until(lambda: self._idle() == len(self.names))

    def _idle(self):
        outcome = self.client("scontrol", "show", "nodes", "-o", check=False)
        return len(re.findall(r"State=IDLE ", outcome.stdout))

    def _daemon(self, program, *arguments, log=None):
        with open(self.folder / f"{log or program}.out", "w") as out:
            self._daemons.append(
                subprocess.Popen(
                    [program, *map(str, arguments)],
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _until(self, done):
        end = time.monotonic() + START_SECONDS * launch.time_factor()
        while not done():
            dead = [daemon.args[0] for daemon in self._daemons if daemon.poll() is not None]
            if dead or time.monotonic() > end:
                logs = "\n".join(f"{path.name}: {path.read_text()[-600:]}" for path in self.folder.glob("*.out"))
                raise NotUpError(
                    f"{', '.join(dead)} ended\n{logs}" if dead else f"not up after {START_SECONDS} s\n{logs}"
                )
            time.sleep(0.1)

    def _environment(self, env=None):
        inherited = {
            name: value
            for name, value in (env or os.environ).items()
            if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
        }
        return inherited | {"SLURM_CONF": str(self.conf), "PATH": (env or {}).get("PATH", PATH)}

    def client(self, *command, env=None, cwd=None, check=True, seconds=20):
        """Run a command of Slurm; returns a CompletedProcess."""
        outcome = subprocess.run(
            [*map(str, command)],
            env=self._environment(env),
            cwd=cwd,
            text=True,
            capture_output=True,
            timeout=seconds * launch.time_factor(),
        )
        assert not check or not outcome.returncode, f"{command[0]}: {outcome.stdout}{outcome.stderr}"
        return outcome

    def submit(self, script, *arguments, options=(), cwd, env=None, seconds=120, meanwhile=None):
        """`sbatch options script arguments` in folder `cwd`; waits for its end, and kills it after `seconds`.

        meanwhile: called with (number, state) of the job now and then.
        A job whose ranks Slurm could not start is submitted again; after three of them the test is skipped.
        """
        for _ in range(3):
            log = f"{Path(script).name}.{secrets.token_hex(4)}"
            number = self.client(
                "sbatch", "--parsable", f"--output={log}.%j.log", *options, script, *arguments, env=env, cwd=cwd
            ).stdout.strip()
            job = self._ended(number, Path(cwd), log, seconds, meanwhile)
            if GARBLED not in job.log:
                return job
        pytest.skip(f"srun has not started the ranks three times: {GARBLED}")

    def _ended(self, number, folder, log, seconds, meanwhile):
        end, cancelled = time.monotonic() + seconds * launch.time_factor(), False
        while True:
            shown = self.client("scontrol", "show", "job", "-o", number).stdout
            states = re.findall(r"JobState=(\w+)", shown)
            state = " ".join(sorted(set(states)))
            logs = sorted(folder.glob(f"{log}.*.log"))
            output = "".join(path.read_text(errors="replace") for path in logs) or f"(no output)\n{shown}"
            late = time.monotonic() > end
            if set(states) <= set(ENDED):
                break
            if meanwhile:
                meanwhile(number, state)
            if (late or GARBLED in output) and not cancelled:
                self.client("scancel", "--full", "--signal=KILL", number, check=False)
                cancelled = True
            if late:
                state = f"{state} after {seconds} s"
                break
            time.sleep(0.1)
        return Job(state, max(map(int, re.findall(r" ExitCode=(\d+):", shown))), output)


if __name__ == "__main__":
    _reap(sys.argv[1])
