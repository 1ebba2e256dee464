"""What is claimed of speed, measured on hosts that this machine makes up: network namespaces with shaped cards.

    python tests/scaling.py mesh --hosts 16 64         # the chosen mesh against Ring where transfers bound the time
    python tests/scaling.py overlap                    # blocks and transfers that take equally long
    python tests/scaling.py auto --hosts 12 16 36 64   # what "auto" chooses against everything else, at three rates
    python tests/scaling.py predict                    # times for 32 and 64 hosts by what was measured on 4 and 16
    python tests/scaling.py bytes --hosts 16           # the counters of the cards against the formula
    python tests/scaling.py strong --hosts 4 16 64     # one problem on ever more hosts
    python tests/scaling.py decode                     # one token over spread keys: trees, rings, MPI's own Allreduce
    python tests/scaling.py all --folder results

Each experiment launches `mpiattn bench` with a paced back end: blocks are really computed and then sleep until the time
is over that they take at a given speed, for two cores cannot compute for 64 hosts at once.  All times are of emulated
compute and real messages.  Every launch is kept as JSON in --folder; code 1 if a claim does not hold.  Nothing else may
run meanwhile.  Takes what tests/netcluster.py takes.
"""

import argparse
import json
import sys
from itertools import product

import netcluster
import numpy as np
from scaling_lab import GQA, MHA, PAYLOAD, TIMEOUT, Lab, Setting, bound, find, kilobits, seconds

from mpiattn.model import search
from mpiattn.model.machine import load
from mpiattn.problem.problem import Problem
from mpiattn.schedule.tile import parse_tile
from mpiattn.schedule.tile import tiles as every_tile
from mpiattn.schedule.travels import mean_sent

MOST = 5  # times the bytes of the tile that sends least, of those that are measured in `auto`
TOKENS = 16  # of a rank in `decode`
NAP = 6  # milliseconds between two looks for messages there
RING_WAITS, OFF = 0.91, 0.015  # the share of Ring's time that it waits in `mesh`, and how far it may be off


def mesh(lab, hosts):
    """Where transfers bound the time, the chosen mesh gains over Ring what it sends less."""
    chunk = 32
    for n in hosts:
        rate = 4e6 / 8 if n > 16 else 8e6 / 8
        hop = MHA.hop_bytes(chunk) / (PAYLOAD * rate)
        block = (1 - RING_WAITS) * hop / (1 + RING_WAITS / (n - 1))  # n - 1 hops, and a block after the last
        setting = Setting(n, rate, MHA.block_flops(chunk) / block / 1e9, chunk)
        data = lab.bench(f"mesh-{n}", setting, "--direction", "both", "--tile", "ring", "auto", "--schedule", "greedy")
        ring, chosen = find(data, f"1x{n}"), find(data, "auto")
        lab.claim("Ring's share of waiting", ring["forward"]["waiting"]["mean"], RING_WAITS - OFF, RING_WAITS + OFF)
        for name in ("forward", "both"):
            lab.claim(
                f"Ring over the chosen mesh, {name}",
                seconds(ring, name) / seconds(chosen, name),
                3.4 if n >= 64 else 2.4,
            )
            lab.claim(
                f"chosen mesh over its bound, {name}", seconds(chosen, name) / bound(chosen[name], setting), high=1.15
            )
            lab.claim(f"Ring over its bound, {name}", seconds(ring, name) / bound(ring[name], setting), high=1.10)


def overlap(lab, hosts):
    """Where blocks take as long as transfers, the two together take little more than one."""
    rate, chunk = 10e6 / 8, 32
    for n in hosts:
        side = round(n**0.5)
        moved = 2 * (side - 1) * MHA.hop_bytes(chunk)  # of the square mesh: Q and O, K and V
        setting = Setting(n, rate, n * MHA.block_flops(chunk) / (moved / (PAYLOAD * rate)) / 1e9, chunk)
        data = lab.bench(
            f"overlap-{n}", setting, "--tile", f"{side}x{n // side}", "--schedule", "greedy", "--no-overlap"
        )
        together, apart = find(data), find(data, overlap=False)
        lab.claim(
            "together over the longer of the two", seconds(together) / bound(together["forward"], setting), high=1.25
        )
        lab.claim("apart over together", seconds(apart) / seconds(together), 1.3)


