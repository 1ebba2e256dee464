"""Benchmarks on made-up hosts, for tests/scaling.py: settings, launches, their figures, and the judging of claims."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import netcluster
import numpy as np

from mpiattn.problem.layout import LAYOUTS

PAYLOAD = 0.94  # share of a card's rate that is left for messages, as tests/netcluster.py says
LATENCY = 1e-3  # seconds of a message between two of such hosts, which share two cores
LAUNCH = 1e-3  # seconds of a block besides its work: waking up on a shared core
TIMEOUT = 3600  # seconds of a launch
RING_WAITS = 0.91  # the share of Ring's time that it waits in `bound_by_transfers`
WIRE = 4  # bytes of an element that travels, float32


class Heads(NamedTuple):
    """Few of them, for NumPy takes a while for each."""

    name: str
    q: int
    kv: int
    dim: int

    def block_flops(self, chunk):
        """Operations of a block of `chunk` queries and keys."""
        return 4 * self.q * self.dim * chunk**2

    def hop_bytes(self, chunk):
        """Bytes of a hop of Ring: keys and values of a chunk."""
        return 2 * self.kv * self.dim * WIRE * chunk


MHA, GQA, EIGHT = Heads("MHA", 1, 1, 512), Heads("GQA 8:1", 8, 1, 64), Heads("8 heads", 8, 8, 64)


class Setting(NamedTuple):
    """Hosts of one rank each, the rate of their cards in bytes a second, Gflop/s of each, and tokens of each."""

    hosts: int
    rate: float
    gflops: float
    chunk: int
    heads: Heads = MHA

    def __str__(self):
        return (
            f"{self.hosts} hosts of {self.gflops:.3g} Gflop/s (emulated compute) at {self.rate * 8e-6:g} Mb/s, "
            f"{self.heads.name}, {self.hosts * self.chunk} tokens"
        )

    def machine(self):
        """What `mpiattn bench` has to reckon with."""
        link = {"latency": LATENCY, "bandwidth": PAYLOAD * self.rate, "overlap": 1.0}
        return {
            "name": "shaped hosts",
            "inside": link,
            "between": link,
            "flops": {"float32": self.gflops * 1e9},
            "launch": LAUNCH,
            "assumes": f"{PAYLOAD:.0%} of the rate of the cards",
        }


def bound_by_transfers(n, heads, chunk=32):
    """The setting in which Ring waits for nine tenths of its time."""
    rate = 4e6 / 8 if n > 16 else 8e6 / 8
    hop = heads.hop_bytes(chunk) / (PAYLOAD * rate)
    block = (1 - RING_WAITS) * hop / (1 + RING_WAITS / (n - 1))  # n - 1 hops, and a block after the last
    return Setting(n, rate, heads.block_flops(chunk) / block / 1e9, chunk, heads)


def kilobits(rate):
    """Bytes a second as `tc` writes a rate."""
    return f"{rate * 8e-3:.0f}kbit"


class Lab:
    """Launches benchmarks, keeps what they say, and judges claims."""

    def __init__(self, folder, runs):
        self.folder, self.runs, self.claims, self.launches = Path(folder), runs, [], 0
        self.folder.mkdir(parents=True, exist_ok=True)

    def bench(self, name, setting, *options, hosts=None, runs=None, warmup=1, machine=None):
        """What `mpiattn bench --json` says of a setting; hosts: that are up, machine: that was measured, if any."""
        if hosts is None:
            with netcluster.Hosts(setting.hosts, kilobits(setting.rate)) as hosts:
                return self.bench(name, setting, *options, hosts=hosts, runs=runs, warmup=warmup, machine=machine)
        heads = setting.heads
        if machine is None:
            machine = self.folder / "machine.json"
            machine.write_text(json.dumps(setting.machine()))
        print(f"{name}: {setting}", flush=True)
        data = self.launch(
            name,
            hosts,
            {**setting._asdict(), "heads": heads._asdict()},
            "--seqlen",
            setting.hosts * setting.chunk,
            "--heads",
            heads.q,
            "--kv-heads",
            heads.kv,
            "--head-dim",
            heads.dim,
            "--backend",
            f"paced:{setting.gflops:.6g}",
            "--machine",
            machine,
            "--runs",
            runs or self.runs,
            "--warmup",
            warmup,
            *options,
        )
        for case in data["cases"]:
            self._show(case, setting)
        return data

    def launch(self, name, hosts, setting, *options, benchmark=("-m", "mpiattn", "bench")):
        """What a benchmark, arguments of Python, says on all ranks of hosts; kept in a file with the setting."""
        command = [sys.executable, *benchmark, *options, "--json", "-"]
        try:
            outcome = hosts.mpirun(hosts.count * hosts.per_host, list(map(str, command)), timeout=TIMEOUT)
        except subprocess.CalledProcessError as error:
            sys.exit(f"{name} failed:\n{error.stdout}\n{error.stderr}")
        data = json.loads(outcome.stdout)
        self.launches += 1
        kept = {"experiment": name, "setting": setting, **data}
        (self.folder / f"{self.launches:02}-{name}.json").write_text(json.dumps(kept, indent=1))
        return data

    def _show(self, case, setting):
        note = "" if case["overlap"] else ", apart"
        for name, measured in case["passes"].items():
            took = measured["seconds"]
            print(
                f"  {case['asked']['tile']:>5} {case['tile']:>5} {case['schedule']:>10}{note} {name:>8}: "
                f"{took['median']:7.3f} s ({took['min']:.3f} - {took['max']:.3f}), "
                f"{took['median'] / bound(measured, setting):.3f} of its bound, waits "
                f"{measured['waiting']['mean']:.1%}, {measured['sent_bytes']['mean'] / 2**20:.2f} MiB"
                f"{'' if measured['counted'] else ' NOT AS BY THE FORMULA'}",
                flush=True,
            )
            self.claim(f"{case['tile']} {name} sends what the formula says", measured["counted"], 1, 1)

    def claim(self, text, value, low=float("-inf"), high=float("inf")):
        """Judge a number by its limits."""
        right = low <= value <= high
        self.claims.append(right)
        if (low, high) != (1, 1) or not right:
            limits = " and ".join(
                [f"at least {low:g}"] * (low > float("-inf")) + [f"at most {high:g}"] * (high < float("inf"))
            )
            print(f"  {'holds' if right else 'FAILS'}: {text}: {value:.3f}, {limits}", flush=True)


def bound(figures, setting):
    """Seconds that a pass takes at least: its bytes over the cards' rate, or its blocks."""
    return max(figures["sent_bytes"]["max"] / setting.rate, figures["ideal_seconds"])


