"""All that there is to find out on a machine with one GPU, with nothing from outside it.

  python3 tests/gpu/run_all.py OUT --group smoke --wheels WHEELS [--openmpi openmpi-cuda.tar.gz]

Groups, in the order in which to run them, each in less than nine minutes: smoke, blocks, bench, sanitizer, ranks.
--list tells their sections, and how long each should take.  Without --group or --sections all are run.  It needs this
Python's standard library and pip.  WHEELS and openmpi-cuda.tar.gz are made where there is a network:

  pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
      --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d WHEELS mpich mpi4py
  tests/gpu/build_openmpi.sh openmpi-cuda.tar.gz

and so is what else the machine lacks: numpy h5py ml_dtypes tqdm threadpoolctl pytest iniconfig pluggy packaging
pygments cupy-cuda13x cuda-bindings cuda-pathfinder nvidia-cuda-nvrtc nvidia-cuda-runtime.  What it has is used instead,
and its PyTorch.

Everything is unpacked, compiled and kept in a work folder.  OUT gets summary.txt, summary.json and results.tar.gz with
all logs, written anew after every section, and running.log while one runs: what a run that is cut off knew is there.
The next command goes on with the same work folder, and tells the former results too if the sources are the same.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_results import Results, facts
from gpu_sections import Skip, run_section, stopped
from gpu_table import SECTIONS
from gpu_work import GROUP_SECONDS, ROOT, Work

PREPARATIONS = ("install", "device")  # what every group begins with
GROUPS = list(dict.fromkeys(section.group for section in SECTIONS.values()))


def table():
    """The groups and their sections, for people."""
    lines = []
    for group in GROUPS:
        members = {name: section for name, section in SECTIONS.items() if section.group == group}
        lines.append(f"{group}: {sum(section.estimate for section in members.values()):.0f} s, {GROUP_SECONDS} at most")
        lines += [
            f"  {name:22} {section.estimate:4.0f} s, {section.limit:.0f} at most  {section.about}"
            for name, section in members.items()
        ]
    return "\n".join(lines)


def arguments():
    """What the command line says, its sections in order, and the folder of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help="folder for the summary and the archive")
    parser.add_argument("--list", action="store_true", help="tell the groups and sections, and run nothing")
    parser.add_argument("--group", nargs="+", choices=GROUPS, metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, metavar="NAME", help="only these")
    parser.add_argument("--wheels", type=lambda path: Path(path).resolve(), help="folder of wheels")
    parser.add_argument("--openmpi", type=lambda path: Path(path).resolve(), help="what build_openmpi.sh has made")
    parser.add_argument(
        "--work",
        type=lambda path: Path(path).resolve(),
        help="work folder, outside of OUT (default: %(default)s)",
        default=Path(tempfile.gettempdir(), "mpiattn-gpu"),
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help=f"for all of it (each group has {GROUP_SECONDS})",
    )
    parser.add_argument("--backend", default="cuda", help="of what is tested and measured (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    args = parser.parse_args()
    if args.out is None and not args.list:
        parser.error("OUT is missing")
    for name, path in (("--wheels", args.wheels), ("--openmpi", args.openmpi)):
        if path and not path.exists():
            parser.error(f"{name} is {path}; there is no such thing")
    chosen = args.sections or [name for name, section in SECTIONS.items() if section.group in (args.group or GROUPS)]
    args.chosen = [name for name in SECTIONS if name in {*chosen, *PREPARATIONS}]
    return args


def main():
    """Run the sections; the exit code is 1 if one has failed."""
    args, start = arguments(), time.monotonic()
    if args.list:
        print(table())
        return 0
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    args.work.mkdir(parents=True, exist_ok=True)
    known = facts(ROOT, [])
    args.results = args.work / f"results-{known['source']}"
    results, work = Results(args.results, args.out.resolve(), known), Work(args)
    try:
        return run_sections(args, start, results, work)
    finally:
        work.mps.stop()


def run_sections(args, start, results, work):
    """The chosen sections in turn; returns the exit code.  start: of the command, on time.monotonic's clock."""
    # The table's limits are meant for a GPU; kernels that are emulated take as long as the processor needs
    patience = 1
    if args.backend == "emulated":
        patience = 10
    # what prepares is a part of the first group
    group = next((SECTIONS[name].group for name in args.chosen if name not in PREPARATIONS), "smoke")
    began, failed = {}, False
    for name in args.chosen:
        if stopped:
            return 143
        section = SECTIONS[name]
        if name not in PREPARATIONS:
            group = section.group
        deadline = min(
            began.setdefault(group, time.monotonic()) + patience * GROUP_SECONDS,
            start + args.limit,
            time.monotonic() + patience * section.limit,
        )

        def act(call, record, section=section):
            if section.gpu and work.no_gpu:
                raise Skip(work.no_gpu)
            section.function(work, call, record, *section.arguments, **section.options)

        print(f"{name}: {section.estimate:.0f} s expected", flush=True)
        log = results.out / "running.log"
        result = run_section(act, log, deadline, work.environment, ROOT)
        shutil.move(log, args.results / f"{name}.log")
        if name == "install":
            results.facts = facts(ROOT, work.installed.packages())
        results.add(name, {**result, "estimate": section.estimate})
        failed |= result["status"] == "failed"
        print(f"{name}: {result['status']}, {result['seconds']} s  {result['why']}".rstrip(), flush=True)
    print(results.as_text())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
