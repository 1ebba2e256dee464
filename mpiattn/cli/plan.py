"""List the tiles of n ranks with their traffic, memory, balance and predicted time; starts no MPI.

A tile AxB gives every rank A query chunks x B KV chunks: a mesh of B rows x A columns, A*B = ranks. 1xN is
Ring-Attention. HxAxB splits batch and heads over H planes, each of which is a mesh AxB, H*A*B = ranks. With bands every
rank computes pieces of the scores, as much as any other, of any KV heads, queries and keys. Sizes are in tokens, heads
and elements; output is in binary units (1 KiB = 1024 B) and seconds.
"""

from dataclasses import asdict, replace

from ..console import options
from ..console.json_file import write_json
from ..console.table import duration, written
from ..errors import ArgumentError
from ..model import machine, planes, search
from ..model.piece_options import check_pieces
from ..model.prediction import Choice
from ..model.simulate import nodes_of, simulate
from ..model.space import DIRECTIONS, SearchSpace, allowed_schedules, layouts
from ..model.workload import Load, Work
from ..plan.decision import Decision
from ..plots import pieces, style
from ..plots.page import page
from ..problem.documents import expected_cuts
from ..problem.grid import MOST_RANKS
from ..problem.problem import Problem
from ..schedule import travels
from ..schedule.least_sent import least_sent
from ..schedule.regroup import method_of, split, split_of
from ..schedule.tile import MESH, Tile, parse_tile
from ..schedule.validate import validate
from ..system.launch_variables import launch_rank
from ..system.values import is_whole, whole_number
from ..system.words import number
from ..version import __version__
from . import mesh_picture, pieces_text
from .documents import read_file
from .plan_text import as_text, counts, head

EXAMPLES = """\
examples:
  mpiattn plan --ranks 256 --seqlen 1048576 --heads 32 --head-dim 128 --causal --machine h100
  mpiattn plan --ranks 64 --seqlen 262144 --heads 32 --kv-heads 8 --head-dim 128 --dtype bfloat16 --direction both
  mpiattn plan --ranks 6 --seqlen 6000 --heads 8 --head-dim 64 --tile 3x2 --schedule greedy --steps
  mpiattn plan --ranks 16 --grid 721x1440 --dims 4x4 --heads 8 --head-dim 64
  mpiattn plan --ranks 256 --seqlen 1048576 --heads 32 --head-dim 128 --json - | python -m json.tool
"""

# Up to so many ranks, the time of every tile is predicted; with more, of those that may be the best, and of --tile.
EVERY_TILE = 256
SHORTEST = 1e-3  # share of a predicted time that a picture names


def add_arguments(parser):
    """Declare the arguments of `mpiattn plan`."""
    parser.epilog = EXAMPLES
    parser.add_argument("--ranks", type=int, required=True, help="ranks to plan for; no launch is needed")
    parser.add_argument("--seqlen", type=int, help="query tokens of the whole sequence (default: those of --grid)")
    parser.add_argument("--heads", type=int, required=True, help="query heads")
    parser.add_argument("--head-dim", type=int, required=True, help="elements of a query and of a key, per head")
    parser.add_argument("--kv-heads", type=int, help="key-value heads; divides --heads (default: --heads)")
    options.add(parser, *options.VALUES)
    parser.add_argument("--seqlen-k", type=int, help="key-value tokens (default: --seqlen)")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default: %(default)s)")
    options.add(parser, *options.MASKS, "mask")
    parser.add_argument(
        "--documents",
        metavar="FILE",
        help="documents like those that calls will have, packed in the sequence: a .npy or text file of the positions "
        "where they begin, and the end of the last (cu_seqlens)",
    )
    options.add_dtype(parser, "of q, k, v and the result")
    options.add(parser, "wire-dtype")
    options.add_direction(parser, "which passes to plan for")
    options.add(parser, "layout", "grid", "dims", "mesh-layout", "route", "schedule", "tile", "max-memory", "machine")
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="ranks (GPUs) of a node, consecutive ones (default: the machine's)",
    )
    parser.add_argument(
        "--steps",
        action="store_true",
        help="print the schedule of --tile step by step, and how many buffer slots it uses; with --tile bands the "
        "pieces of every rank",
    )
    options.add(parser, "plot", "json")