def find(data, tile=None, schedule=None, overlap=True):
    """The passes of the case that was asked for so; None: whatever."""
    return next(
        case["passes"]
        for case in data["cases"]
        if tile in (None, case["asked"]["tile"])
        and schedule in (None, case["asked"]["schedule"])
        and case["overlap"] == overlap
    )


def seconds(passes, name="forward"):
    """Median seconds of a pass."""
    return passes[name]["seconds"]["median"]


def of_mask(lab, name, setting, mask, layouts=LAYOUTS):
    """What tests/scaling_masks.py says of a mask on hosts of a setting: results of `auto`, of the best, and of all.

    A result has "median" seconds; only those that have run as often as `auto` may be the best.
    """
    machine = lab.folder / "machine.json"
    machine.write_text(json.dumps(setting.machine()))
    case = {
        **mask, "tokens": setting.hosts * setting.chunk, "dim": setting.heads.dim, "rate": setting.rate,
        "backend": f"paced:{setting.gflops:.6g}", "machine": str(machine), "layouts": layouts, "runs": lab.runs,
    }  # fmt: skip
    with netcluster.Hosts(setting.hosts, kilobits(setting.rate)) as hosts:
        data = lab.launch(
            name,
            hosts,
            setting._asdict(),
            "--case",
            json.dumps(case),
            benchmark=(Path(__file__).parent / "scaling_masks.py",),
        )
    results = [{**of, "median": float(np.median(of["seconds"][1:] or of["seconds"]))} for of in data["results"]]
    often = [of for of in results if len(of["seconds"]) == len(results[0]["seconds"])]
    return results[0], min(often, key=lambda of: of["median"]), results