def auto(lab, hosts):
    """What "auto" chooses is as fast as the best of what it chooses among, whatever bounds the time.

    The rates make Ring's transfers half as long as its blocks, twice, and eight times.  Tiles that send more than
    MOST times the bytes of another are left out: with few KV heads, they would take hours.
    """
    for n, (heads, chunk) in product(hosts, ((MHA, 16), (GQA, 64))):
        block = 8e-3 * max(1, n / 16)
        for ratio in (0.5, 2, 8):
            rate = heads.hop_bytes(chunk) / PAYLOAD / (ratio * block)
            setting = Setting(n, rate, heads.block_flops(chunk) / block / 1e9, chunk, heads)
            name = f"auto-{n}-{heads.name[:3]}-{ratio:g}"
            kinds = lab.bench(name, setting, "--tile", "auto", "--schedule", "auto", "greedy", "collective", warmup=0)
            faster = min(seconds(find(kinds, "auto", kind)) for kind in ("greedy", "collective"))
            lab.claim(
                "auto over the faster of greedy and collective",
                seconds(find(kinds, "auto", "auto")) / faster,
                high=1.05,
            )
            problem = Problem(seqlen=n * chunk, heads=heads.q, kv_heads=heads.kv, head_dim=heads.dim)
            sent = {str(tile): mean_sent(problem, tile) for tile in every_tile(n)}
            few = [tile for tile, nbytes in sent.items() if nbytes <= MOST * min(sent.values())]
            tiles = lab.bench(name, setting, "--tile", "auto", *few, warmup=0)
            best = min((case["passes"] for case in tiles["cases"]), key=seconds)["forward"]["runs"]
            spread = np.subtract(*np.percentile(best, (75, 25))) / np.median(best)
            lab.claim(
                "auto over the best of all tiles",
                seconds(find(tiles, "auto")) / np.median(best),
                high=1 + max(0.10, spread),
            )


