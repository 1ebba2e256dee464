"""Experiments of tests/scaling.py: planes, the layout of the mesh, and the order of its ranks."""

import json
from pathlib import Path

import netcluster
from scaling_lab import EIGHT, MHA, Setting, bound, bound_by_transfers, find, kilobits, seconds


def planes(lab, hosts):
    """Heads split over planes send less than Ring, and than a flat mesh."""
    for n in hosts:
        setting, side = bound_by_transfers(n, EIGHT), round(n**0.5)
        flat = f"{side}x{n // side}"
        data = lab.bench(
            f"planes-{n}", setting, "--direction", "both", "--tile", "ring", flat, "auto", "--schedule", "greedy"
        )
        ring, square, chosen = find(data, f"1x{n}"), find(data, flat), find(data, "auto")
        for name in ("forward", "both"):
            took = seconds(chosen, name)
            lab.claim(f"Ring over planes, {name}", seconds(ring, name) / took, 6.0 if n >= 64 else 3.5)
            lab.claim(f"{flat} over planes, {name}", seconds(square, name) / took, 1.5)
            lab.claim(f"planes over their bound, {name}", took / bound(chosen[name], setting), high=1.6)


def balance(lab, hosts):
    """Causal work on consecutive chunks: the mesh computes in a balanced layout, and the caller's chunks stay."""
    chunk, block = 64, 0.06  # seconds of a block
    for n in hosts:
        setting = Setting(n, 320e6 / 8, MHA.block_flops(chunk) / block / 1e9, chunk)
        took, side = {}, round(n**0.5)
        for name, layout, mesh_layout in (
            ("as given", "contiguous", "contiguous"),
            ("inside", "contiguous", "auto"),
            ("zigzag", "zigzag", "zigzag"),
        ):
            how = ["--causal", "--tile", f"{side}x{n // side}", "--layout", layout, "--mesh-layout", mesh_layout]
            data = lab.bench(f"balance-{n}-{name.replace(' ', '-')}", setting, *how, "--schedule", "greedy")
            took[name] = seconds(find(data))
        lab.claim("unbalanced over balanced inside", took["as given"] / took["inside"], 1.5)
        lab.claim("balanced inside over a zigzag caller", took["inside"] / took["zigzag"], high=1.1)


def nodes(lab, hosts):
    """The ranks of a chunk, one a plane, are on one host where they fit there: less is sent between hosts."""
    for n in hosts:
        for per_host in (2, 4):
            ranks, side = n * per_host, round(n**0.5)
            setting = Setting(ranks, 40e6 / 8, 1.0, 32, EIGHT)
            case = {
                "hosts": n, "tokens": ranks * setting.chunk, "heads": EIGHT.q, "dim": EIGHT.dim, "runs": lab.runs,
                "tile": [per_host, side, n // side], "backend": f"paced:{setting.gflops:.6g}",
            }  # fmt: skip
            print(f"nodes-{n}x{per_host}: {per_host} ranks a host, tile {case['tile']}", flush=True)
            with netcluster.Hosts(n, kilobits(setting.rate), per_host) as up:
                data = lab.launch(
                    f"nodes-{n}x{per_host}",
                    up,
                    setting._asdict(),
                    "--case",
                    json.dumps(case),
                    benchmark=(Path(__file__).with_name("scaling_nodes.py"),),
                )
            for name in ("by host", "as dealt"):
                print(
                    f"  {name}: {data[name]['seconds']:.3f} s, {data[name]['sent'] / n / 2**20:.2f} MiB sent by a host"
                )
            lab.claim("as dealt over by host", data["as dealt"]["seconds"] / data["by host"]["seconds"], 1)
            lab.claim(
                "bytes between hosts, as dealt over by host", data["as dealt"]["sent"] / data["by host"]["sent"], 1.1
            )
