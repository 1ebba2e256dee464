"""Shared by all plots: colors, text, units, and writing files, which are identical for identical plots.

Each kind has the same color in every plot (Okabe and Ito's palette, which is safe for the color blind).  No plot relies
on color alone: lines also differ in dashes and markers, waiting is hatched, and labels stand beside what they name.
"""

import functools
import os
import re

from ..console.table import duration
from ..errors import ArgumentError
from ..system.atomic_file import NewFile, check_target
from ..system.words import size

# Metadata that change from run to run or reveal the machine are left out of the file.
METADATA = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mpiattn",
    "pdf.fonttype": 42,
    "savefig.dpi": 150,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "hatch.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
}
INK, GRAY, PALE = "#1a1a1a", "#767676", "#e6e6e6"
COLORS = {
    "blocks": "#1f3b57",
    "waiting": "#ffffff",
    "Q": "#56b4e9",
    "KV": "#e69f00",
    "O": "#009e73",
    "dQ": "#009e73",
    "dKV": "#d55e00",
    "regrouped": "#cc79a7",
}
HATCH = "/////"
POINTS = 72  # in an inch


def check(name, path):
    """Raise ArgumentError or FileError, naming the argument, if a plot cannot be drawn or written there.

    Call it before any work.
    """
    if kind_of(path) not in METADATA:
        raise ArgumentError(f"{name} is {path!r}; it must end in {', '.join(f'.{kind}' for kind in METADATA)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ArgumentError(
            f"{name} is {path!r}; pictures need matplotlib ({error}); the `plot` extra has it: "
            "pip install 'mpiattn[plot]'"
        ) from None
    check_target(name, path)


def kind_of(path):
    """The extension of a file name: "png", "svg", "pdf" or another one."""
    return os.path.splitext(path)[1].lower().lstrip(".")


def styled(function):
    """Decorate a function to draw with SETTINGS, whatever the caller's settings are; these stay unchanged."""

    @functools.wraps(function)
    def drawn(*args, **kwargs):
        import matplotlib

        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(SETTINGS)
            return function(*args, **kwargs)

    return drawn


def new_figure(width, height, title=None, left=0.008):
    """An empty figure, size in inches, without pyplot and its windows.  left: where the title begins, a share."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, x=left, ha="left", fontsize=9, weight="bold")
    return figure


def box(axes, corner, width, height, **look):
    """Draw a rectangle.  corner: (x, y)."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(corner, width, height, **look))


def centred(axes, x, y, text, **look):
    """Write a text around a point."""
    axes.text(x, y, text, ha="center", va="center", **look)


def passes_in_words(direction):
    """The passes of a direction."""
    return "forward and backward" if direction == "both" else direction


@styled
def save(figure, path, name="path"):
    """Write a figure as .png, .svg or .pdf, whole or not at all; the same figure gives the same bytes.

    Raises ArgumentError and FileError, which name the argument `name`.
    """
    check(name, path)
    with NewFile(name, path) as new:
        figure.savefig(new.partial, format=kind_of(path), metadata=METADATA[kind_of(path)])
        if kind_of(path) == "svg":
            _shorten(new.partial)


def _shorten(path):
    """Shorten an SVG file: no digits below a hundredth of a point, rotations by 0, indents and needless groups."""

    def of_tag(match):
        tag = re.sub(r' transform="rotate\(-0 [^"]*\)"|; stroke-linejoin: miter', "", match[0])
        tag = re.sub(r"(\.\d\d)\d+", r"\1", tag)
        return re.sub(r"(?<=[MLCQ]) | ?\n(?=[MLCQz])|(?<=z)\n|(?<=\d) ?\n(?=\")", "", tag)

    with open(path, encoding="utf-8") as file:
        text = re.sub(r"\n\s+", "\n", re.sub(r"<[a-z][^>]*>", of_tag, file.read()))
    family = "font-family: 'DejaVu Sans', sans-serif"
    text = text.replace(f"{family}; ", "").replace("*{", f"*{{{family}; ", 1)
    with open(path, "w", encoding="utf-8") as file:
        file.write(re.sub(r'<g id="\w+">\n(<(?:path|text)\b[^\n]*\n)</g>\n|<g id="\w+"/>\n', r"\1", text))


def label_ends(axes, labels):
    """Label the ends of lines, moving labels apart where they would overlap.

    labels: (x, y, text, color) of each.  The limits of the axes must be set before.
    """
    _, height = axes.figure.get_size_inches()
    space = 1.6 * SETTINGS["font.size"] / (POINTS * height * axes.get_position().height)
    taken = -1.0
    to_axes = axes.transData + axes.transAxes.inverted()
    for (x, y), (text, color) in sorted(
        ((tuple(to_axes.transform((x, y))), (text, color)) for x, y, text, color in labels),
        key=lambda label: label[0][1],
    ):
        taken = max(y, taken + space * (text.count("\n") + 1))
        axes.annotate(
            text,
            (x, y),
            xytext=(x + 0.02, taken),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            ha="left",
            color=color,
            annotation_clip=False,
        )


def time_axis(axis):
    """Label an axis of seconds in readable units."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda seconds, _: duration(seconds) if seconds else "0"))


def size_axis(axis):
    """Label an axis of bytes in binary units, at powers of two where it is logarithmic."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda nbytes, _: size(nbytes)))


def against_ranks(axes):
    """Make both axes logarithmic, with horizontal lines; ranks are on the lower one."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.grid(axis="y", linewidth=0.3, color=GRAY, alpha=0.5)


def rank_axis(axis, ranks):
    """Label a logarithmic axis of numbers of ranks, with ticks at `ranks`."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(ranks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:.0f}"))
