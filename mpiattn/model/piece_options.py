"""Which options of a plan go with a division of the scores into pieces: it has one schedule, and no mesh."""

from ..errors import ArgumentError

ALLOWED = {"schedule": ("auto",), "route": ("auto", "direct"), "mesh_layout": ("auto",)}


def allows_pieces(**options):
    """Whether there are plans of pieces with these options, by their names in `ALLOWED`."""
    return all(value in ALLOWED[name] for name, value in options.items())


def check_pieces(tile, **options):
    """Raise ArgumentError if an option is given that only meshes have, and the tile is a division."""
    if tile is None or not tile.divided:
        return
    for name, value in options.items():
        if value not in ALLOWED[name]:
            raise ArgumentError(
                f"{name} is {value!r}; with tile {tile}, whose ranks have pieces of the scores in place of chunks, "
                f"it must be {' or '.join(ALLOWED[name])}"
            )
