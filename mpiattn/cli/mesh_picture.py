"""A mesh drawn in characters."""

from ..system.words import number

MOST_COLUMNS, MOST_ROWS = 8, 6  # of the picture; larger meshes are abbreviated


def _some(count, most):
    """Indices to show of `count`, None for those left out."""
    return list(range(count)) if count <= most else [*range(most - 2), None, count - 1]


def picture(tile):
    """The mesh of a tile, or a plane of it: ranks in rows and columns, and the blocks that rank 0 computes."""
    a, b, h = tile.a, tile.b, tile.h
    columns, width = _some(a, MOST_COLUMNS), len(str(tile.chunks - 1)) + 4

    def line(label, cells):
        return f"  {label:<{len(str(b - 1)) + 4}}|" + "".join(f"{cell:>{width}}" for cell in cells)

    planes = f"; n of plane p is rank {h} * n + p" if h > 1 else ""
    lines = [
        (f"each of the {h} planes" if h > 1 else "mesh")
        + f" of tile {tile}: A = {number(a, 'column')} x B = {number(b, 'row')}, "
        + f"{'n' if planes else 'rank'} = {a} * row + column{planes}",
        line("", ["..." if c is None else f"c={c}" for c in columns]),
    ]
    for r in _some(b, MOST_ROWS):
        lines.append(
            line("..." if r is None else f"r={r}", ["..." if r is None or c is None else r * a + c for c in columns])
        )
    groups = [f"a row ({a} ranks) shares Q and reduces O, backward dQ"] if a > 1 else []
    groups += [f"a column ({b} ranks) shares K and V, backward reduces dK and dV"] if b > 1 else []
    lines += [
        *(f"  {group}" for group in groups),
        f"  rank 0 computes the query chunks {_chunks(a, 1)} x the KV chunks {_chunks(b, a)}",
    ]
    return "\n".join(lines)


def _chunks(count, stride):
    return " ".join("..." if i is None else str(i * stride) for i in _some(count, MOST_COLUMNS))
