"""List every tile of n ranks with its traffic, memory, balance and predicted time; starts no MPI.

A tile AxB gives every rank A query chunks x B KV chunks: a mesh of B rows x A columns, A*B = ranks. 1xN is
Ring-Attention. Sizes are in tokens, heads and elements; output is in binary units (1 KiB = 1024 B) and seconds.
"""

from dataclasses import asdict, replace
from functools import partial

from .. import __version__
from ..console import options
from ..console.json_file import write_json
from ..console.table import duration, percent, size, table
from ..errors import ArgumentError
from ..model import cost, machine, search
from ..model.simulate import simulate
from ..model.workload import Load, block_pairs
from ..plots import style
from ..plots.page import page
from ..problem.problem import ITEMSIZE, Problem
from ..schedule import travels
from ..schedule.route import passed_on
from ..schedule.tile import Tile, parse_tile, tiles
from ..schedule.validate import validate
from ..system.launch_variables import launch_rank
from .mesh_picture import picture

EXAMPLES = """\
examples:
  mpiattn plan --ranks 256 --seqlen 1048576 --heads 32 --head-dim 128 --causal
  mpiattn plan --ranks 64 --seqlen 262144 --heads 32 --kv-heads 8 --head-dim 128 --dtype bfloat16 --direction both
  mpiattn plan --ranks 6 --seqlen 6000 --heads 8 --head-dim 64 --tile 3x2 --schedule greedy --steps
  mpiattn plan --ranks 256 --seqlen 1048576 --heads 32 --head-dim 128 --json - | python -m json.tool
"""


def add_arguments(parser):
    """Declare the arguments of `mpiattn plan`."""
    parser.epilog = EXAMPLES
    parser.add_argument("--ranks", type=int, required=True, help="ranks to plan for; no launch is needed")
    parser.add_argument("--seqlen", type=int, required=True, help="query tokens of the whole sequence")
    parser.add_argument("--heads", type=int, required=True, help="query heads")
    parser.add_argument("--head-dim", type=int, required=True, help="elements of a query and of a key, per head")
    parser.add_argument("--kv-heads", type=int, help="key-value heads; divides --heads (default: --heads)")
    parser.add_argument("--value-dim", type=int, help="elements of a value, per head (default: --head-dim)")
    parser.add_argument("--seqlen-k", type=int, help="key-value tokens (default: --seqlen)")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default: %(default)s)")
    options.add_masks(parser)
    parser.add_argument(
        "--dtype", default="float32", choices=tuple(ITEMSIZE), help="of q, k, v and the result (default: %(default)s)"
    )
    options.add_wire_dtype(parser)
    parser.add_argument(
        "--direction",
        default="forward",
        choices=tuple(search.DIRECTIONS),
        help="which passes to plan for (default: %(default)s)",
    )
    options.add_layout(parser)
    options.add_route(parser)
    options.add_schedule(parser)
    options.add_tile(parser)
    options.add_max_memory(parser)
    options.add_machine(parser)
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="ranks (GPUs) of a node, consecutive ones (default: the machine's)",
    )
    parser.add_argument(
        "--steps",
        action="store_true",
        help="print the schedule of --tile step by step, and how many buffer slots it uses",
    )
    options.add_plot(parser)
    options.add_json(parser)