def run(args):
    """`mpiattn plan`."""
    if launch_rank():
        return 0  # under mpiexec, only rank 0 prints
    if not is_whole(args.ranks, 1, MOST_RANKS):
        raise ArgumentError(f"ranks is {args.ranks}; it must be at least 1 and at most {MOST_RANKS}")
    if args.plot is not None:
        style.check("--plot", args.plot)
    problem = Problem(
        seqlen=options.tokens_of(args),
        heads=args.heads,
        head_dim=args.head_dim,
        batch=args.batch,
        kv_heads=args.kv_heads,
        value_dim=args.value_dim,
        shared_kv=args.shared_kv,
        seqlen_k=args.seqlen_k,
        dtype=args.dtype,
        causal=args.causal,
        prefix=args.prefix,
        causal_block=args.causal_block,
        window=args.window,
        mask=options.mask_of(args),
        wire_dtype=args.wire_dtype,
    )
    given = None if args.documents is None else read_file("--documents", args.documents)
    layout = options.layout_of(args, args.ranks, problem.seqlen, problem.seqlen_k)
    cuts = expected_cuts(problem, given, "--documents")
    mask = problem.mask_of(cuts)
    asked = parse_tile(args.tile, args.ranks)
    of_meshes = options.given(args, "schedule", "route", "mesh-layout")
    check_pieces(asked, **of_meshes)
    on = _machine(args)
    meshes = args.tile.strip() == MESH
    space = SearchSpace(
        problem,
        args.ranks,
        on,
        route=args.route,
        schedules=allowed_schedules(args.schedule),
        layout_pairs=layouts(layout, problem, args.ranks),
        fixed=args.grid is not None,
        mesh_layout=args.mesh_layout,
        direction=args.direction,
        max_memory=args.max_memory,
        mask=mask,
        meshes=meshes,
    )
    planes.check_heads(asked, problem)
    planes.check_mesh_layout(args.mesh_layout, space.layout_pairs, asked)
    choices, bounds, fastest = search.within_memory(space, every="tile" if args.ranks <= EVERY_TILE else None)
    auto, best = choices[0], bounds()
    for more in _besides(space, choices, asked):
        choices += search.survey(more, every=None)[0]
    mesh = next(choice.tile for choice in choices if not choice.tile.divided)
    best |= {choice.tile: choice for choice in reversed(choices)}  # best first
    ring = best[Tile(1, 1, args.ranks)].sent_bytes
    shown = best[asked or auto.tile]
    least = least_sent(problem, args.ranks, mask.pairs(), args.direction)
    rows = [_tile(problem, args, best[tile], ring, least) for tile in _listed(best, auto.tile, mesh, shown.tile)]
    data = {
        "mpiattn": __version__,
        "ranks": args.ranks,
        "problem": problem.as_dict(),
        "direction": args.direction,
        "route": args.route,
        "schedule": args.schedule,
        "layout": args.layout if args.grid is None else layout.kind,
        "documents": None if cuts is None else len(cuts) - 1,
        "padding": 0 if cuts is None else problem.seqlen - (cuts[-1] - cuts[0]),
        "machine": on.as_dict(),
        "max_memory": args.max_memory,
        "memory_cost": search.times_as_long(auto.seconds, fastest),
        "auto": str(auto.tile),
        "tile": str(shown.tile),
        "least_sent_bytes": least,
        "tiles": rows,
        "others": _others(problem, args, mask, ring, least, layout) if args.ranks > 1 else [],
    }
    nodes = nodes_of(args.ranks, on).tolist()
    decision = Decision(
        problem, shown, on, None, nodes, fastest, overlap=True, mask=mask, longest_seconds=shown.seconds
    )
    drawn = (_Pieces if shown.tile.divided else _Mesh)(decision, DIRECTIONS[args.direction])
    if args.steps:
        data["steps"] = drawn.steps()
    if args.plot is not None:
        style.save(drawn.page(data), args.plot, "--plot")
    if args.json:
        write_json(args.json, data)
    if args.json != "-":
        text = as_text(problem, drawn.picture(), data, on)
        if args.steps:
            text += "".join(f"\n\n{listed}" for listed in drawn.listed())
        if files := written(args.plot, args.json):
            text += f"\n\nwritten  {files}"
        print(text, flush=True)
    return 0


