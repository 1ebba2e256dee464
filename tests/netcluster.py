"""Hosts on one machine: network namespaces, each with a network card of its own whose rate is shaped.

    with Hosts(4, rate="1gbit") as hosts:
        hosts.mpirun(4, [sys.executable, "script.py"])

    python tests/netcluster.py 4 1gbit -- python script.py          # brings it up, runs, tears it down

What such a host sends takes bytes / rate: on two cores, 64 hosts at 10 Mb/s move messages of 128 KiB around a ring and
in permutations at 0.94 of the rate, now and then 0.90, where headers alone cost 4.4 %; at 20 Mb/s the cores are too
slow.  The first message between two hosts takes longer: MPI connects them behind what they have queued.

Takes root, `ip` and `tc`, and MPICH, whose launcher is told to enter a namespace where it would log in to a host.
"""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import launch

SUBNET = "10.77"  # hosts are 10.77.0.1, 10.77.0.2, ...
PACKET = 8192  # bytes; a larger one would be cut by the shaper to 1500 each, which alone fills two cores
BURST = 20480  # bytes that a card which was idle may send at once: two packets, and little of a message
QUEUE = "64mb"  # that wait at a card at most: a card makes its host wait, it drops nothing
# Linux's own settings of a namespace.  bbr, where a machine has that for default, sends slower than the link while it
# measures; a rank that computes is no reason to begin slowly again; a window holds several messages, so that they
# travel without the rank, as from a card that reads memory itself.
SETTINGS = (
    "net.ipv4.tcp_congestion_control=reno",
    "net.ipv4.tcp_slow_start_after_idle=0",
    "net.ipv4.tcp_rmem=4096 4194304 33554432",
    "net.ipv4.tcp_wmem=4096 2097152 4194304",
)
WINDOW = 1000  # segments of 1448 bytes that a new connection may have under way
_UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bits_per_second(rate):
    """Of a rate as `tc` writes it: 10mbit, 1gbit."""
    number, unit = re.fullmatch(r"([0-9.]+)([kmg]?bit)", rate).groups()
    return float(number) * _UNITS[unit]