def run(args):
    """`mpiattn plan`."""
    if launch_rank():
        return 0  # under mpiexec, only rank 0 prints
    if args.ranks < 1:
        raise ArgumentError(f"ranks is {args.ranks}; it must be at least 1")
    if args.plot is not None:
        style.check("--plot", args.plot)
    problem = Problem(
        seqlen=args.seqlen,
        heads=args.heads,
        head_dim=args.head_dim,
        batch=args.batch,
        kv_heads=args.kv_heads,
        value_dim=args.value_dim,
        seqlen_k=args.seqlen_k,
        dtype=args.dtype,
        causal=args.causal,
        prefix=args.prefix,
        causal_block=args.causal_block,
        window=args.window,
        wire_dtype=args.wire_dtype,
    )
    asked = parse_tile(args.tile, args.ranks)
    kinds = cost.SCHEDULES if args.schedule == "auto" else (args.schedule,)
    on = _machine(args)
    evaluate = partial(
        search.evaluate,
        problem,
        args.ranks,
        args.route,
        kinds,
        direction=args.direction,
        machine=on,
        pairs=search.layouts(args.layout, problem, args.ranks),
    )
    choices = evaluate(max_memory=args.max_memory)
    search.check_memory(choices, args.max_memory)
    auto = choices[0]
    fastest = auto.seconds if args.max_memory is None else min(choice.seconds for choice in evaluate())
    best = {}
    for choice in choices:  # best first
        best.setdefault(choice.tile, choice)
    ring = best[Tile(1, 1, args.ranks)].sent_bytes
    rows = [_tile(problem, args, best[tile], ring) for tile in tiles(args.ranks)]
    shown = best[asked or auto.tile]
    data = {
        "mpiattn": __version__,
        "ranks": args.ranks,
        "problem": asdict(problem),
        "direction": args.direction,
        "route": args.route,
        "schedule": args.schedule,
        "layout": args.layout,
        "machine": on.as_dict(),
        "max_memory": args.max_memory,
        "memory_cost": search.times_as_long(auto.seconds, fastest),
        "auto": str(auto.tile),
        "tile": str(shown.tile),
        "tiles": rows,
        "others": _others(problem, args, ring),
    }
    schedules = [
        cost.build(shown.schedule, shown.tile, shown.route, problem, on, direction, ahead=shown.ahead)
        for direction in search.DIRECTIONS[args.direction]
    ]
    if args.steps:
        data["steps"] = {schedule.direction: _steps(schedule) for schedule in schedules}
    if args.plot is not None:
        _plot(args.plot, problem, data, shown, schedules, on)
    if args.json:
        write_json(args.json, data)
    if args.json != "-":
        text = _text(problem, shown.tile, data, on)
        for schedule in schedules if args.steps else ():
            slots = data["steps"][schedule.direction]["validated_slots"]
            text += f"\n\n{schedule}\nvalidated; slots ever in use: {_counts(slots)}"
        print(text, flush=True)
    return 0


def _machine(args):
    """The machine that predictions are made for."""
    on = machine.load(args.machine or "default")
    if args.ranks_per_node is None:
        return on
    if args.ranks_per_node < 1:
        raise ArgumentError(f"ranks-per-node is {args.ranks_per_node}; it must be at least 1")
    return replace(on, ranks_per_node=args.ranks_per_node)


def _plot(path, problem, data, shown, schedules, on):
    """Draw the page of the shown tile."""
    work = block_pairs(problem.mask, *shown.layouts)
    load = Load(work, *(layout.lengths for layout in shown.layouts), shown.tile)
    title = (
        f"{_head(problem, data)}\ntile {shown.tile}, {shown.schedule} schedule, {shown.route} route, "
        f"{shown.layouts[0].kind} layout"
    )
    timelines = [simulate(schedule, problem, load, on) for schedule in schedules]
    style.save(page(problem, work, load, schedules, timelines, title, f"machine {on.name}"), path, "--plot")


# Figures


def _steps(schedule):
    """The JSON of a schedule."""
    data = asdict(schedule)
    tile = data.pop("tile")
    return {**data, "a": tile["a"], "b": tile["b"], "validated_slots": validate(schedule)}


def _saving(value, ring):
    """The share saved compared with Ring; None where Ring sends nothing."""
    return 1 - value / ring if ring else None


def _tile(problem, args, choice, ring):
    """The JSON of one tile.  ring: bytes that tile 1xN sends."""
    share = problem.kv_heads / problem.heads
    sent = (
        choice.sent[args.direction]
        if args.direction in choice.sent
        else {direction: sum(kinds.values()) for direction, kinds in choice.sent.items()}
    )
    return {
        "tile": str(choice.tile),
        "sent_bytes": {**sent, "total": choice.sent_bytes},
        "saving": _saving(choice.sent_bytes, ring),
        "saving_elements": _saving(
            *(travels.volume(tile, share, args.direction) for tile in (choice.tile, Tile(1, 1, args.ranks)))
        ),
        "memory_bytes": choice.nbytes,
        "balance": choice.balance,
        "seconds": choice.seconds,
        "waiting": choice.waiting,
        "schedule": choice.schedule,
        "route": choice.route,
        "ahead": choice.ahead,
        "layout": choice.layouts[0].kind,
    }


def _others(problem, args, ring):
    """Ulysses and USP: the bytes they send, or why they are not possible."""
    ranks, share = args.ranks, problem.kv_heads / problem.heads
    ring_volume = travels.volume(Tile(1, 1, ranks), share, args.direction)

    def method(name, group, nbytes):
        volume = travels.usp_volume(ranks, group, share, args.direction)
        return {
            "method": name,
            "group": group,
            "sent_bytes": nbytes,
            "saving": _saving(nbytes, ring),
            "saving_elements": _saving(volume, ring_volume),
        }

    methods, heads = [], f"{problem.kv_heads} KV head{'s' * (problem.kv_heads > 1)}"
    nbytes = travels.ulysses(problem, ranks, args.direction)
    if nbytes is None:
        methods.append({"method": "Ulysses", "not_possible": f"{ranks} ranks do not divide {heads}"})
    else:
        methods.append(method("Ulysses", ranks, nbytes))
    group, nbytes = travels.best_usp(problem, ranks, args.direction)
    if group > 1:
        methods.append(method(f"USP {group}x{ranks // group}", group, nbytes))
    elif ranks > 1:
        methods.append({"method": "USP", "not_possible": f"no group of more than 1 of {ranks} ranks divides {heads}"})
    return methods


