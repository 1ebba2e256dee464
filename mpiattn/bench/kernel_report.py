"""Results of `mpiattn bench --kernel` as text."""

from ..console.table import duration, facts, table
from ..system.words import number

TITLES = {
    "forward": "forward of a block of {seqlen} tokens",
    "backward": "backward of a block of {seqlen} tokens",
    "decode": "decoding: a query over {keys} keys, heads: {heads} over {kv_heads}, pages of {page_size}",
    "carry": "carry-in: a block of {seqlen} queries by {keys} keys",
    "launch": "launches: {tokens} tokens",
}
RATES = {"flops_per_second": "GFLOP/s", "bytes_per_second": "GB/s"}


def _section(section):
    own = section["results"][0]
    rate = next((name for name in RATES if name in own), None)
    rows = []
    for row in section["results"]:
        cells = [row["name"], duration(row["median"]), " - ".join(map(duration, row["quartiles"]))]
        if rate:
            cells += [
                f"{row[rate] / 1e9:.4g}",
                f"{row[rate] / own[rate]:.3g}",
                "" if row["difference"] is None else f"{row['difference']:.1e}",
            ]
        rows.append(cells)
    header = ("", "median", "quartiles", *((RATES[rate], "its speed over mpiattn's", "difference") if rate else ()))
    lines = ["", TITLES[section["what"]].format(**section), table(rows, header)]
    if "overhead" in section:
        lines.append(f"adding to a partial takes {1 + section['overhead']:.3g} times as long")
    lines += [f"{name} is missing: {why}" for name, why in section.get("missing", {}).items()]
    return lines


def as_text(data):
    """Facts, and a table for every section."""
    p, versions, machine = data["problem"], data["versions"], data["environment"]
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    head = [
        (
            "problem",
            f"{number(p['heads'], 'head')} over {number(p['kv_heads'], 'KV head')} x {p['head_dim']}, {p['dtype']}, "
            f"{'causal' if p['causal'] else 'full'}",
        ),
        ("back end", f"{data['backend']} on {machine['device']}"),
        (
            "machine",
            f"{machine['processor']}; threads of BLAS: {machine['blas_threads'] or 'unknown'}, of torch: "
            f"{machine['torch_threads'] or 'none'}",
        ),
        ("versions", f"mpiattn {data['mpiattn']}, {libraries}"),
        (
            "measured",
            f"{number(data['runs'], 'run')} of each, in turn; medians. Differences are relative to the largest "
            "value: of mpiattn from float64 at an affordable size, of torch from mpiattn",
        ),
    ]
    if data["compute"] != "real":
        head.append(("compute", f"{data['compute']}: its times say nothing about a device"))
    lines = [facts(head)]
    for section in data["sections"]:
        lines += _section(section)
    return "\n".join(lines)
