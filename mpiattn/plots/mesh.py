"""The mesh of a tile: ranks in rows and columns, and what those of a row and of a column share."""

from ..system.words import number
from .assignment import shown
from .style import COLORS, INK, PALE, box, centred

ROOM = 1.6  # for labels beside the cells, in cells


def draw_mesh(axes, tile, rank=0):
    """Draw one plane of a tile's mesh, with the row and the column of `rank` in the colors of what they share.

    rank: its number in its plane.
    """
    own_row, own_column = tile.plane.place(rank)
    rows, columns = _with(shown(tile.b), own_row), _with(shown(tile.a), own_column)
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            left_out = row is None or column is None
            here = (row, column) == (own_row, own_column)
            color = INK if here else COLORS["Q"] if row == own_row else COLORS["KV"] if column == own_column else PALE
            box(axes, (x, y), 0.92, 0.92, facecolor=color, linewidth=0, label="rank")
            look = {"fontsize": 7 if tile.chunks < 1000 else 5.5, "color": "white" if here else INK}
            centred(axes, x + 0.46, y + 0.48, "..." if left_out else f"{row * tile.a + column}", **look)
    side = max(len(columns) + ROOM, len(rows) + ROOM, 5)
    axes.set(xlim=(-ROOM, side - ROOM + 0.2), ylim=(side - ROOM + 0.2, -ROOM), aspect="equal", anchor="NW")
    axes.set_axis_off()
    arrow = {"arrowstyle": "<->", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (len(columns) - 0.08, -0.35), (0, -0.35), arrowprops=arrow)
    axes.annotate("", (-0.35, len(rows) - 0.08), (-0.35, 0), arrowprops=arrow)
    axes.text(0, -0.6, f"A = {number(tile.a, 'column')}", ha="left", va="bottom")
    axes.text(-0.6, 0, f"B = {number(tile.b, 'row')}", ha="right", va="top", rotation=90)
    shares = ["blue: its row shares Q, adds up O"] if tile.a > 1 else []
    shares += ["orange: its column shares K and V"] if tile.b > 1 else []
    head = f"Mesh of tile {tile}: A x B = {tile.a} x {tile.b}"
    if tile.h > 1:
        head += f", one of {tile.h} planes\nn of plane p is rank {tile.h} n + p"
    axes.set_title("\n".join([head, *shares]))


def _with(indices, own):
    """Indices to show; the own one in the place of those left out, if it is one of them."""
    return indices if own in indices else [own if index is None else index for index in indices]
