"""What is claimed of speed, measured on hosts that this machine makes up: network namespaces with shaped cards.

    python tests/scaling.py mesh --hosts 16 64         # the chosen mesh against Ring where transfers bound the time
    python tests/scaling.py planes --hosts 16 64       # the same with 8 heads, which planes can split
    python tests/scaling.py balance                    # a causal mask on consecutive chunks, balanced inside the plan
    python tests/scaling.py nodes                      # several ranks a host: the mesh in the order of the hosts
    python tests/scaling.py overlap                    # blocks and transfers that take equally long
    python tests/scaling.py auto --hosts 12 16 36 64   # what "auto" chooses against everything else, at three rates
    python tests/scaling.py masks                      # the same for windows, a prefix and documents
    python tests/scaling.py predict                    # times for 32 and 64 hosts by what was measured on 4 and 16
    python tests/scaling.py bytes --hosts 16           # the counters of the cards against the formula
    python tests/scaling.py strong --hosts 4 16 64     # one problem on ever more hosts
    python tests/scaling.py decode                     # one token over spread keys: trees, rings, MPI's own Allreduce
    python tests/scaling.py halo                       # a window beside an exchange of halos written by hand
    python tests/scaling.py halo2d                     # a neighbourhood on a grid beside the same with corners
    python tests/scaling.py all --folder results

Each experiment launches `mpiattn bench` with a paced back end: blocks are really computed and then sleep until the time
is over that they take at a given speed, for two cores cannot compute for 64 hosts at once.  `halo` and `halo2d` alone
compute at this machine's own speed.  All times are of such compute and real messages.  Every launch is kept as JSON in
--folder; code 1 if a claim does not hold.  Nothing else may run meanwhile.  Takes what tests/netcluster.py takes.
"""

import argparse
import json
import sys
from itertools import product

import netcluster
import numpy as np
from scaling_lab import (
    GQA,
    MHA,
    PAYLOAD,
    RING_WAITS,
    TIMEOUT,
    Lab,
    Setting,
    bound,
    bound_by_transfers,
    find,
    kilobits,
    of_mask,
    seconds,
)
from scaling_masks import document_sets
from scaling_planes import balance, nodes, planes
from searches import flat_choices

from mpiattn.model.machine import load
from mpiattn.problem.grid import even_dims
from mpiattn.problem.problem import Problem
from mpiattn.schedule.tile import parse_tile
from mpiattn.schedule.tile import tiles as every_tile
from mpiattn.schedule.travels import mean_sent

MOST = 5  # times the bytes of the tile that sends least, of those that are measured in `auto`
TOKENS = 16  # of a rank in `decode`
NAP = 6  # milliseconds between two looks for messages there
OFF = 0.015  # how far the share of Ring's time that it waits in `mesh` may be off


def mesh(lab, hosts):
    """Where transfers bound the time, the chosen mesh gains over Ring what it sends less."""
    for n in hosts:
        setting = bound_by_transfers(n, MHA)
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


WINDOWS = {
    "64 keys, causal": {"causal": True, "window": (63, 0)},
    "256, causal": {"causal": True, "window": (255, 0)},
    "512, causal": {"causal": True, "window": (511, 0)},
    "1024, causal": {"causal": True, "window": (1023, 0)},
    "32 before, 32 after": {"window": (32, 32)},
    "128, 128": {"window": (128, 128)},
    "512, 512": {"window": (512, 512)},
    "512, 64": {"window": (512, 64)},
    "causal, a prefix of 256": {"causal": True, "prefix": 256},
}