def _machine(args):
    """The machine that predictions are made for."""
    on = machine.load(args.machine or "default")
    if args.ranks_per_node is None:
        return on
    whole_number("ranks-per-node", args.ranks_per_node, 1)
    return replace(on, ranks_per_node=args.ranks_per_node)


def _besides(space, choices, asked):
    """Spaces whose best plans are shown too: the meshes, and the tile that is asked for."""
    if all(choice.tile.divided for choice in choices):
        yield replace(space, meshes=True)
    if asked is not None and all(choice.tile != asked for choice in choices):
        yield replace(space, tiles=[asked])


# What is shown of the chosen tile


class _Mesh:
    """The schedules of a mesh."""

    def __init__(self, decision, passes):
        self._decision = decision
        self._schedules = [decision.schedule(direction) for direction in passes]

    def picture(self):
        """The mesh in characters."""
        return mesh_picture.picture(self._decision.choice.tile) if self._decision.choice.tile.ranks > 1 else ""

    def steps(self):
        """The JSON of the schedules."""
        return {schedule.direction: _steps(schedule) for schedule in self._schedules}

    def listed(self):
        """The steps of every schedule as text."""
        return [
            f"{schedule}\nvalidated; slots ever in use: {counts(validate(schedule))}" for schedule in self._schedules
        ]

    def page(self, data):
        """A figure of the plan.  data: the JSON of the command."""
        decision, plane = self._decision, self._decision.plane
        work = Work(decision.mask, *decision.choice.mesh_layouts)
        load = Load(work, plane.choice.tile)
        timelines = [
            simulate(schedule, plane.problem, load, plane.machine, plane.nodes) for schedule in self._schedules
        ]
        title = _title(decision, data, timelines)
        return page(plane.problem, work.pairs, load, self._schedules, timelines, title, data)


class _Pieces:
    """The pieces of a division of the scores."""

    def __init__(self, decision, passes):
        self._decision = decision
        self._divisions = {direction: decision.division(direction) for direction in passes}

    def picture(self):
        """The pieces of the first pass in characters."""
        direction, division = next(iter(self._divisions.items()))
        return pieces_text.picture(division, self._decision.problem, self._decision.mask, direction)

    def steps(self):
        """The JSON of the pieces."""
        p = self._decision.problem
        return {direction: pieces_text.as_data(of, p, direction) for direction, of in self._divisions.items()}

    def listed(self):
        """The pieces of every pass as text."""
        p = self._decision.problem
        return [pieces_text.listed(division, p, direction) for direction, division in self._divisions.items()]

    def page(self, data):
        """A figure of the plan.  data: the JSON of the command."""
        decision = self._decision
        timelines = [decision.predicted(direction) for direction in self._divisions]
        title, division = _title(decision, data, timelines), next(iter(self._divisions.values()))
        return pieces.page(decision.problem, decision.mask, division, timelines, title, data)


def _title(decision, data, timelines):
    """The plan and its predicted time in words."""
    shown = decision.choice
    around = shown.seconds - sum(predicted.seconds for predicted in timelines)
    parts = [(predicted.direction, predicted.seconds) for predicted in timelines]
    if around > SHORTEST * shown.seconds:
        parts.append((("regrouping" if decision.regrouping else "copying") + " before and after", around))
    title = (
        f"{head(decision.problem, data)}\ntile {shown.tile}, {shown.schedule} schedule, {shown.route} route, "
        f"{shown.mesh_layouts[0].kind} layout: {duration(shown.seconds)} predicted for machine {decision.machine.name}"
    )
    if len(parts) > 1:
        title += f" ({', '.join(f'{name} {duration(seconds)}' for name, seconds in parts)})"
    return title


def _listed(best, *named):
    """The tiles that are listed: all of one plane, for every number of planes the best and the rings, and `named`.

    best: {tile: `Choice` or `LowerBound`}.
    """
    flat = [tile for tile in best if tile.h == 1]
    listed = [*flat, *named]
    for h in sorted({tile.h for tile in best} - {1}):
        of_h = [tile for tile in best if tile.h == h]
        listed += [min(of_h, key=lambda tile: (best[tile].seconds, best[tile].sent_bytes)), Tile(h, 1, of_h[0].chunks)]
    return sorted(set(listed), key=lambda tile: (tile.divided, tile.h, tile.a, str(tile)))


