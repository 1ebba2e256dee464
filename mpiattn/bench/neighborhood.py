"""Options of the programs that measure a neighbourhood on a grid: its kernel, and which axes are cyclic."""

import argparse

from ..console import options
from ..errors import ArgumentError
from ..masks import neighborhood


def _axes(text):
    """A tuple of axes, counted from 0, from the text of --cyclic."""
    axes = text.split(",") if text else []
    if not all(axis.isdecimal() for axis in axes):
        raise argparse.ArgumentTypeError(f"{text!r} is not axes; write numbers from 0 with commas between, as in 0,1")
    return tuple(map(int, axes))


def add(parser):
    """--kernel and --cyclic; None where they are not given."""
    parser.add_argument(
        "--kernel",
        type=options.parse_numbers,
        metavar="SHAPE",
        help="points of --grid that a query sees around it along each axis, for example 15x15; windows are cut off at "
        "the edges of axes that are not cyclic",
    )
    parser.add_argument(
        "--cyclic",
        type=_axes,
        metavar="AXES",
        help="axes of --grid that go on with their first point after their last, counted from 0, as 0,1; '' for none "
        "(default: the last, longitude)",
    )


def of(args):
    """(mask, by axis whether it is cyclic) that --grid, --kernel and --cyclic ask for; raises ArgumentError.

    The grid has two axes.
    """
    if args.kernel is None:
        raise ArgumentError("--kernel is missing; give it with --grid, for example 15x15")
    for name in ("grid", "kernel"):
        if len(getattr(args, name)) != 2:
            given = "x".join(map(str, getattr(args, name)))
            raise ArgumentError(f"--{name} is {given}; it must have two axes here, for example 15x15")
    axes = (1,) if args.cyclic is None else args.cyclic
    if not set(axes) <= {0, 1}:
        raise ArgumentError(f"--cyclic is {','.join(map(str, axes))}; it must be axes of --grid: 0, 1 or 0,1")
    cyclic = [axis in axes for axis in (0, 1)]
    return neighborhood(args.grid, args.kernel, cyclic=cyclic, edge="clipped"), cyclic