def masks(lab, hosts):
    """What "auto" takes of windows, prefixes and expected documents is as fast as the best of all."""
    chunk, rate, tokens = 256, 32e6 / 8, 256 * 16
    sets = document_sets(tokens)
    cases = WINDOWS | {f"{len(cuts) - 1} documents": {"causal": True, "cu_seqlens": cuts} for cuts in sets}
    for n in hosts:
        gflops = MHA.block_flops(chunk) / (0.5 * MHA.hop_bytes(chunk) / (PAYLOAD * rate)) / 1e9
        setting = Setting(n, rate, gflops, chunk)
        print(f"masks-{n}: {setting}", flush=True)
        for name, mask in cases.items():
            auto, best, results = of_mask(lab, f"masks-{n}-{name}", setting, mask)
            print(f"  {name}: {len(results)} plans; predicted over measured {auto['predicted'] / auto['median']:.2f}")
            for kind, of in (("auto", auto), ("best", best)):
                print(
                    f"    {kind}: {of['median']:6.3f} s, {of['tile']} {of['layout']} {of['schedule']}, "
                    f"{of['sent'] / n / 2**20:.3f} MiB a rank",
                    flush=True,
                )
            for of in results:
                if (of["layout"], of["schedule"]) == ("contiguous", "greedy"):
                    lab.claim(f"{name}, {of['tile']}: bytes over those needed", of["sent"] / of["needed"], 1, 1)
            lab.claim(f"{name}: auto over the best", auto["median"] / best["median"], high=1.10)


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
                    "--anyway",
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
            (predicted,) = flat_choices(problem, n, schedules=("greedy",), tiles=[shape], machine=on, direction="both")
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


def halo(lab, hosts):
    """A causal window over long contiguous chunks beside an exchange of halos that is written by hand."""
    chunk, window = 16384, 511
    for n in hosts:
        text = f"{chunk} tokens each, 1 head x 64, a window of {window + 1}"
        for layout in ("contiguous", "auto"):
            options = "--seqlen", n * chunk, "--window", window, "--layout", layout
            sent = beside_halo(lab, f"halo-{n}-{layout}", n, text, options)
            lab.claim("bytes of the plan over those of the exchange", sent["plan"] / sent["halo"], 1, 1)


def halo2d(lab, hosts):
    """A neighbourhood on a grid in blocks, longitude cyclic, beside an exchange of faces and corners by hand."""
    grid, kernel = "256x512", "15x15"
    for n in hosts:
        dims = "x".join(map(str, even_dims(n, 2)))
        text = f"a grid of {grid} in {dims} blocks, 1 head x 64, {kernel}"
        for tile in ("ring", "auto"):
            options = "--grid", grid, "--dims", dims, "--kernel", kernel, "--tile", tile
            sent = beside_halo(lab, f"halo2d-{n}-{tile}", n, text, options)
            lab.claim("bytes of the plan over those of the exchange", sent["plan"] / sent["halo"], high=1)


def beside_halo(lab, name, n, text, options):
    """Launch `mpiattn.bench.halo` on n hosts and judge its times; returns the bytes that a rank sends at most."""
    rate = 100e6 / 8
    print(f"{name}: {n} hosts at 100 Mb/s, {text}", flush=True)
    options = *options, "--heads", 1, "--runs", lab.runs
    with netcluster.Hosts(n, kilobits(rate)) as up:
        data = lab.launch(name, up, {"hosts": n, "rate": rate}, *options, benchmark=("-m", "mpiattn.bench.halo"))
    median, sent = data["median"], data["sent_bytes"]
    print(f"  tile {data['tile']}, {data['schedule']}, {data['layout']} and {data['mesh_layout']} layout", flush=True)
    for which, took in median.items():
        print(f"  {which}: {took:.3f} s, {sent[which] / 2**20:.3f} MiB sent at most", flush=True)
    lab.claim("plan over the halo exchange", median["plan"] / median["halo"], high=1.1)
    return sent


EXPERIMENTS = {
    "mesh": (mesh, (16, 64)),
    "planes": (planes, (16, 64)),
    "balance": (balance, (16,)),
    "nodes": (nodes, (16,)),
    "overlap": (overlap, (16,)),
    "auto": (auto, (12, 16, 36, 64)),
    "masks": (masks, (16,)),
    "predict": (predict, (32, 64)),
    "bytes": (wire_bytes, (16,)),
    "strong": (strong, (4, 8, 16, 32, 64)),
    "decode": (decode, (16, 64)),
    "halo": (halo, (16,)),
    "halo2d": (halo2d, (16,)),
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