def _shape(rate):
    burst = max(BURST, int(bits_per_second(rate) / 8 * 2e-3))  # the shaper wakes up a millisecond late or two
    return f"tbf rate {rate} burst {burst} limit {QUEUE}"


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
    """`count` hosts behind one bridge; rate: of each one's card, as `tc` writes it.  NotUpError where that fails.

    per_host: ranks that share a host, and its memory.
    """

    def __init__(self, count, rate="1gbit", per_host=1):
        self.count, self.rate, self.per_host, self.tag = count, rate, per_host, f"m{os.getpid() % 100000}"
        self.bridge = f"{self.tag}br"

    def _name(self, i):
        return f"{self.tag}h{i}"

    def _veth(self, i):
        return f"{self.tag}v{i}"

    def address(self, i):
        """Of host i."""
        return f"{SUBNET}.{(i + 1) // 256}.{(i + 1) % 256}"

    def _card(self, i):
        """Hardware address of host i's card."""
        return f"02:4d:41:00:{i // 256:02x}:{i % 256:02x}"

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
        lines = [
            f"link add {self.bridge} type bridge",
            f"link set {self.bridge} up",
            f"addr add {SUBNET}.255.254/16 dev {self.bridge}",
        ]
        for i in range(self.count):
            name, veth = self._name(i), self._veth(i)
            lines += [
                f"netns add {name}",
                f"link add {veth} type veth peer name eth0 address {self._card(i)} netns {name}",
                f"link set {veth} master {self.bridge} up",
            ]
        subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True, capture_output=True)
        for i in range(self.count):
            inside = (
                f"link set lo up\nlink set eth0 gso_max_size {PACKET} up\n"
                f"addr add {self.address(i)}/16 dev eth0\n"
                f"route change {SUBNET}.0.0/16 dev eth0 initcwnd {WINDOW} initrwnd {WINDOW}\n"
            )
            # Every host knows every card: Linux keeps 1024 addresses found by asking, for all namespaces together.
            inside += "\n".join(
                f"neigh add {self.address(j)} lladdr {self._card(j)} dev eth0 nud permanent"
                for j in range(self.count)
                if j != i
            )
            subprocess.run(
                ["ip", "-n", self._name(i), "-batch", "-"], input=inside, text=True, check=True, capture_output=True
            )
            self._inside(i, ["sysctl", "-qw", *SETTINGS])
            self._inside(i, f"tc qdisc add dev eth0 root {_shape(self.rate)}".split())
        self.folder = Path(tempfile.mkdtemp(prefix="mpiattn-hosts-"))
        self.enter = self.folder / "enter"
        cases = "\n".join(f"{self.address(i)}) name={self._name(i)};;" for i in range(self.count))
        self.enter.write_text(
            f'#!/bin/sh\n# called as a remote shell: HOST COMMAND...\n'
            f'while [ "${{1#-}}" != "$1" ]; do shift; done\nhost=$1; shift\n'
            f'case $host in\n{cases}\nesac\nexec ip netns exec "$name" sh -c "$*"\n'
        )
        self.enter.chmod(stat.S_IRWXU)

    def _inside(self, i, command):
        """Run a command on host i; returns what it prints."""
        return subprocess.run(
            ["ip", "netns", "exec", self._name(i), *command], text=True, check=True, capture_output=True
        ).stdout

    def set_rate(self, rate):
        """Give every card another rate, launches or not."""
        self.rate = rate
        for i in range(self.count):
            self._inside(i, f"tc qdisc change dev eth0 root {_shape(rate)}".split())

    def __exit__(self, *_):
        for i in range(self.count):
            left = subprocess.run(["ip", "netns", "pids", self._name(i)], text=True, capture_output=True).stdout
            for pid in map(int, left.split()):  # what outlived its launcher would keep the host's card
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            # first its card, which would go some time after the namespace, and so keep its name from the next host
            subprocess.run(["ip", "link", "del", self._veth(i)], capture_output=True)
            subprocess.run(["ip", "netns", "del", self._name(i)], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    def command(self, ranks, command):
        """What starts `ranks` ranks of a command, `per_host` a host in turn."""
        addresses = ",".join(self.address(i) for i in range(self.count))
        return [
            "ip",
            "netns",
            "exec",
            self._name(0),
            launch.mpiexec(),
            "-launcher",
            "ssh",
            "-launcher-exec",
            str(self.enter),
            "-hosts",
            addresses,
            "-iface",
            "eth0",
            "-ppn",
            str(self.per_host),
            "-n",
            str(ranks),
            *map(str, command),
        ]

    def environment(self, extra=None):
        """For the launch: MPICH over TCP between hosts, though their ranks would find each other's memory."""
        alone = {"MPIR_CVAR_NOLOCAL": "1"} if self.per_host == 1 else {}
        return launch.environment({"FI_PROVIDER": "tcp", "MPIR_CVAR_CH4_NETMOD": "ofi", **alone, **(extra or {})})

    def mpirun(self, ranks, command, timeout=120, env=None):
        """Run it and return the CompletedProcess; raises where it fails or takes too long (`timeout`, if quiet)."""
        return subprocess.run(
            self.command(ranks, command),
            env=self.environment(env),
            text=True,
            check=True,
            capture_output=True,
            timeout=timeout * launch.time_factor(),
            stdin=subprocess.DEVNULL,
        )

    def sent(self):
        """Bytes that every host's card has sent so far, by its own counters."""
        counter = ["cat", "/sys/class/net/eth0/statistics/tx_bytes"]
        return [int(self._inside(i, counter)) for i in range(self.count)]


def main():
    """Returns the exit code of the command."""
    at = sys.argv.index("--")
    count, rate, *per_host = sys.argv[1:at]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a timeout, too, leaves nothing behind
    with Hosts(int(count), rate, *map(int, per_host)) as hosts:
        ranks = hosts.count * hosts.per_host
        return subprocess.run(hosts.command(ranks, sys.argv[at + 1 :]), env=hosts.environment()).returncode


if __name__ == "__main__":
    sys.exit(main())