def predict(lab, hosts):
    """What is predicted for more hosts by a machine that was measured on few of them."""
    chunk, rate, block = 16, 8e6 / 8, 30e-3
    speed = MHA.block_flops(chunk) / block / 1e9
    for few in (4, 16):
        tuned = lab.folder / f"tuned-on-{few}.json"
        print(f"predict: tune on {few} hosts", flush=True)
        with netcluster.Hosts(few, kilobits(rate)) as up:
            up.mpirun(
                few,
                [
                    sys.executable,
                    "-m",
                    "mpiattn",
                    "tune",
                    "--backend",
                    f"paced:{speed:.6g}",
                    "--head-dim",
                    MHA.dim,
                    "--dtype",
                    "float32",
                    "--seconds",
                    40,
                    "--no-store",
                    "--out",
                    tuned,
                ],
                timeout=TIMEOUT,
            )
    for n in hosts:
        side = 2 ** (n.bit_length() // 2)
        tiles = ["ring", *(f"{a}x{n // a}" for a in (side // 2, side, 2 * side))]
        setting = Setting(n, rate, speed, chunk)
        data = lab.bench(
            f"predict-{n}",
            setting,
            "--tile",
            *tiles,
            "--schedule",
            "greedy",
            "--direction",
            "both",
            machine=lab.folder / "tuned-on-16.json",
        )
        problem = Problem(seqlen=n * chunk, heads=MHA.q, head_dim=MHA.dim)
        for few, case in product((4, 16), data["cases"]):
            on = load(lab.folder / f"tuned-on-{few}.json").paced(speed * 1e9)
            shape = parse_tile(case["tile"], n)
            (predicted,) = search.evaluate(problem, n, kinds=("greedy",), shapes=[shape], machine=on, direction="both")
            lab.claim(
                f"{case['tile']}: predicted by {few} hosts over measured",
                predicted.seconds / seconds(case["passes"], "both"),
                0.8,
                1.2,
            )


def wire_bytes(lab, hosts):
    """What the cards have sent, by their own counters, is what the formula says: two launches that differ in runs."""
    for n in hosts:
        setting = Setting(n, 20e6 / 8, 0.4, 64)
        for tile in ("ring", "auto"):
            sent, counts = [], (1, 9)
            with netcluster.Hosts(n, kilobits(setting.rate)) as up:
                for runs in counts:
                    before = up.sent()
                    data = lab.bench(f"bytes-{n}-{tile}", setting, "--tile", tile, hosts=up, runs=runs, warmup=0)
                    sent.append([now - then for now, then in zip(up.sent(), before)])
            formula = data["cases"][0]["passes"]["forward"]["formula_bytes"]
            a_run = [(many - few) / (counts[1] - counts[0]) for few, many in zip(*sent)]
            lab.claim(f"{tile}: least sent by a card over the formula", min(a_run) / formula["min"], 0.95, 1.05)
            lab.claim(f"{tile}: most sent by a card over the formula", max(a_run) / formula["max"], 0.95, 1.05)


def strong(lab, hosts):
    """One problem on ever more hosts: Ring sends as much whatever their number, and comes to a halt there."""
    tokens, rate, rows = 2048, 10e6 / 8, []
    for n in hosts:
        setting = Setting(n, rate, 0.08, tokens // n)
        data = lab.bench(f"strong-{n}", setting, "--tile", "ring", "auto", "--schedule", "greedy", warmup=0)
        of = {"ring": f"1x{n}", "mesh": "auto"}
        rows.append(
            {
                "hosts": n,
                **{name: find(data, tile)["forward"]["runs"] for name, tile in of.items()},
                "predicted": {
                    name: next(case["predicted_seconds"] for case in data["cases"] if case["asked"]["tile"] == tile)
                    for name, tile in of.items()
                },
                "tile": next(case["tile"] for case in data["cases"] if case["asked"]["tile"] == "auto"),
                "ideal": find(data)["forward"]["ideal_seconds"],
            }
        )
    (lab.folder / "strong.json").write_text(json.dumps(rows, indent=1))
    first, last = next(row for row in rows if row["hosts"] >= 16), rows[-1]
    gained = {name: np.median(first[name]) / np.median(last[name]) for name in ("ring", "mesh")}
    lab.claim(f"Ring's gain from {first['hosts']} to {last['hosts']} hosts", gained["ring"], high=1.25)
    # 4 would be ideal, but real blocks of 64 hosts keep two cores busy
    lab.claim(f"the mesh's gain from {first['hosts']} to {last['hosts']} hosts", gained["mesh"], low=2)


def decode(lab, hosts):
    """One token of 8 heads x 128 over few keys, the worst case of a tree beside a ring that passes them.

    Every rank looks for messages each NAP milliseconds, which is the latency that all ways have in common; a blocking
    MPI_Allreduce alone does not sleep.
    """
    for count, per_host in ((n, of) for n in hosts for of in ((1,) if n > 16 else (4,))):
        ranks, rate = count * per_host, "100mbit"
        tokens = TOKENS * ranks
        print(
            f"decode-{ranks}: {count} hosts of {per_host} ranks at {rate}, {tokens} tokens of 8 heads x 128, a look "
            f"for messages each {NAP} ms",
            flush=True,
        )
        with netcluster.Hosts(count, rate, per_host) as up:
            data = lab.launch(
                f"decode-{count}x{per_host}",
                up,
                {"hosts": count, "per_host": per_host, "rate": rate},
                "--decode",
                "--seqlen",
                tokens,
                "--backend",
                f"paced:1:{NAP}",
                "--runs",
                lab.runs,
            )
        median = data["results"][0]["median"]
        for name, took in median.items():
            print(f"  {name:>24}: {took * 1e3:8.1f} ms", flush=True)
        if per_host > 1:
            lab.claim("butterfly over levels, combining", median["combining butterfly"] / median["combining levels"])
            continue
        lab.claim("ring over butterfly", median["ring"] / median["butterfly"], 8)
        lab.claim("query ring over butterfly", median["query-ring"] / median["butterfly"], 3)
        lab.claim("allreduce over butterfly", median["allreduce"] / median["butterfly"], 1)
        lab.claim(
            "allreduce over butterfly, combining", median["combining allreduce"] / median["combining butterfly"], 1
        )
        for name in ("MPI_Allreduce", "MPI_Iallreduce"):
            lab.claim(f"combining by butterfly over {name}", median["combining butterfly"] / median[name], high=1.5)


EXPERIMENTS = {
    "mesh": (mesh, (16, 64)),
    "overlap": (overlap, (16,)),
    "auto": (auto, (12, 16, 36, 64)),
    "predict": (predict, (32, 64)),
    "bytes": (wire_bytes, (16,)),
    "strong": (strong, (4, 8, 16, 32, 64)),
    "decode": (decode, (16, 64)),
}


def main():
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", choices=(*EXPERIMENTS, "all"))
    parser.add_argument("--hosts", type=int, nargs="+", help="how many (default: those of each experiment)")
    parser.add_argument("--runs", type=int, default=5, help="measured runs of a case (default: %(default)s)")
    parser.add_argument("--folder", default="scaling", help="for the results (default: %(default)s)")
    args = parser.parse_args()
    why = netcluster.missing()
    if why:
        sys.exit(f"no hosts here: {why}")
    lab = Lab(args.folder, args.runs)
    for name in EXPERIMENTS if "all" in args.experiments else args.experiments:
        experiment, hosts = EXPERIMENTS[name]
        print(f"{name}: {experiment.__doc__}", flush=True)
        experiment(lab, args.hosts or hosts)
    print(f"{sum(lab.claims)} of {len(lab.claims)} claims hold")
    return int(not all(lab.claims))


if __name__ == "__main__":
    sys.exit(main())
