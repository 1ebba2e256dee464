"""The results of several `mpiattn run --json`, each in FOLDER/NODES.json, as a table and as an HDF5 file.

    python3 slurm/scaling.py OUT.h5 FOLDER

OUT holds one-dimensional datasets, an entry a run in order of nodes: nodes, ranks, tile, json (all that the run
reported), and in a group for each pass seconds, speedup (over the first run), wait_seconds and sent_bytes (means over
ranks).
"""

import argparse
import json
import sys
from pathlib import Path

import h5py

from mpiattn.console.table import duration, percent, table
from mpiattn.errors import FileError
from mpiattn.system.atomic_file import NewFile
from mpiattn.system.words import size

PASSES = ("forward", "backward")


def read(folder):
    """(nodes, text) of every run, in order of nodes."""
    return sorted((int(path.stem), path.read_text()) for path in folder.glob("*.json"))


def columns(runs):
    """What OUT holds, by the name of the dataset or group."""
    reports = [json.loads(text) for _, text in runs]
    data = {
        "nodes": [nodes for nodes, _ in runs],
        "ranks": [run["ranks"] for run in reports],
        "tile": [run["tile"] for run in reports],
        "json": [text for _, text in runs],
    }
    for name in PASSES:
        if name in reports[0]["seconds"]:
            seconds = [run["seconds"][name] for run in reports]
            data[name] = {
                "seconds": seconds,
                "speedup": [seconds[0] / each for each in seconds],
                **{
                    what: [sum(rank[name][what] for rank in run["per_rank"]) / run["ranks"] for run in reports]
                    for what in ("wait_seconds", "sent_bytes")
                },
            }
    return data


def as_text(data):
    """The table for the log."""
    shown = [("nodes", data["nodes"]), ("ranks", data["ranks"]), ("tile", data["tile"])]
    for name in (name for name in PASSES if name in data):
        row = data[name]
        shown += [
            (name, map(duration, row["seconds"])),
            ("speed-up", (f"{each:.2f}" for each in row["speedup"])),
            ("waiting", (percent(wait / all_) for wait, all_ in zip(row["wait_seconds"], row["seconds"]))),
            ("sent per rank", map(size, row["sent_bytes"])),
        ]
    return table(zip(*(values for _, values in shown)), [name for name, _ in shown])


def write(path, data):
    """Make the HDF5 file, whole or not at all; FileError where that cannot be."""
    new = NewFile("OUT", path)
    try:
        with h5py.File(new.partial, "w") as file:
            for name, values in data.items():
                for part, entries in values.items() if isinstance(values, dict) else [("", values)]:
                    file[f"{name}/{part}".rstrip("/")] = entries
        new.publish()
    finally:
        new.discard()


def main():
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", metavar="OUT", help="HDF5 file to make")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="holds the JSON files")
    args = parser.parse_args()
    runs = read(args.folder)
    if not runs:
        print(f"scaling: no run has left its results in {args.folder}", file=sys.stderr)
        return 1
    data = columns(runs)
    print(as_text(data), flush=True)
    try:
        write(args.output, data)
    except FileError as error:
        print(f"scaling: {error}", file=sys.stderr)
        return 1
    print(f"written: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
