"""The report of a benchmark, as data for JSON and as a table."""

from ..console.table import duration, facts, percent, table
from ..problem.problem import dims_in_words
from ..system.words import number, size
from .environment import numpy_in_words
from .summary import EMULATED


def cases_as_data(asked, which, plans, summaries):
    """Every case of one size for JSON: the options given, the plan chosen, and the plan's figures.

    which, plans: of `mpiattn.bench.measure.Measured`.  summaries: for each plan, the summaries of its passes by name.
    "measured_as": the number, among the cases of its size, of the first case with the same plan.
    """
    first = [which.index(i) for i in range(len(plans))]
    return [
        {
            "seqlen": case.seqlen,
            "asked": {"tile": case.tile, "schedule": case.schedule, "route": case.route},
            "overlap": case.overlap,
            **plans[i]["facts"],
            "measured_as": first[i],
            "passes": summaries[i],
        }
        for case, i in zip(asked, which)
    ]


def _runs(figures):
    return f"{duration(figures['min'])} - {duration(figures['max'])}"


def _ranks(figures):
    unit = duration(figures["max"]).split()[1]
    scale = {"us": 1e6, "ms": 1e3, "s": 1}[unit]
    return "/".join(f"{figures[side] * scale:.3g}" for side in ("min", "mean", "max")) + f" {unit}"


def _name(case):
    asked = {side: "auto: " if case["asked"][side] == "auto" else "" for side in case["asked"]}
    return (
        f"{asked['tile']}{case['tile']}",
        f"{asked['schedule']}{case['schedule']}",
        f"{asked['route']}{case['route']}" + ("" if case["overlap"] else ", apart"),
        case["layout"],
    )


# The columns of a pass's figures.
FIGURES = {
    "median": lambda figures: duration(figures["seconds"]["median"]),
    "runs": lambda figures: _runs(figures["seconds"]),
    "ranks min/mean/max": lambda figures: _ranks(figures["ranks"]),
    "GFLOP/s": lambda figures: f"{figures['gflops_per_second']:.3g}",
    "of ideal": lambda figures: percent(figures["of_ideal"]),
    "waits": lambda figures: percent(figures["waiting"]["mean"]),
    "sent/rank": lambda figures: size(figures["sent_bytes"]["mean"]),
    "algorithm": lambda figures: f"{size(figures['algorithm_bandwidth'])}/s",
    "bus": lambda figures: f"{size(figures['bus_bandwidth'])}/s",
}
HEADER = "tile", "schedule", "route", "layout", "pass", *FIGURES, "predicted", ""


def _rows(cases, direction):
    for case in cases:
        for i, (name, figures) in enumerate(case["passes"].items()):
            yield (
                *(_name(case) if not i else [""] * 4),
                name,
                *(show(figures) for show in FIGURES.values()),
                duration(case["predicted_seconds"]) if name == direction else "",
                "" if figures["counted"] else "BYTES DIFFER FROM THE FORMULA",
            )


def size_text(cases, data):
    """The table of one size's cases; below it the cases that have the same plan as one in the table."""
    measured = [case for index, case in enumerate(cases) if case["measured_as"] == index]
    checks = sum(len(case["checked"]) for case in measured)
    label = f", {EMULATED}" if data["compute"] == EMULATED else ""
    title = f"{number(cases[0]['seqlen'], 'token')}{label}; {number(checks, 'result')} checked: right"
    same = {}
    for i, case in enumerate(cases):
        if case["measured_as"] != i:
            same.setdefault(case["measured_as"], []).append(", ".join(_name(case)[:3]))
    also = [
        f"not measured again, as they are the plan of {', '.join(_name(cases[index])[:3])}: {'; '.join(others)}"
        for index, others in same.items()
    ]
    return "\n".join(["", title, table(_rows(measured, data["direction"]), HEADER), *also])


def _problem(data):
    p = data["problem"]
    heads = number(p["heads"], "head") + (f" ({p['kv_heads']} KV)" if p["kv_heads"] != p["heads"] else "")
    window = (
        ""
        if p["window"] == [None, None]
        else ", window " + ",".join("" if side is None else str(side) for side in p["window"])
    )
    dims = dims_in_words(p["head_dim"], p["value_dim"], p["shared_kv"])
    return (
        f"batch {p['batch']}, {heads} x {dims}, {p['dtype']}, {'causal' if p['causal'] else 'full'}"
        + "".join(f", {name} {p[name]}" for name in ("prefix", "causal_block") if p.get(name))
        + window
        + "".join(f", {text}" for name, text in (("alibi", "ALiBi"), ("bias", "a dense bias")) if data.get(name))
    )


def head_text(data):
    """The head of the report, for all sizes."""
    machine, emulated = data["environment"], data["compute"] == EMULATED
    enough = machine["cores"] >= machine["ranks_on_host"] or emulated
    head = [
        ("problem", _problem(data)),
        ("ranks", f"{data['ranks']} on {number(data['hosts'], 'host')}"),
        ("back end", data["backend"] + (f": {EMULATED}, as are all times" if emulated else "")),
        ("transport", data["transport"]),
        (
            "machine",
            f"{machine['processor']}, {number(machine['cores'], 'core')} for "
            f"{number(machine['ranks_on_host'], 'rank')} on the fullest host; "
            f"BLAS threads of each: {machine['blas_threads'] or 'unknown'}",
        ),
        ("versions", f"mpiattn {data['mpiattn']}, {numpy_in_words(data, machine)}, {data['versions']['mpi']}"),
        (
            "measured",
            f"{number(data['runs'], 'run')} of each case in turn, after {data['warmup']} unmeasured; median of the "
            "slowest rank's time",
        ),
        ("predicted", f"on machine {data['machine']['name']}: {data['machine']['assumes'] or 'measured'}"),
        ("WARNING", "" if enough else "fewer cores than ranks: these times say little"),
    ]
    return facts(head)
