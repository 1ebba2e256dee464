"""Check that this installation and this launch work: the first thing to run on a new cluster.

It looks at how the ranks were started, what they share, and which MPI they load. It computes small problems on every
mesh of these ranks, measures links, and writes a small file. Each item is PASS, WARN or FAIL, with advice; the exit
code is 1 if one is FAIL.

--full runs the tests of mpiattn on these ranks instead (extra `test`), a few minutes on four ranks. Arguments after --
go to pytest: --slow adds the tests that take longer, --all every case of those that draw a few.

examples:
  mpiexec -n 4 mpiattn check
  srun mpiattn check --folder /scratch/me --json check.json
  mpiexec -n 4 mpiattn check --full -- -k gradients
  mpiexec -n 4 mpiattn check --full -- --slow
"""

import importlib.util
import os
import shutil
import textwrap
import time
from collections import Counter

from ..check.report_item import FAIL, PASS, WARN, Item
from ..console import options
from ..console.json_file import check_json, report, show
from ..console.launch import on_all_ranks
from ..console.message import SILENT
from ..console.progress import Progress
from ..console.startup import defer
from ..errors import FileError
from ..system import gpu_aware_mpi
from ..system.launch_variables import launch_rank
from ..system.launcher import ADVICE, foreign
from ..system.sources import test_dir

TIMEOUT = 60.0  # seconds; no part of the check takes a rank this long


def add_arguments(parser):
    """Declare the arguments of `mpiattn check`."""
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="folder in which a small file is written, read and removed (default: the current folder)",
    )
    options.add_timeout(parser, default=f"{TIMEOUT:g}")
    options.add(parser, "json")
    parser.add_argument("--full", action="store_true", help="run the tests of mpiattn on these ranks instead")
    parser.add_argument("pytest", nargs="*", metavar="-- ARG", help="with --full, arguments for pytest")
    parser.set_defaults(wrong=parser.error)


def run(args):
    """`mpiattn check`."""
    if args.full:
        return _full(args)
    if args.pytest:
        args.wrong(f"{args.pytest[0]!r} is for pytest, which --full runs")
    unfit, wrong = gpu_aware_mpi.unfit(), foreign()
    if unfit or wrong:  # MPI must not be started
        return _refuse(args, Item("GPU-aware MPI", FAIL, *unfit) if unfit else Item("ranks", FAIL, wrong, ADVICE))
    timeout = TIMEOUT if args.timeout is None else args.timeout
    return on_all_ranks(lambda job: _run(job, args, timeout), timeout, alone=True)


def _refuse(args, item):
    """Show once why MPI is not started; returns the exit code."""
    if launch_rank() == 0:
        show(args.json, *_made([item], {}))
    else:
        time.sleep(SILENT)
    return 1


def _run(job, args, timeout):
    from ..check.survey import steps, survey

    comm = job.comm
    # Under another MPI's mpiexec every process is rank 0 of its own world; only one of them prints.
    speaks = comm.rank == 0 and launch_rank() == 0
    job.on_rank_0(lambda: check_json(args.json) if speaks else None)
    with Progress("check", steps(comm.size), " steps") as progress:
        items, facts = survey(job, args.folder or ".", timeout, progress)
    report(job, args.json, lambda: _made(items, facts) if speaks else None)
    return int(_failed(items))


def _failed(items):
    return any(item.status == FAIL for item in items)


def _made(items, facts):
    """The result as data and text."""
    data = {"passed": not _failed(items), "items": [item._asdict() for item in items], **facts}
    return data, as_text(items)


def as_text(items, width=None):
    """Items as text, one below the other, advice after an arrow."""
    width = max(60, min(width or shutil.get_terminal_size((120, 0)).columns, 120))
    longest = max(len(item.name) for item in items)
    lines = []
    for item in items:
        start = f"{item.status}  {item.name.ljust(longest)}  "
        for text, begin in ((item.text, start), (item.advice, " " * len(start) + "-> ")):
            lines += textwrap.wrap(
                text,
                width,
                initial_indent=begin,
                subsequent_indent=" " * len(begin),
                break_long_words=False,
                break_on_hyphens=False,
            )
    counts = Counter(item.status for item in items)
    return "\n".join([*lines, ", ".join(f"{counts[status]} {status}" for status in (PASS, WARN, FAIL))])


def _full(args):
    """Run the tests, serial ones on rank 0 and the others on all ranks; returns pytest's exit code."""
    for name in ("folder", "timeout", "json"):
        if getattr(args, name) is not None:
            args.wrong(f"--{name} is given with --full, which takes only arguments after --")
    if importlib.util.find_spec("pytest") is None:
        args.wrong("--full needs pytest: pip install pytest, or mpiattn with its extra `test`")
    unfit = gpu_aware_mpi.unfit()
    if unfit:
        return _refuse(args, Item("GPU-aware MPI", FAIL, *unfit))
    from mpi4py import MPI

    try:
        tests = test_dir()
    except FileError as error:
        args.wrong(str(error))
    import pytest

    defer(False)  # for the tests' own processes
    MPI.Init_thread()  # which the tests expect; it has been loaded, so that their loading does not start it
    # A pytest configuration in a folder above the installation belongs to another project: ignore it.
    alone = ["-c", os.devnull, "--rootdir", str(tests), "-p", "no:cacheprovider", "-ra"]
    return int(pytest.main([*alone, "-m", "not workshop", *args.pytest, str(tests)]))
