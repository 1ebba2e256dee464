"""Hosts on one machine: network namespaces, each with a network card of its own whose rate is shaped.

    with Hosts(4, rate="1gbit") as hosts:
        hosts.mpirun(4, [sys.executable, "script.py"])

    python tests/netcluster.py 4 1gbit -- python script.py          # brings it up, runs, tears it down

Takes root, `ip` and `tc`, and MPICH, whose launcher is told to enter a namespace where it would log in to a host.
"""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import launch

SUBNET = "10.77"           # hosts are 10.77.0.1, 10.77.0.2, ...


def missing():
    """Why hosts cannot be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    lacking = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if lacking:
        return f"no {' and no '.join(lacking)}"
    if launch.vendor() != "mpich":
        return "ranks in network namespaces are started by MPICH's launcher"
    probe = f"mpiattn-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "network namespaces are not allowed"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


class NotUpError(RuntimeError):
    """This machine does not do what hosts take: bridges, pairs of cards, shaping."""


class Hosts:
    """`count` hosts behind one bridge; rate: of each one's card, as `tc` writes it.  NotUpError where that fails."""

    def __init__(self, count, rate="1gbit"):
        self.count, self.rate, self.tag = count, rate, f"m{os.getpid() % 100000}"
        self.bridge = f"{self.tag}br"

    def _name(self, i):
        return f"{self.tag}h{i}"

    def address(self, i):
        """Of host i."""
        return f"{SUBNET}.{(i + 1) // 256}.{(i + 1) % 256}"

    def __enter__(self):
        try:
            self._up()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, subprocess.CalledProcessError):
                raise NotUpError(f"{' '.join(map(str, error.cmd))}: {error.stderr}") from error
            raise
        return self

    def _up(self):
        lines = [f"link add {self.bridge} type bridge", f"link set {self.bridge} up",
                 f"addr add {SUBNET}.255.254/16 dev {self.bridge}"]
        for i in range(self.count):
            name, veth = self._name(i), f"{self.tag}v{i}"
            lines += [f"netns add {name}", f"link add {veth} type veth peer name eth0 netns {name}",
                      f"link set {veth} master {self.bridge} up"]
        subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True, capture_output=True)
        shape = f"tbf rate {self.rate} burst 256kb latency 500ms"
        for i in range(self.count):
            inside = f"link set lo up\nlink set eth0 up\naddr add {self.address(i)}/16 dev eth0"
            subprocess.run(["ip", "-n", self._name(i), "-batch", "-"], input=inside, text=True, check=True,
                           capture_output=True)
            subprocess.run(f"ip netns exec {self._name(i)} tc qdisc add dev eth0 root {shape}".split(), text=True,
                           check=True, capture_output=True)
        self.folder = Path(tempfile.mkdtemp(prefix="mpiattn-hosts-"))
        self.enter = self.folder / "enter"
        cases = "\n".join(f"{self.address(i)}) name={self._name(i)};;" for i in range(self.count))
        self.enter.write_text(f'#!/bin/sh\n# called as a remote shell: HOST COMMAND...\n'
                              f'while [ "${{1#-}}" != "$1" ]; do shift; done\nhost=$1; shift\n'
                              f'case $host in\n{cases}\nesac\nexec ip netns exec "$name" sh -c "$*"\n')
        self.enter.chmod(stat.S_IRWXU)

    def __exit__(self, *_):
        for i in range(self.count):
            subprocess.run(["ip", "netns", "del", self._name(i)], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    def command(self, ranks, command):
        """What starts `ranks` ranks of a command, one a host in turn."""
        addresses = ",".join(self.address(i) for i in range(self.count))
        return ["ip", "netns", "exec", self._name(0), launch.mpiexec(), "-launcher", "ssh", "-launcher-exec",
                str(self.enter), "-hosts", addresses, "-iface", "eth0", "-n", str(ranks), *map(str, command)]

    def environment(self, extra=None):
        """For the launch: MPICH over TCP, even between ranks that would find each other's memory."""
        return launch.environment({"FI_PROVIDER": "tcp", "MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi",
                                   **(extra or {})})

    def mpirun(self, ranks, command, timeout=120, env=None):
        """Run it and return the CompletedProcess; raises where it fails or takes too long."""
        return subprocess.run(self.command(ranks, command), env=self.environment(env), text=True, check=True,
                              capture_output=True, timeout=timeout, stdin=subprocess.DEVNULL)

    def sent(self):
        """Bytes that every host's card has sent so far, by its own counters."""
        counter = ["cat", "/sys/class/net/eth0/statistics/tx_bytes"]
        return [int(subprocess.run(["ip", "netns", "exec", self._name(i), *counter], text=True, check=True,
                                   capture_output=True).stdout) for i in range(self.count)]


def main():
    """Returns the exit code of the command."""
    at = sys.argv.index("--")
    count, rate = sys.argv[1:at]
    with Hosts(int(count), rate) as hosts:
        return subprocess.run(hosts.command(hosts.count, sys.argv[at + 1:]), env=hosts.environment()).returncode


if __name__ == "__main__":
    sys.exit(main())
