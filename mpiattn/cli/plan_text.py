"""The table, legend and picture of `mpiattn plan` as text."""

from ..console.table import duration, percent, table
from ..model import search
from ..plots.style import passes_in_words
from ..schedule import travels
from ..schedule.route import passed_on
from ..system.words import number, size

LEGEND = """\
sent/rank  bytes that a rank sends, mean over ranks: {sent}
saved      share of sent/rank saved compared with Ring (tile 1x{ranks}); 1.3 x Ring: it sends 1.3 times as much
regrouped  sent before and after the passes, so that every plane of a tile HxAxB has its share, or the mesh its layout
elements   the same as saved, counted in elements without a mask, as Mesh-Attention (arXiv 2512.20968) counts:
           {row}(a-1) + {column}(b-1){share} chunks, and what is regrouped
x least    {least}
memory     q, k, v, results and buffers of a rank, without the back end's scratch{memory}
{pieces}balance    attended pairs of the busiest rank / mean over ranks
time       predicted, by simulating the schedule on the machine {machine}:
           {facts}
           assumes {assumes}{bounds}
waits      the share of that time that a rank waits, mean over ranks
auto       the shortest time; among times within {same:.0%}, the least sent/rank{limit}"""

LEAST = """\
how many times {sent}, below which no schedule gets if ranks have equal shares of tokens and of attended
           pairs; whether one gets there is not known{mask}"""
NO_LEAST = "unknown, as no bytes are known that every schedule has to send"
ROUNDED = 0.0005  # a share below this is 0.0 % in the table

BOUNDS = """
           > is a bound, without a simulation: the tile cannot be the best"""

PIECES = """\
pieces     the schedule of {tiles}: ranks compute pieces of the scores, of any KV heads
"""

SENT = {
    "forward": "Q, K and V in {dtype}, partials O in {partial}",
    "backward": "Q is q and dout in {dtype}, lse and delta in\n"
    "           {partial}; K and V in {dtype}; partials dQ and dKV in {partial}",
    "both": "forward and backward",
}


def _saved(share):
    """The bytes saved compared with Ring; for a tile that sends more than Ring, how many times as much."""
    if share is None:
        return "-"
    return percent(share) if share > -ROUNDED else f"{1 - share:.3g} x Ring"


def _times(times):
    return "-" if times is None else f"{times:.3g}" if times < 999.5 else f"{times:.0f}"


def head(p, data):
    """The ranks and the problem, in a line."""
    ranks = data["ranks"]
    documents = "" if data["documents"] is None else f" in {number(data['documents'], 'document')}"
    if data["padding"]:
        documents += f" with {number(data['padding'], 'token')} of padding"
    return (
        f"{number(ranks, 'rank')}, {p}{documents}, {passes_in_words(data['direction'])}, {data['route']} route; "
        f"chunks of {number(-(-p.seqlen // ranks), 'token')}"
    )


def as_text(problem, picture, data, on):
    """Table, legend and picture as text.  picture: of the shown tile, "" for none."""
    p, ranks, least = problem, data["ranks"], data["least_sent_bytes"]
    row, column = travels.ELEMENTS[data["direction"]]
    sent = SENT[data["direction"]].format(dtype=p.dtype, partial=p.wire_dtype)
    mask = "" if p.whole_mask.full and data["documents"] is None else ". Of a mask only the number of pairs counts"
    divided = [row["tile"] for row in data["tiles"] if row["schedule"] == "pieces"]
    legend = LEGEND.format(
        sent=sent,
        ranks=ranks,
        row=row,
        column=column,
        same=search.same_time(p.whole_mask),
        share=f" x {p.kv_heads}/{p.heads}" if p.kv_heads != p.heads else "",
        machine=on.name,
        least=LEAST.format(sent=size(least), mask=mask) if least else NO_LEAST,
        memory="" if data["documents"] is None else "; enough for calls without documents",
        facts=on,
        assumes=on.assumes,
        pieces=PIECES.format(tiles=" and ".join(divided)) if divided else "",
        bounds=BOUNDS if any(row["seconds"] is None for row in data["tiles"]) else "",
        limit=_limit(data),
    )
    kinds = dict.fromkeys(kind for row in data["tiles"] for kind in row["sent_bytes"] if kind != "total")
    header = (
        "tile",
        "sent/rank",
        *kinds,
        "saved",
        "elements",
        "x least",
        "memory/rank",
        "balance",
        "time",
        "waits",
        "schedule",
        "layout",
        "",
    )
    parts = [f"{head(p, data)}\n", table(_rows(data, kinds), header), *_impossible(data["others"]), "", legend]
    if picture:
        parts += ["", picture]
    return "\n".join(parts)


def _rows(data, kinds):
    for row in data["tiles"]:
        tile, sent = row["tile"], row["sent_bytes"]
        marks = [mark for mark, marked in (("auto", data["auto"]), ("--tile", data["tile"])) if marked == tile]
        if data["auto"] == data["tile"]:
            marks = marks[:1]
        yield (
            f"{tile} {row['method'] or ''}",
            size(sent["total"]),
            *(size(sent[kind]) if kind in sent else "" for kind in kinds),
            _saved(row["saving"]),
            _saved(row["saving_elements"]),
            _times(row["times_least"]),
            *_predicted(row),
            f"<- {', '.join(marks)}" if marks else "",
        )
    for row in data["others"]:
        if "sent_bytes" in row:
            yield (
                row["method"],
                size(row["sent_bytes"]),
                *("" for _ in kinds),
                _saved(row["saving"]),
                _saved(row["saving_elements"]),
                _times(row["times_least"]),
                *[""] * 7,
            )


def _predicted(row):
    """The cells that a simulation gives; without one, what the tile takes at least."""
    if row["seconds"] is None:
        return "-", "-", f"> {duration(row['least_seconds'])}", "-", "-", row["layout"]
    return (
        size(row["memory_bytes"]),
        f"{row['balance']:.2f}",
        duration(row["seconds"]),
        percent(row["waiting"]),
        row["schedule"] + (f", {row['route']} route" if passed_on(row["route"]) else ""),
        row["layout"] if row["mesh_layout"] == row["layout"] else f"{row['layout']}, mesh {row['mesh_layout']}",
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


def counts(slots):
    """Slots by arena, in a line."""
    return ", ".join(f"{count} {kind}" for kind, count in slots.items())
