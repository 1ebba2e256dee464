"""Grids whose first axis is consecutive, as Fortran's are: the same tokens, masks and blocks as in C order."""

import numpy as np
import pytest

from mpiattn import ArgumentError, Layout, masks
from mpiattn.arguments.arrays import Axes, Required, check_form
from mpiattn.embed.options import of_making, of_text

NX, NY, NZ = 6, 5, 3


class Ranks:
    """A communicator that is not Cartesian."""

    def __init__(self, size):
        self.size = size


def seen(mask, tokens):
    """Which keys each query sees."""
    begin, end = mask.intervals(np.arange(tokens), tokens, tokens)
    keys = np.arange(tokens)
    return ((begin[..., None] <= keys) & (keys < end[..., None])).any(axis=0)


@pytest.mark.parametrize("edge", ["shifted", "clipped"])
def test_a_neighborhood_is_that_of_the_axes_in_reverse(edge):
    how = {"dilation": (2, 1, 1), "causal": (False, True, False), "cyclic": (False, False, True), "edge": edge}
    turned = {name: value if name == "edge" else value[::-1] for name, value in how.items()}
    given = masks.neighborhood((NX, NY, NZ), (3, 2, 3), order="fortran", **how)
    in_c = masks.neighborhood((NZ, NY, NX), (3, 2, 3), **turned)
    assert (seen(given, NX * NY * NZ) == seen(in_c, NX * NY * NZ)).all()
    x, y, _ = np.unravel_index(np.arange(NX * NY * NZ), (NX, NY, NZ), order="F")
    if edge == "clipped":
        near = [abs(x[:, None] - x) <= 2, np.isin(y[:, None] - y, [0, 1]), (x[:, None] - x) % 2 == 0]
        assert (seen(given, NX * NY * NZ) == np.all(near, axis=0)).all()


def test_the_text_is_in_the_order_of_the_caller():
    mask = masks.neighborhood((NX, NY), (3, 2), causal=(False, True), cyclic=(True, False), order="fortran")
    text = "neighborhood 3x2 grid=6x5 causal=1 cyclic=0 order=fortran"
    assert str(mask) == text and masks.parse(text) == mask
    assert masks.parse("neighborhood 3x2 causal=1 cyclic=0", (NX, NY), "fortran") == mask
    with pytest.raises(ArgumentError, match=r"neighborhood 3x2 grid=6x5 .* seqlen 31"):
        mask.check(31, 31)
    with pytest.raises(ArgumentError, match="for axis 0, which is cyclic and has 6 points"):
        masks.neighborhood((NX, NY), (7, 2), cyclic=(True, False), order="fortran")
    for wrong in ("F", None, 1):
        with pytest.raises(ArgumentError, match="order is"):
            masks.neighborhood((NX, NY), 3, order=wrong)


def test_a_sphere_has_longitudes_first():
    rows = masks.sphere([8] * 4, 0.6)
    assert rows == masks.parse("sphere 0.6", (4, 8)) == masks.parse("sphere 0.6", (8, 4), "fortran")
    assert rows == masks.parse("sphere 0.6 grid=8x4 order=fortran") != masks.parse("sphere 0.6 grid=8x4")
    assert masks.parse("sphere 0.6 rows=3,4", None, "fortran") == masks.sphere([3, 4], 0.6)
    with pytest.raises(ArgumentError, match="order is 'f'"):
        masks.parse("sphere 0.6 grid=8x4 order=f")


@pytest.mark.parametrize("dims", [(2, 2), (3, 1), (2,), (1, 2, 3)])
def test_blocks_are_those_of_an_array_of_fortran(dims):
    """Ranks along the first axis are consecutive too."""
    points = np.arange(NX * NY * NZ).reshape((NX, NY, NZ), order="F")
    layout = Layout.grid((NX, NY, NZ), dims, order="fortran")
    dims = (*dims, *[1] * (3 - len(dims)))
    for rank in range(layout.chunks):
        block = points
        for axis, place in enumerate(np.unravel_index(rank, dims, order="F")):
            block = np.array_split(block, dims[axis], axis)[place]
        assert layout.positions(rank).tolist() == block.ravel(order="F").tolist()


def test_sizes_are_by_axis_of_the_caller():
    layout = Layout.grid((NX, NY), (2, 1), sizes=[(4, 2), None], order="fortran")
    assert layout.positions(1).tolist() == [x + NX * y for y in range(NY) for x in (4, 5)]
    with pytest.raises(ArgumentError, match=r"sizes\[0\] is \(4, 1\)"):
        Layout.grid((NX, NY), (2, 1), sizes=[(4, 1), None], order="fortran")


@pytest.mark.parametrize(
    "shape, dims, sizes, says",
    [
        ((6, 6), (1, 2), [(4, 2), None], r"cart has the dims \(1, 2\) the other way round"),
        ((5, 6), (2, 2), [(4, 2), (3, 2)], r"shape has the axes \(5, 6\) the other way round"),
        ((5, 6), (1, 2), [(4, 2), (5,)], "sizes has these lengths the other way round"),
    ],
)
def test_axes_the_other_way_round_are_named(shape, dims, sizes, says):
    with pytest.raises(ArgumentError, match=says):
        Layout.grid(shape, dims, sizes)
    with pytest.raises(ArgumentError) as raised:
        Layout.grid((5, 6), (2, 1), [(7, 2), None])
    assert "other way" not in str(raised.value)


def test_options_of_c_and_fortran():
    def made(text):
        return of_making(of_text(text), Ranks(4))

    given = made("grid=6x5, dims=2x2, order=fortran, mask=neighborhood 3x1 cyclic=0, sizes=4,2xeven")
    assert given == {
        "layout": Layout.grid((6, 5), (2, 2), [(4, 2), None], order="fortran"),
        "seqlen": 30,
        "mask": masks.neighborhood((6, 5), (3, 1), cyclic=(True, False), order="fortran"),
    }
    assert made("mask=sphere 0.6 grid=8x4, order=fortran")["mask"] == masks.sphere([8] * 4, 0.6)
    with pytest.raises(ArgumentError, match="order is 'fortran', given without grid or mask"):
        made("seqlen=30, order=fortran")


AXES = Required((1, 30, 2, 8), "float32", Axes(("batch", "tokens", "heads", "head_dim"), "positions"))


@pytest.mark.parametrize("shape", [(5, 6, 2, 8), (1, 5, 6, 2, 8), (1, 5, 3, 2, 2, 8), (5, 3, 2, 2, 8)])
def test_the_axes_of_a_field_are_named(shape):
    """In C's order, in which q(8, 2, nx, ny) of Fortran has the shape (ny, nx, 2, 8)."""
    with pytest.raises(ArgumentError, match=r"the points of a grid are one axis, tokens = 5 \* [36]"):
        check_form("q", np.zeros(shape, "f"), AXES)


@pytest.mark.parametrize(
    "shape", [(1, 30, 8, 2), (1, 2, 30, 8), (30, 2, 8), (1, 31, 2, 8), (5, 7, 2, 8), (1, 1, 30, 2, 8)]
)
def test_other_shapes_are_no_fields(shape):
    with pytest.raises(ArgumentError) as raised:
        check_form("q", np.zeros(shape, "f"), AXES)
    assert "points of a grid" not in str(raised.value)
