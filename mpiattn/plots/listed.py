"""The tiles that `mpiattn plan` lists, as bars: bytes that a rank sends, and predicted times.

The input is the command's JSON, so that bars and labels are the numbers of its table.
"""

from ..console.table import duration, percent
from ..system.words import size
from .style import COLORS, GRAY, HATCH, INK, PALE, passes_in_words

BAR = 0.17  # height of a tile's bar in inches, about
LABEL = 0.75  # room for labels, as a share of the longest bar
SAME = 0.0005  # share below which a saving is called none
SUMS = {"forward": GRAY, "backward": PALE}  # bytes of a pass where both are planned


def rows(data):
    """The entries to draw, from the top: tiles, and methods that no tile is."""
    return data["tiles"] + [other for other in data["others"] if "sent_bytes" in other]


def name(entry, data):
    """What a bar is of, and whether it is marked."""
    if "tile" not in entry:
        return entry["method"]
    marks = {data["auto"]: "auto", data["tile"]: "--tile" if data["tile"] != data["auto"] else "auto"}
    words = (entry["tile"], entry["method"], f"<- {marks[entry['tile']]}" if entry["tile"] in marks else None)
    return " ".join(filter(None, words))


def _parts(entry):
    """Bytes by kind, or of a method without kinds."""
    sent = entry["sent_bytes"]
    return {kind: nbytes for kind, nbytes in sent.items() if kind != "total"} if isinstance(sent, dict) else {"": sent}


def _total(entry):
    return sum(_parts(entry).values())


def draw_sent(axes, data):
    """Draw the bytes of every entry by kind, beside them their sum, what it saves, and the least that is possible."""
    entries, drawn = rows(data), set()
    for y, entry in enumerate(entries):
        left = 0
        for kind, nbytes in _parts(entry).items():
            if nbytes:
                color = {**COLORS, **SUMS, "": "white"}[kind]
                label = None if kind in drawn | {""} else kind
                axes.barh(y, nbytes, left=left, color=color, edgecolor=INK, linewidth=0.3, label=label)
                drawn.add(kind)
                left += nbytes
        _label(axes, y, left, _sent_words(entry))
    longest = max(map(_total, entries))
    _frame(axes, data, entries, longest)
    if data["least_sent_bytes"]:
        axes.axvline(data["least_sent_bytes"], color=INK, linewidth=0.9, linestyle=":", label="least possible")
    order = [*COLORS, *SUMS]
    handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
    names = sorted(handles, key=lambda label: order.index(label) if label in order else len(order))
    below = {"loc": "upper left", "bbox_to_anchor": (0, 0), "ncols": 6, "handlelength": 1.2, "columnspacing": 1}
    axes.legend([handles[label] for label in names], names, frameon=False, fontsize=7.5, **below)
    passes = passes_in_words(data["direction"])
    axes.set_title(f"Bytes a rank sends, mean over ranks, {passes}; compared with Ring and with the least possible")


def _sent_words(entry):
    words, saving, times = [size(_total(entry))], entry["saving"], entry["times_least"]
    if entry.get("method") == "Ring":
        words.append("Ring")
    elif saving is not None and abs(saving) < SAME:
        words.append("as much as Ring")
    elif saving is not None:
        words.append(f"{percent(saving)} less" if saving >= 0 else f"{1 - saving:.3g} x Ring")
    if times is not None:
        words.append(f"{times:.3g} x least")
    return ", ".join(words)


def draw_times(axes, data):
    """Draw the predicted time of every tile, and how much of it ranks wait; of the others, what it is at least."""
    entries = rows(data)
    for y, entry in enumerate(entries):
        if "tile" not in entry:
            continue
        least, seconds, waiting = entry["least_seconds"], entry["seconds"], entry["waiting"]
        if seconds is None:
            axes.barh(y, least, color="white", edgecolor=INK, linewidth=0.5, linestyle=":", label="least")
            _label(axes, y, least, f"> {duration(least)}")
            continue
        works = seconds * (1 - waiting)
        axes.barh(y, works, color=COLORS["blocks"], label="works")
        if waiting:
            look = {"color": COLORS["waiting"], "hatch": HATCH, "edgecolor": INK, "linewidth": 0.4}
            axes.barh(y, seconds - works, left=works, label="waits", **look)
        _label(axes, y, seconds, f"{duration(seconds)}, {percent(waiting)} waits")
    _frame(axes, data, entries, max(entry.get("least_seconds", 0) for entry in entries))
    axes.tick_params(axis="y", labelleft=False)
    axes.set_title(f"Time predicted for machine {data['machine']['name']}; hatched: waits")


def _label(axes, y, end, text):
    axes.annotate(text, (end, y), xytext=(3, 0), textcoords="offset points", va="center", ha="left", fontsize=7)


def _frame(axes, data, entries, longest):
    axes.set(xlim=(0, (longest or 1) * (1 + LABEL)), ylim=(len(entries) - 0.4, -0.6))
    axes.set_yticks(range(len(entries)), [name(entry, data) for entry in entries], fontsize=7)
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    for label, entry in zip(axes.get_yticklabels(), entries):
        if entry.get("tile") == data["tile"]:
            label.set_weight("bold")
