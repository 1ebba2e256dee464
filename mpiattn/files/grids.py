"""Datasets whose tokens are the points of a grid, in C order: they have the grid's axes where others have one."""

from math import prod

from h5py import h5s


def lacks_batch(shape, axis, grid):
    """Whether a tensor on a grid has no batch axis.  axis: of tokens where there is one."""
    if grid is None or tuple(shape[axis : axis + 1]) == (prod(grid),):
        return False
    grid, here = tuple(grid), tuple(shape[axis - 1 :])
    return any(len(shape) == 2 + len(points) and here[: len(points)] == points for points in (grid, (prod(grid),)))


def flat(shape, axis, grid):
    """The shape of a tensor with a batch and one axis of tokens, from one that may have the axes of `grid` there."""
    if lacks_batch(shape, axis, grid):
        shape = (1, *shape)
    if grid is None or len(shape) != 3 + len(grid) or tuple(shape[axis : axis + len(grid)]) != tuple(grid):
        return tuple(shape)
    return (*shape[:axis], prod(grid), *shape[axis + len(grid) :])


def fitting(shapes, axis, grid):
    """Text to append to an error about shapes that do not fit: how those of more axes would; "" without such."""
    shape = next((shape for shape in shapes if len(shape) > 4), None)
    if shape is None:
        return ""
    if grid is None:
        points = "x".join(map(str, shape[axis : axis + len(shape) - 3]))
        return f"; if tokens are the points of a grid, say --grid {points}"
    return f"; where one has seqlen they may have the axes of --grid, {', '.join(map(str, grid))}"


def spread(shape, axis, grid):
    """The inverse of `flat`; None for no grid."""
    return tuple(shape) if grid is None else (*shape[:axis], *grid, *shape[axis + 1 :])


def boxes(start, count, grid):
    """Some consecutive points as boxes in order, (first point, shape) by axis: at most two an axis, less one."""
    if len(grid) == 1:
        return [((start,), (count,))] if count else []
    row, stop = prod(grid[1:]), start + count

    def within(number, first, last):
        return [((number, *at), (1, *shape)) for at, shape in boxes(first, last - first, grid[1:])]

    first, last = -(-start // row), stop // row
    if first > last:  # all in one row
        return within(last, start - last * row, stop - last * row)
    before = within(first - 1, start % row, row) if start % row else []
    between = [((first, *[0] * len(grid[1:])), (last - first, *grid[1:]))] if first < last else []
    return before + between + (within(last, 0, stop - last * row) if stop % row else [])


def select(space, starts, shape, axis):
    """Select the elements from the indices `starts` on, of this shape, of tensors with one axis of tokens, `axis`."""
    grid = space.shape[axis : axis + len(space.shape) - len(shape) + 1]
    how = h5s.SELECT_SET
    for first, count in boxes(starts[axis], shape[axis], grid):
        at, size = ((*ends[:axis], *inside, *ends[axis + 1 :]) for ends, inside in ((starts, first), (shape, count)))
        space.select_hyperslab(at, size, op=how)
        how = h5s.SELECT_OR
