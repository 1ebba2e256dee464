"""The report of `mpiattn run` about a file of many problems, from the reports of each."""

from ..console.table import duration, facts, percent, table, written
from ..model.machine import PRODUCTS
from ..system.words import number, size
from .report import count_text, problem_text


def problems_text(tasks, done):
    """The problems in words.  done: how many were finished before."""
    first, *others = tasks
    text = problem_text(first.plan.problem, first.chosen)
    if not first.group:
        return text
    groups = f"{first.group!r} to {others[-1].group!r}" if others else repr(first.group)
    plans = number(len({id(task.plan) for task in tasks}), "shape")
    before = f", {done} of them finished before" if done else ""
    if not others:
        return f"{groups}{before}: {text}"
    return f"{number(len(tasks), 'problem')} in {groups}, of {plans}{before}; the first: {text}"


def as_json_of_all(args, origin, reports):
    """All reports as a dict for JSON, with sums over the problems as the report of one has them.

    reports: the dicts of `as_json`, by the path of the group.
    """
    each = list(reports.values())
    passes = [name for name in PRODUCTS if name in each[0]["seconds"]]
    ranks = [
        {"rank": rank["rank"], "host": rank["host"]}
        | {
            name: {
                what: sum(report["per_rank"][rank["rank"]][name][what] for report in each)
                for what in ("sent_bytes", "sent_messages", "formula_bytes", "wait_seconds")
            }
            for name in passes
        }
        for rank in each[-1]["per_rank"]
    ]
    return {
        "input": args.input,
        "output": args.output,
        **origin,
        "ranks": each[0]["ranks"],
        "tile": ", ".join(dict.fromkeys(report["tile"] for report in each)),
        "seconds": {name: sum(report["seconds"].get(name, 0) for report in each) for name in each[-1]["seconds"]},
        "per_rank": ranks,
        "problems": {
            group: {name: value for name, value in report.items() if name not in ("input", "output")}
            for group, report in reports.items()
        },
    }


def _row(group, report):
    """A row of the table."""
    p, ranks = report["problem"], report["per_rank"]
    cells = [
        group or "(no group)",
        f"{p['seqlen']}" if p["seqlen"] == p["seqlen_k"] else f"{p['seqlen']}/{p['seqlen_k']}",
    ]
    for name in report["gflops_per_second"]:
        seconds, of_ranks = report["seconds"][name], [rank[name] for rank in ranks]
        equal = all(rank["sent_bytes"] == rank["formula_bytes"] for rank in of_ranks)
        cells += [
            duration(seconds),
            f"{report['gflops_per_second'][name]:.3g}",
            percent(sum(rank["wait_seconds"] for rank in of_ranks) / len(ranks) / seconds),
            size(sum(rank["sent_bytes"] for rank in of_ranks) / len(ranks)) + ("" if equal else " (NOT the formula)"),
        ]
    if "verify" in report:
        cells.append("passed" if report["verify"]["passed"] else "FAILED")
    return cells


def as_text_of_all(args, reports):
    """All reports as a table."""
    each = list(reports.values())
    header = ["problem", "tokens"]
    for name in each[0]["gflops_per_second"]:
        header += [name, "GFLOP/s", "waiting", "sent per rank"]
    header += ["verify"] * ("verify" in each[0])
    odd = {}
    for report in each:
        for name, count in report["nonfinite"].items():
            odd[name] = odd.get(name, 0) + count
    rows = [
        ("WARNING", f"NaN or infinite elements: {count_text(odd)}" if any(odd.values()) else None),
        ("written", written(args.output, args.json)),
    ]
    return table([_row(*item) for item in reports.items()], header) + "\n" + facts(rows)
