"""Grids on the command line: blocks of a file's field by rank, whatever axes its datasets have."""

import json
from itertools import product
from math import prod

import h5py
import numpy as np
import pytest
import warm
from launch import require_launch

from mpiattn.cli import main
from mpiattn.console.options import layout_of, parse_numbers
from mpiattn.errors import ArgumentError, FileError
from mpiattn.files.grids import boxes, flat, spread
from mpiattn.files.shapes import read_shapes
from mpiattn.problem.grid import even_dims
from mpiattn.verify import reference


def test_dims_are_as_equal_as_they_can_be():
    """As of MPI_Dims_create: their product is the ranks, none is smaller than the next."""
    for ranks, axes in product(range(1, 65), range(1, 4)):
        dims = even_dims(ranks, axes)
        assert prod(dims) == ranks and list(dims) == sorted(dims, reverse=True)
        ways = [way for way in product(range(1, ranks + 1), repeat=axes - 1) if ranks % prod(way) == 0]
        assert max(dims) == min(max(*way, ranks // prod(way), 1) for way in ways)
    assert even_dims(12, 2) == (4, 3) and even_dims(12, 3) == (3, 2, 2) and even_dims(7, 2) == (7, 1)


def test_boxes_of_consecutive_points():
    for grid in ((7,), (3, 4), (2, 3, 4), (1, 5, 1), (3, 1, 2)):
        points = np.arange(prod(grid)).reshape(grid)
        for start in range(prod(grid) + 1):
            for stop in range(start, prod(grid) + 1):
                cut = [
                    points[tuple(slice(a, a + n) for a, n in zip(at, size))].ravel().tolist()
                    for at, size in boxes(start, stop - start, grid)
                ]
                assert (
                    [i for box in cut for i in box] == list(range(start, stop))
                    and all(cut)
                    and len(cut) < 2 * len(grid)
                )


def test_shapes_with_the_axes_of_a_grid():
    assert flat((2, 3, 4, 5, 6), 1, (3, 4)) == (2, 12, 5, 6) == flat((2, 12, 5, 6), 1, (3, 4))
    assert flat((2, 5, 3, 4, 6), 2, (3, 4)) == (2, 5, 12, 6) and flat((2, 3, 4, 5, 6), 1, None) == (2, 3, 4, 5, 6)
    assert flat((2, 4, 3, 5, 6), 1, (3, 4)) == (2, 4, 3, 5, 6), "another grid"
    assert spread((2, 12, 5, 6), 1, (3, 4)) == (2, 3, 4, 5, 6) and spread((2, 5, 12), 2, (3, 4)) == (2, 5, 3, 4)


@pytest.mark.parametrize(("axes", "shape"), [("bshd", (1, 3, 4, 2, 5)), ("bhsd", (1, 2, 3, 4, 5))])
def test_a_field_without_its_grid(tmp_path, axes, shape):
    """The error says which option is missing, or how tensors may be with the grid that was given."""
    with h5py.File(tmp_path / "in.h5", "w") as file:
        for name in "qkv":
            file[name] = np.zeros(shape, np.float32)
    with pytest.raises(FileError, match=r"if tokens are the points of a grid, say --grid 3x4$"):
        read_shapes(tmp_path / "in.h5", axes)
    with pytest.raises(FileError, match=r"where one has seqlen they may have the axes of --grid, 4, 3$"):
        read_shapes(tmp_path / "in.h5", axes, grid=(4, 3))
    assert read_shapes(tmp_path / "in.h5", axes, grid=(3, 4))[0]["seqlen"] == 12


class Typed:
    def __init__(self, grid=None, dims=None, layout="auto"):
        self.grid, self.dims, self.layout = grid, dims, layout


@pytest.mark.parametrize(
    ("typed", "tokens", "text"),
    [
        (Typed((3, 4)), (13,), "--grid is 3x4, of 12 points; it must be of the 13 tokens"),
        (Typed((3, 4)), (12, 13), "it must be of the 12 queries and 13 keys"),
        (Typed((3, 4), (3, 2)), (12,), "--dims is 3x2, 6 ranks; there are 4"),
        (Typed((3, 4), (1, 2, 2)), (12,), "--dims is 1x2x2; it may have at most the axes of --grid 3x4"),
        (Typed((3, 4), None, "zigzag"), (12,), "--layout is 'zigzag'; with --grid ranks hold the blocks"),
        (Typed(None, (2, 2)), (12,), "--dims are given without --grid"),
    ],
)
def test_grids_that_do_not_fit(typed, tokens, text):
    with pytest.raises(ArgumentError, match=text):
        layout_of(typed, 4, *tokens)


def test_text_of_a_grid(capsys):
    assert parse_numbers("721x1440") == (721, 1440) and parse_numbers("5") == (5,)
    for wrong in ("3xx4", "0x4", "3x-4", "a"):
        with pytest.raises(SystemExit):
            main(["plan", "--ranks", "4", "--heads", "1", "--head-dim", "8", "--grid", wrong])
        assert "write whole numbers with x between, as in 721x1440" in capsys.readouterr().err


def test_plan(tmp_path):
    path = tmp_path / "plan.json"
    assert (
        main("plan --ranks 6 --grid 20x30 --dims 2x3 --heads 4 --head-dim 8 --window 5,5 --json".split() + [str(path)])
        == 0
    )
    data = json.loads(path.read_text())
    assert data["problem"]["seqlen"] == 600 and {tile["layout"] for tile in data["tiles"]} == {"grid"}


def test_a_field(tmp_path):
    """A file with the grid's axes; every rank has a block, and OUT has the axes of IN."""
    require_launch()
    source, out = (str(tmp_path / name) for name in ("in.h5", "out.h5"))
    assert main(["generate", source, *"--grid 5x7 --heads 4 --kv-heads 2 --head-dim 8 --batch 2 --dout".split()]) == 0
    how = "--grid 5x7 --dims 2x2 --window 9,4 --backward --verify".split()
    outcome = warm.command(4, ["run", source, out, *how])
    assert "grid layout (5x7 in 2x2 blocks)" in outcome.stdout and outcome.stdout.count("passed") == 2
    with h5py.File(source) as file, h5py.File(out) as results:
        assert file["q"].shape == (2, 5, 7, 4, 8) and results["lse"].shape == (2, 4, 5, 7)
        assert (results.attrs["layout"], results.attrs["grid"], results.attrs["dims"]) == ("grid", "5x7", "2x2")
        q, k, v, dout = (file[name][:].reshape(2, 35, -1, 8) for name in ("q", "k", "v", "dout"))
        ref, lse = reference.attention(q, k, v, window=(9, 4))
        grads = reference.backward(dout, q, k, v, window=(9, 4))
        assert np.abs(results["lse"][:].reshape(lse.shape) - lse).max() < 1e-5
        for name, expected in zip(("out", "dq", "dk", "dv"), (ref, *grads)):
            assert results[name].shape == (2, 5, 7, expected.shape[2], 8)
            assert np.abs(results[name][:].reshape(expected.shape) - expected).max() < 1e-5 * np.abs(expected).max()
