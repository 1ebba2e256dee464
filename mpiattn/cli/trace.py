"""Show a file that --trace or plan.save_trace has written, where there is no browser: a table, a picture.

The table has a row for each rank and for each kind of what moves. Times are by the clock of rank 0. Waits for several
kinds at once count for each of them. The busiest rank is the one whose blocks take longest; if its blocks take much
longer than the mean, another layout may divide the work better.
"""

from ..console import options
from ..console.json_file import check_json, show
from ..console.table import duration, percent, table, written
from ..errors import ArgumentError
from ..files import trace_file
from ..plots import style
from ..plots.timeline import timeline
from ..schedule.kinds import NAMES
from ..system.launch_variables import launch_rank
from ..system.words import number, size

EXAMPLES = """\
examples:
  mpiexec -n 4 mpiattn run qkv.h5 out.h5 --causal --trace trace.json
  mpiattn trace trace.json
  mpiattn trace trace.json --plot trace.svg --ranks 0 3
"""
ALIKE = 0.005  # share by which times may differ and still are called as long
MOST_DRAWN = 32  # ranks of a picture, unless --ranks says which


def add_arguments(parser):
    """Declare the arguments of `mpiattn trace`."""
    parser.epilog = EXAMPLES
    parser.add_argument("file", metavar="FILE", help="what run --trace, bench --trace or plan.save_trace has written")
    parser.add_argument("--summary", action="store_true", help="print the table (the default without --plot)")
    options.add(parser, "plot")
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        metavar="RANK",
        help=f"ranks to draw, a row each (default: all, or of more than {MOST_DRAWN} the one that ends last, in lanes)",
    )
    options.add(parser, "json")


def run(args):
    """`mpiattn trace`; under a launcher only rank 0 works."""
    if launch_rank():
        return 0
    if args.ranks and args.plot is None:
        raise ArgumentError("--ranks is given without --plot, which it is about")
    check_json(args.json, [args.file])
    if args.plot is not None:
        style.check("--plot", args.plot)
    passes = trace_file.read("FILE", args.file)
    if args.plot is not None:
        _plot(args, passes)
    text = []
    if args.summary or args.plot is None:
        text += [_text(direction, ranks) for direction, ranks in passes.items()]
    if files := written(args.plot, args.json):
        text.append(f"written  {files}")
    show(args.json, _data(args, passes), "\n\n".join(text))
    return 0


def _plot(args, passes):
    """Draw the ranks of every pass."""
    entries = [
        (f"{direction}, measured", {rank: each.timeline for rank, each in ranks.items()})
        for direction, ranks in passes.items()
    ]
    ranks = args.ranks
    if ranks is None and len(entries[0][1]) <= MOST_DRAWN:
        ranks = list(entries[0][1])
    style.save(timeline(entries, ranks, title=args.file), args.plot, "--plot")


def _figures(each):
    """Seconds and bytes of a rank's pass."""
    return {
        "seconds": each.timeline.seconds,
        "blocks_seconds": sum(step.computed - step.posted for step in each.timeline.steps),
        "waiting_seconds": each.timeline.waiting,
        "regrouping_seconds": each.regrouping,
        "waiting_seconds_by_kind": each.awaited,
        "sent_bytes": each.sent,
    }


def _data(args, passes):
    """The result as JSON."""
    of_passes = {
        direction: [{"rank": rank, **_figures(each)} for rank, each in ranks.items()]
        for direction, ranks in passes.items()
    }
    return {"file": args.file, "passes": of_passes}


def _text(direction, ranks):
    """The tables of a pass."""
    figures = {rank: _figures(each) for rank, each in ranks.items()}
    kinds = [kind for kind in (*NAMES, "regrouping") if any(kind in each.sent for each in ranks.values())]
    regrouped = "regrouping" in kinds
    header = ["rank", "time", "blocks", "waits", "", *["regrouping"] * regrouped, *(f"{kind} sent" for kind in kinds)]
    rows = []
    for rank, of_rank in figures.items():
        waits = of_rank["waiting_seconds"]
        rows.append(
            [
                rank,
                duration(of_rank["seconds"]),
                duration(of_rank["blocks_seconds"]),
                duration(waits),
                percent(waits / of_rank["seconds"]),
                *[duration(of_rank["regrouping_seconds"])] * regrouped,
                *(size(of_rank["sent_bytes"].get(kind, 0)) for kind in kinds),
            ]
        )
    parts = [f"{direction}, {number(len(ranks), 'rank')}: {_busiest(figures)}", table(rows, header)]
    if moved := [kind for kind in kinds if kind in NAMES]:
        parts.append(table(_by_kind(moved, ranks), ["kind", "transfers", "sent by all", "waited for, mean", "most"]))
    return "\n\n".join(parts)


def _by_kind(kinds, ranks):
    """Rows of kinds: transfers, bytes, and how long ranks waited for them."""
    for kind in kinds:
        waits = {rank: each.awaited.get(kind, 0) for rank, each in ranks.items()}
        longest = max(waits, key=waits.get)
        yield [
            kind,
            sum(move.kind == kind for each in ranks.values() for move in each.timeline.moves),
            size(sum(each.sent.get(kind, 0) for each in ranks.values())),
            duration(sum(waits.values()) / len(waits)),
            f"{duration(waits[longest])} on rank {longest}",
        ]


def _busiest(figures):
    """The rank whose blocks take longest, in words."""
    seconds = {rank: of_rank["blocks_seconds"] for rank, of_rank in figures.items()}
    rank, mean = max(seconds, key=seconds.get), sum(seconds.values()) / len(seconds)
    text = f"the busiest is rank {rank}, whose blocks take {duration(seconds[rank])}"
    if seconds[rank] < mean * (1 + ALIKE):
        return f"{text}, as long as the mean of all"
    return f"{text}, {seconds[rank] / mean:.3g} times the mean of all"