# Figures


def _steps(schedule):
    """The JSON of a schedule."""
    data = asdict(schedule)
    tile = data.pop("tile")
    return {**data, "a": tile["a"], "b": tile["b"], "validated_slots": validate(schedule)}


def _saving(value, ring):
    """The share saved compared with Ring; None where Ring sends nothing."""
    return 1 - value / ring if ring else None


def _times_least(value, least):
    """How many times the least possible; None where that is nothing."""
    return value / least if least else None


def _tile(problem, args, choice, ring, least):
    """The JSON of one tile.

    ring: bytes that tile 1xN sends.  least: those of `least_sent`.  What a `LowerBound` does not know is None.
    """
    known, saving_elements = isinstance(choice, Choice), None
    if not choice.tile.divided:
        saving_elements = _saving(
            *(
                travels.volume(tile, travels.kv_share_of(problem, split_of(problem, tile.h)[1]), args.direction)
                for tile in (choice.tile, Tile(1, 1, args.ranks))
            )
        )
    sent = (
        choice.sent[args.direction]
        if args.direction in choice.sent
        else {direction: sum(kinds.values()) for direction, kinds in choice.sent.items()}
    )
    return {
        "tile": str(choice.tile),
        "method": None if choice.tile.divided else method_of(problem, choice.tile),
        "sent_bytes": {**sent, "total": choice.sent_bytes},
        "saving": _saving(choice.sent_bytes, ring),
        "saving_elements": saving_elements,
        "times_least": _times_least(choice.sent_bytes, least),
        "memory_bytes": choice.nbytes if known else None,
        "balance": choice.balance if known else None,
        "seconds": choice.seconds if known else None,
        "least_seconds": choice.seconds,
        "waiting": choice.waiting if known else None,
        "schedule": choice.schedule if known else None,
        "route": choice.route if known else None,
        "ahead": choice.ahead if known else None,
        "layout": choice.layouts[0].kind,
        "mesh_layout": choice.mesh_layouts[0].kind if known else None,
    }


def _others(problem, args, mask, ring, least, layout):
    """Ulysses, USP and, if queries see keys around them, a halo exchange: the bytes they send, or why not possible.

    Ulysses and USP are left out where a tile is that method.  The formula of USP knows no mask, and its name says so.
    """
    ranks, share = args.ranks, travels.kv_share_of(problem)
    ring_volume = travels.volume(Tile(1, 1, ranks), share, args.direction)

    def method(name, group, nbytes):
        volume = group and travels.usp_volume(ranks, group, share, args.direction)
        return {
            "method": name,
            "group": group,
            "sent_bytes": nbytes,
            "saving": _saving(nbytes, ring),
            "saving_elements": group and _saving(volume, ring_volume),
            "times_least": _times_least(nbytes, least),
        }

    def is_tile(group):
        return split(group, problem.heads, problem.kv_heads, problem.batch) and method_of(
            problem, Tile(group, 1, ranks // group)
        )

    methods, heads = [], f"{number(problem.kv_heads, 'KV head')}"
    nbytes = travels.ulysses(problem, ranks, args.direction)
    if nbytes is None:
        why = f"{heads} cannot be divided among {ranks} ranks"
        if split(ranks, problem.heads, problem.kv_heads):
            why += f"; {ranks}x1x1 has each KV head on {ranks // problem.kv_heads} ranks"
        methods.append({"method": "Ulysses", "not_possible": why})
    elif not is_tile(ranks):
        methods.append(method("Ulysses", ranks, nbytes))
    group, nbytes = travels.best_usp(problem, ranks, args.direction)
    if group == 1:
        why = f"{heads} cannot be divided among a group of {ranks} ranks, of any size above 1"
        methods.append({"method": "USP", "not_possible": why})
    elif group < ranks and not is_tile(group):
        name = f"USP {group}x{ranks // group}" + ("" if mask.full else ", no mask")
        methods.append(method(name, group, nbytes))
    nbytes = travels.halo(problem, ranks, args.direction, None if isinstance(layout, str) else layout)
    return methods if nbytes is None else [*methods, method("halo exchange", None, nbytes)]
