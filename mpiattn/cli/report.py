"""The report of `mpiattn run`, as JSON and as a table.

Each rank contributes a dict: its tokens, its pairs, what it sent and waited in each pass, and its memory.
"""

from ..console.table import duration, facts, percent, written
from ..model.machine import PRODUCTS
from ..model.workload import balance
from ..system.words import number, size, span

AS_MUCH = 0.01  # share by which bytes may differ and still are called as many
MASKS = ("prefix", "causal_block", "window", "mask", "softcap", "documents", "documents_k")
BIASES = ("bias", "key_bias", "dropout")


def _flops(problem, ranks):
    """Floating-point operations of a forward pass: both matrix products, attended pairs only."""
    return problem.flops_per_pair // problem.batch * sum(rank["pairs"] for rank in ranks)


def _speeds(problem, seconds, ranks):
    """GFLOP/s of every pass."""
    flops = _flops(problem, ranks)
    return {name: products * flops / seconds[name] / 1e9 for name, products in PRODUCTS.items() if name in seconds}


def _balance(ranks):
    return balance([rank["pairs"] for rank in ranks])


def count_text(odd):
    """How many elements are not finite, by dataset, as text."""
    return ", ".join(f"{count} in {name}" for name, count in odd.items() if count)


def as_json(args, plan, chosen, seconds, ranks, reports, odd):
    """The whole report as a dict for JSON.  odd: number of elements that are NaN or infinite, by dataset."""
    problem = plan.problem
    return {
        "input": args.input,
        "output": args.output,
        **chosen,
        "problem": problem.as_dict(),
        "flops": _flops(problem, ranks),
        "gflops_per_second": _speeds(problem, seconds, ranks),
        "balance": _balance(ranks),
        "seconds": seconds,
        "nonfinite": odd,
        **{name: {**report._asdict(), "passed": report.passed} for name, report in reports.items()},
        "per_rank": ranks,
    }


def _pairs(ranks):
    """The pairs of the ranks, and how much more than the mean the busiest has, if that is more."""
    text = span([rank["pairs"] for rank in ranks], lambda pairs: f"{pairs:.15g}")
    more = _balance(ranks) - 1
    if more < AS_MUCH / 10:
        return text
    return f"{text}; the most are {_more_than(more)} the mean"


def _more_than(more):
    """A figure compared with another by what it has more: "1.3 % more than", "2 times"."""
    return f"{percent(more)} more than" if more < 1 else f"{1 + more:.3g} times"


def _times(seconds, phases):
    return ", ".join(f"{duration(seconds[phase])} {phase}" for phase in phases)


def _waiting(name, ranks, seconds, divided):
    waits = [rank[name]["wait_seconds"] / seconds[name] for rank in ranks]
    mean_and_most = f"{percent(sum(waits) / len(waits))} of {name} (most: {percent(max(waits))}"
    if divided:  # every rank has steps of its own
        return f"{mean_and_most})"
    steps = [[step["ended"] - step["computed"] for step in rank[name]["steps"]] for rank in ranks]
    by_step = [sum(step) / len(ranks) / seconds[name] for step in zip(*steps)]
    worst = max(range(len(by_step)), key=by_step.__getitem__)
    return f"{mean_and_most}; in step {worst + 1} of {len(by_step)}: {percent(by_step[worst])})"


def _sent(name, ranks):
    sent, formula, ring = (
        sum(rank[name][figure] for rank in ranks) / len(ranks)
        for figure in ("sent_bytes", "formula_bytes", "ring_bytes")
    )
    equal = all(rank[name]["sent_bytes"] == rank[name]["formula_bytes"] for rank in ranks)
    return (
        f"{size(sent)} {name}; formula: {size(formula)}, {'equal on every rank' if equal else 'DIFFERENT'}; "
        f"Ring: {size(ring)}{_beside(sent / ring) if ring else ''}"
    )


def _beside(ratio):
    """What is sent, over what Ring would send, in words."""
    if abs(ratio - 1) < AS_MUCH:
        return ", about as much"
    return f", {percent(1 - ratio)} saved" if ratio < 1 else f", {ratio:.3g} times as much"