# Text

LEGEND = """\
sent/rank  bytes that a rank sends, mean over ranks: {what}
saved      share of sent/rank saved compared with Ring (tile 1x{ranks})
elements   the same, counted in elements without a mask, as Mesh-Attention (arXiv 2512.20968) counts:
           {row}(a-1) + {column}(b-1){share} chunks
memory     q, k, v, results and buffers of a rank, without the back end's scratch
balance    attended pairs of the busiest rank / mean over ranks
time       predicted, by simulating the schedule on the machine {machine}:
           {facts}
           assumes {assumes}
waits      the share of that time that a rank waits, mean over ranks
auto       the shortest time; among times within {same:.0%}, the least sent/rank{limit}"""

WHAT = {
    "forward": "Q, K and V in {dtype}, partials O in {partial}",
    "backward": "Q is q and dout in {dtype}, lse and delta in\n"
    "           {partial}; K and V in {dtype}; partials dQ and dKV in {partial}",
    "both": "forward and backward",
}


def _percent(share):
    return "-" if share is None else percent(share)


def _head(p, data):
    """The ranks and the problem, in a line."""
    ranks = data["ranks"]
    return (
        f"{ranks} rank{'s' * (ranks > 1)}, {p}, {data['direction']}, {data['route']} route; chunks of "
        f"{-(-p.seqlen // ranks)} tokens"
    )


def _text(problem, tile, data, on):
    """Table, legend and picture as text."""
    p, ranks = problem, data["ranks"]
    row, column = travels.ELEMENTS[data["direction"]]
    sent = WHAT[data["direction"]].format(dtype=p.dtype, partial=p.wire_dtype)
    legend = LEGEND.format(
        what=sent,
        ranks=ranks,
        row=row,
        column=column,
        same=search.SAME_TIME,
        share=f" x {p.kv_heads}/{p.heads}" if p.kv_heads != p.heads else "",
        machine=on.name,
        facts=on,
        assumes=on.assumes,
        limit=_limit(data),
    )
    kinds = [kind for kind in data["tiles"][0]["sent_bytes"] if kind != "total"]
    header = (
        "tile",
        "sent/rank",
        *kinds,
        "saved",
        "elements",
        "memory/rank",
        "balance",
        "time",
        "waits",
        "schedule",
        "layout",
        "",
    )
    parts = [f"{_head(p, data)}\n", table(_rows(data, kinds), header), *_impossible(data["others"]), "", legend]
    if ranks > 1:
        parts += ["", picture(tile)]
    return "\n".join(parts)


def _rows(data, kinds):
    names = {f"1x{data['ranks']}": "Ring", f"{data['ranks']}x1": "Q-ring"}
    for row in data["tiles"]:
        tile, sent = row["tile"], row["sent_bytes"]
        marks = [mark for mark, marked in (("auto", data["auto"]), ("--tile", data["tile"])) if marked == tile]
        if data["auto"] == data["tile"]:
            marks = marks[:1]
        yield (
            f"{tile} {names.get(tile, '')}",
            size(sent["total"]),
            *(size(sent[kind]) for kind in kinds),
            _percent(row["saving"]),
            _percent(row["saving_elements"]),
            size(row["memory_bytes"]),
            f"{row['balance']:.2f}",
            duration(row["seconds"]),
            percent(row["waiting"]),
            row["schedule"] + (f", {row['route']} route" if passed_on(row["route"]) else ""),
            row["layout"],
            f"<- {', '.join(marks)}" if marks else "",
        )
    for row in data["others"]:
        if "sent_bytes" in row:
            yield (
                row["method"],
                size(row["sent_bytes"]),
                *("" for _ in kinds),
                _percent(row["saving"]),
                _percent(row["saving_elements"]),
                *[""] * 7,
            )


def _limit(data):
    """What a memory limit costs, for the legend."""
    if data["max_memory"] is None:
        return ""
    return (
        f"; only tiles within {size(data['max_memory'])} a rank, which takes "
        f"{data['memory_cost']:.3g} times as long as without that limit"
    )


def _impossible(others):
    return [f"{row['method']}: not possible, {row['not_possible']}" for row in others if "not_possible" in row]


def _counts(slots):
    return ", ".join(f"{count} {kind}" for kind, count in slots.items())
