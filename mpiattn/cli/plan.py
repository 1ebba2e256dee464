"""Every tile of n ranks with its traffic, memory and predicted time, for the forward pass; starts no MPI.

A tile AxB gives every rank A query chunks x B KV chunks: a mesh of B rows x A columns, A*B = ranks. 1xN is
Ring-Attention. Sizes are in tokens, heads and elements; output is in binary units (1 KiB = 1024 B) and seconds.
"""

from dataclasses import asdict

from .. import __version__, cost, traffic
from ..errors import ArgumentError
from ..problem import ITEMSIZE, Problem
from ..tiling import parse_tile, tiles
from ..validate import validate
from . import launch_rank, options
from .jsonfile import write_json
from .table import duration, percent, size, table

EXAMPLES = """\
examples:
  mpiattn plan --ranks 256 --seqlen 1048576 --heads 32 --head-dim 128 --causal
  mpiattn plan --ranks 64 --seqlen 262144 --heads 32 --kv-heads 8 --head-dim 128 --dtype float16
  mpiattn plan --ranks 6 --seqlen 6000 --heads 8 --head-dim 64 --tile 3x2 --schedule greedy --steps
  mpiattn plan --ranks 256 --seqlen 1048576 --heads 32 --head-dim 128 --json - | python -m json.tool
"""

MACHINE = cost.Machine()


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
    parser.add_argument("--causal", action="store_true", help="a query sees the keys up to its own position")
    parser.add_argument("--dtype", default="float32", choices=tuple(ITEMSIZE),
                        help="of q, k, v and the result; partials are float32, or float64 (default: %(default)s)")
    options.add_route(parser)
    options.add_schedule(parser)
    options.add_tile(parser)
    parser.add_argument("--steps", action="store_true",
                        help="print the schedule of --tile step by step, and the buffer slots it was seen to need")
    options.add_json(parser)


def run(args):
    """`mpiattn plan`."""
    if launch_rank():
        return 0                                # started by mpiexec all the same: one rank says it all
    if args.ranks < 1:
        raise ArgumentError(f"ranks is {args.ranks}; it must be at least 1")
    problem = Problem(seqlen=args.seqlen, heads=args.heads, head_dim=args.head_dim, batch=args.batch,
                      kv_heads=args.kv_heads, value_dim=args.value_dim, seqlen_k=args.seqlen_k, dtype=args.dtype,
                      causal=args.causal)
    asked = parse_tile(args.tile, args.ranks)
    kinds = cost.SCHEDULES if args.schedule == "auto" else (args.schedule,)
    choices = cost.evaluate(problem, args.ranks, args.route, kinds)
    auto = choices[0]
    best = {}
    for choice in choices:                      # best first
        best.setdefault((choice.a, choice.b), choice)
    rows = [_tile(problem, args.ranks, best[shape]) for shape in tiles(args.ranks)]
    shown = best[asked or (auto.a, auto.b)]
    data = {"mpiattn": __version__, "ranks": args.ranks, "problem": asdict(problem), "route": args.route,
            "schedule": args.schedule, "machine": asdict(MACHINE), "auto": f"{auto.a}x{auto.b}",
            "tile": f"{shown.a}x{shown.b}", "tiles": rows, "others": _others(problem, args.ranks)}
    if args.steps:
        schedule = cost.build(shown.schedule, shown.a, shown.b, args.route, problem)
        data["steps"] = {**asdict(schedule), "validated_slots": validate(schedule)}
    if args.json:
        write_json(args.json, data)
    if args.json != "-":
        text = _text(problem, data)
        if args.steps:
            text += f"\n\n{schedule}\nvalidated; slots ever in use: {_counts(data['steps']['validated_slots'])}"
        print(text, flush=True)
    return 0


# Figures

def _saving(value, ring):
    """The share that is saved over Ring; None where Ring sends nothing."""
    return 1 - value / ring if ring else None


def _tile(problem, ranks, choice):
    """What is known of one tile."""
    a, b, share = choice.a, choice.b, problem.kv_heads / problem.heads
    q_tokens, k_tokens = problem.seqlen / ranks, problem.seqlen_k / ranks
    total = traffic.mean_sent(problem, ranks, a, b)
    return {"tile": f"{a}x{b}",
            "sent_bytes": {"Q": (a - 1) * q_tokens * problem.q_bytes, "KV": (b - 1) * k_tokens * problem.kv_bytes,
                           "O": (a - 1) * q_tokens * problem.partial_bytes, "total": total},
            "saving": _saving(total, traffic.mean_sent(problem, ranks, 1, ranks)),
            "saving_elements": _saving(traffic.volume(ranks, a, b, share), traffic.volume(ranks, 1, ranks, share)),
            "memory_bytes": choice.nbytes, "seconds": choice.seconds, "schedule": choice.schedule}


def _others(problem, ranks):
    """Ulysses and USP: what they send, or why they cannot run."""
    ring, share = traffic.mean_sent(problem, ranks, 1, ranks), problem.kv_heads / problem.heads
    ring_volume = traffic.volume(ranks, 1, ranks, share)

    def method(name, group, nbytes):
        return {"method": name, "group": group, "sent_bytes": nbytes, "saving": _saving(nbytes, ring),
                "saving_elements": _saving(traffic.usp_volume(ranks, group, share), ring_volume)}
    found, heads = [], f"{problem.kv_heads} KV head{'s' * (problem.kv_heads > 1)}"
    nbytes = traffic.ulysses(problem, ranks)
    if nbytes is None:
        found.append({"method": "Ulysses", "not_possible": f"{ranks} ranks do not divide {heads}"})
    else:
        found.append(method("Ulysses", ranks, nbytes))
    group, nbytes = traffic.best_usp(problem, ranks)
    if group > 1:
        found.append(method(f"USP {group}x{ranks // group}", group, nbytes))
    elif ranks > 1:
        found.append({"method": "USP", "not_possible": f"no group of more than 1 of {ranks} ranks divides {heads}"})
    return found