def problem_text(p, chosen):
    """The problem and its masks in words."""
    masks = ["causal"] * p.causal + [f"{name} {chosen[name]}" for name in MASKS if name in chosen]
    biases = ["alibi"] * ("alibi" in chosen) + [f"{name} {chosen[name]}" for name in BIASES if name in chosen]
    return (
        f"q ({p.batch}, {p.seqlen}, {p.heads}, {p.head_dim}), k ({p.batch}, {p.seqlen_k}, {p.kv_heads}, "
        f"{p.head_dim}), {p.dtype}; {'; '.join((masks or ['no mask']) + biases)}"
    )


def _layout(chosen):
    inside = "" if chosen["mesh_layout"] == chosen["layout"] else f", {chosen['mesh_layout']} on the mesh"
    blocks = f" ({chosen['grid']} in {chosen['dims']} blocks)" if "grid" in chosen else ""
    return f"{chosen['layout']} layout{blocks}{inside}"


def _empty(p, chosen, ranks):
    """Rows of the table that count padding, and other tokens that see no key."""
    padding, padding_k = chosen.get("padding", 0), chosen.get("padding_k", 0)
    tokens = number(p.batch * p.seqlen, "token")
    rows, of_queries = [], f"{padding} of {tokens}"
    if padding_k and (padding, p.seqlen) != (padding_k, p.seqlen_k):
        rows.append(("padding", f"{of_queries}, {padding_k} of {number(p.batch * p.seqlen_k, 'key')}; out 0, lse -inf"))
    elif padding:
        rows.append(("padding", f"{of_queries}; out 0, lse -inf"))
    others = sum(rank["empty"] for rank in ranks) - padding
    if others:
        rows.append(("no keys", f"{others} of {tokens} without a visible key; out 0, lse -inf"))
    return rows


def _division(tile, ranks):
    """The row of the table about what ranks compute.  ranks: they and their hosts in words."""
    if tile.divided:
        return "pieces", f"each rank computes pieces of the scores, of any KV heads (tile {tile}): {ranks}"
    planes = f"{tile.h} planes of " if tile.h > 1 else ""
    mesh = f"{number(tile.a, 'column')} x {number(tile.b, 'row')}"
    return "mesh", f"{planes}{mesh} (tile {tile}): {ranks}"


def as_text(args, plan, chosen, seconds, ranks, reports, odd):
    """The report as a table."""
    p, tile = plan.problem, plan.tile
    hosts = len({rank["host"] for rank in ranks})
    passes = [name for name in PRODUCTS if name in seconds]
    rows = [
        ("problem", problem_text(p, chosen)),
        ("unpacked", chosen.get("unpacked")),
        _division(tile, f"{number(len(ranks), 'rank')} on {number(hosts, 'host')}"),
        ("schedule", f"{chosen['schedule']}, {chosen['route']} route, {_layout(chosen)}, {chosen['backend']} back end"),
        ("transport", plan.transport),
        ("tokens per rank", span([rank["tokens"] for rank in ranks])),
        ("pairs per rank", _pairs(ranks)),
        ("time", f"{_times(seconds, passes)}; {_times(seconds, [name for name in seconds if name not in passes])}"),
        ("speed", ", ".join(f"{speed:.3g} GFLOP/s {name}" for name, speed in _speeds(p, seconds, ranks).items())),
        ("waiting", ", ".join(_waiting(name, ranks, seconds, tile.divided) for name in passes) + ", mean over ranks"),
        *[("" if i else "sent per rank", _sent(name, ranks)) for i, name in enumerate(passes)],
        (
            "memory per rank",
            f"{span([rank['nbytes'] for rank in ranks], size)} planned (nbytes); peak resident "
            f"{span([rank['peak_bytes'] for rank in ranks], size)}, of which "
            f"{span([rank['peak_bytes_before'] for rank in ranks], size)} before the plan",
        ),
        *_empty(p, chosen, ranks),
        ("WARNING", f"NaN or infinite elements: {count_text(odd)}" if any(odd.values()) else None),
        *[("" if i else "verify", report) for i, report in enumerate(reports.values())],
        ("written", written(args.output, args.trace, args.json)),
    ]
    return facts(rows)