# Text

HEADER = ("tile", "sent/rank", "Q", "KV", "O", "saved", "elements", "memory/rank", "time", "schedule", "")

LEGEND = """\
sent/rank  bytes that a rank sends in a forward pass, mean over ranks: Q, K and V in {dtype}, partials O in {partial}
saved      of sent/rank, over Ring (tile 1x{ranks})
elements   the same counted in elements, as Mesh-Attention (arXiv 2512.20968) does: 2(a-1) + 2(b-1){share} chunks
memory     q, k, v, result and buffers of a rank, without the back end's scratch
time       predicted: the sum over steps of the longer of transfers and blocks, for ranks that do {flops:g} Gflop/s
           ({double:g} in float64), send {bandwidth:g} GB/s while receiving as much, and need {latency:g} us a message
           and {launch:g} us a block: one core and its share of a 100 Gb/s link. It is for comparing tiles, no promise
auto       the least time; where times agree to three digits, the least sent/rank"""


def _percent(share):
    return "-" if share is None else percent(share)


def _text(problem, data):
    """Table, legend and picture for people."""
    p, ranks = problem, data["ranks"]
    shape = f"{p.seqlen} x {p.seqlen_k} tokens, " if p.seqlen_k != p.seqlen else f"{p.seqlen} tokens, "
    heads = f"{p.heads} heads" + (f" ({p.kv_heads} KV)" if p.kv_heads != p.heads else "")
    dims = f"{p.head_dim}" + (f" ({p.value_dim} of values)" if p.value_dim != p.head_dim else "")
    head = (f"{ranks} rank{'s' * (ranks > 1)}, batch {p.batch}, {shape}{heads} x {dims}, {p.dtype}, "
            f"{'causal' if p.causal else 'full'}, {data['route']} route; chunks of "
            f"{cost.longest(p.seqlen, ranks)} tokens\n")
    legend = LEGEND.format(dtype=p.dtype, partial=p.partial_dtype, ranks=ranks,
                           share=f" x {p.kv_heads}/{p.heads}" if p.kv_heads != p.heads else "",
                           flops=MACHINE.flops / 1e9, double=MACHINE.flops / 2e9, bandwidth=MACHINE.bandwidth / 1e9,
                           latency=MACHINE.latency * 1e6, launch=MACHINE.launch * 1e6)
    a, b = map(int, data["tile"].split("x"))
    parts = [head, table(_rows(data), HEADER), *_impossible(data["others"]), "", legend]
    if ranks > 1:
        parts += ["", picture(a, b)]
    return "\n".join(parts)


def _rows(data):
    names = {f"1x{data['ranks']}": "Ring", f"{data['ranks']}x1": "Q-ring"}
    for row in data["tiles"]:
        tile, sent = row["tile"], row["sent_bytes"]
        marks = [mark for mark, marked in (("auto", data["auto"]), ("--tile", data["tile"])) if marked == tile]
        if data["auto"] == data["tile"]:
            marks = marks[:1]
        yield (f"{tile} {names.get(tile, '')}", size(sent["total"]), *(size(sent[kind]) for kind in ("Q", "KV", "O")),
               _percent(row["saving"]), _percent(row["saving_elements"]), size(row["memory_bytes"]),
               duration(row["seconds"]), row["schedule"], f"<- {', '.join(marks)}" if marks else "")
    for row in data["others"]:
        if "sent_bytes" in row:
            yield (row["method"], size(row["sent_bytes"]), "", "", "", _percent(row["saving"]),
                   _percent(row["saving_elements"]), "", "", "", "")


def _impossible(others):
    return [f"{row['method']}: not possible, {row['not_possible']}" for row in others if "not_possible" in row]


def _counts(slots):
    return ", ".join(f"{count} {kind}" for kind, count in slots.items())


MOST_COLUMNS, MOST_ROWS = 8, 6          # of the picture; larger meshes are abbreviated


def _some(count, most):
    """Indices to show of `count`, None for those left out."""
    return list(range(count)) if count <= most else [*range(most - 2), None, count - 1]


def picture(a, b):
    """The mesh of a tile, ranks in rows and columns, and what its first rank computes."""
    columns, width = _some(a, MOST_COLUMNS), len(str(a * b - 1)) + 4

    def line(label, cells):
        return f"  {label:<{len(str(b - 1)) + 4}}|" + "".join(f"{cell:>{width}}" for cell in cells)
    lines = [f"mesh of tile {a}x{b}: {b} row{'s' * (b > 1)} x {a} column{'s' * (a > 1)}, rank = {a} * row + column",
             line("", ["..." if c is None else f"c={c}" for c in columns])]
    for r in _some(b, MOST_ROWS):
        lines.append(line("..." if r is None else f"r={r}",
                          ["..." if r is None or c is None else r * a + c for c in columns]))
    groups = [f"a row ({a} ranks) shares Q and reduces O"] if a > 1 else []
    groups += [f"a column ({b} ranks) shares K and V"] if b > 1 else []
    lines += [f"  {'; '.join(groups)}",
              f"  rank 0 computes the query chunks {_chunks(a, 1)} x the KV chunks {_chunks(b, a)}"]
    return "\n".join(lines)


def _chunks(count, stride):
    return " ".join("..." if i is None else str(i * stride) for i in _some(count, MOST_COLUMNS))
