"""The pictures: what is drawn, read off the figures' artists."""

from statistics import median

import numpy as np
import pytest

from mpiattn.errors import ArgumentError
from mpiattn.model.workload import Load, Work
from mpiattn.plots.assignment import assignment
from mpiattn.plots.scaling import Series, scaling
from mpiattn.plots.timeline import timeline
from mpiattn.plots.traffic import traffic
from mpiattn.problem.layout import Layout
from mpiattn.problem.problem import Problem
from mpiattn.schedule import travels as formulas
from mpiattn.schedule.regroup import mean_sent
from mpiattn.schedule.tile import Tile
from mpiattn.schedule.timeline import Moved, StepTimes, Timeline

pytest.importorskip("matplotlib", reason="takes matplotlib (extra plot)")
NAN = float("nan")


def patches(axes, label):
    """(x, y, width, height) of the rectangles of a label, from the left."""
    labelled = [patch for patch in axes.patches if patch.get_label() == label]
    return sorted((*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in labelled)


def texts(axes):
    return [text.get_text() for text in axes.texts]


def work_of(kind, n):
    layout = Layout(kind, 8 * n, n)
    return Work(Problem(8 * n, 1, 1, causal=True).whole_mask, layout, layout)


def owner(i, j, a):
    return a * (i // a) + j % a  # arXiv 2512.20968


# The assignment


@pytest.mark.parametrize(
    "a, b, rank", [(1, 1, 0), (1, 5, 2), (4, 4, 6), (6, 2, 11), (3, 1, 0), (16, 16, 37), (4, 64, 255)]
)
def test_assignment(a, b, rank):
    n, (matrix, tile) = a * b, assignment(Tile(1, a, b), rank).axes
    cells = {(i, j) for i in range(n) for j in range(n) if owner(i, j, a) == rank}
    framed = [(y + row, x) for x, y, width, height in patches(matrix, "tile") for row in range(height) if width == 1]
    assert len(framed) == len(cells) and set(framed) == cells
    if n <= 16:
        assert len(patches(matrix, "block")) == n * n
        numbers = {
            (text.get_position()[1] // 1, text.get_position()[0] // 1): int(text.get_text()) for text in matrix.texts
        }
        assert numbers == {(i, j): owner(i, j, a) for i in range(n) for j in range(n)}
    if max(a, b) <= 9:
        assert len(patches(tile, "block")) == n
        moved = {kind: len(patches(tile, f"{kind} moved")) for kind in ("Q", "KV", "O")}
        assert moved == {"Q": a - 1, "KV": b - 1, "O": a - 1}
        assert all(len(patches(tile, f"{kind} own")) == 1 for kind in moved)
        assert f"Q{rank}" in texts(tile) and f"KV{rank}" in texts(tile)
    title = "nothing moves" if n == 1 else f"{2 * (a - 1) + 2 * (b - 1)} chunks moved"
    assert title in tile.get_title(loc="left")


@pytest.mark.parametrize(
    "kind, direction", [("contiguous", "forward"), ("contiguous", "backward"), ("zigzag", "forward")]
)
def test_assignment_under_a_mask(kind, direction):
    """What is drawn as moving is what the ranks move; blocks are as pale as the mask leaves them empty."""
    a, b, rank = 4, 2, 1
    work = work_of(kind, a * b)
    load, work = Load(work, Tile(1, a, b)), work.pairs
    nbytes = {"Q": 2048, "KV": 0, "O": 3, "dQ": 4, "dKV": 5}
    matrix, tile = assignment(Tile(1, a, b), rank, work, direction, nbytes).axes
    reduced = {"forward": ["O"], "backward": ["dQ", "dKV"]}[direction]
    for name in ("Q", "KV", *reduced):
        assert len(patches(tile, f"{name} moved")) == (load.moved(name)[:, rank] > 0).sum()
    assert len(patches(tile, "block")) == (load.pairs[:, :, rank] > 0).sum()
    assert any("(2 KiB)" in text for text in texts(tile))
    darkness = np.zeros_like(work, float)
    for patch in matrix.patches:
        if patch.get_label() == "block":
            x, y = patch.get_xy()
            darkness[y, x] = 3 - sum(patch.get_facecolor()[:3])
    assert ((darkness > 1e-9) == (work > 0)).all()
    for number in range(a * b):  # of one rank's blocks, in proportion to work
        own = np.array([[owner(i, j, a) == number for j in range(a * b)] for i in range(a * b)])
        ratio = darkness[own & (work > 0)] / work[own & (work > 0)]
        assert ratio == pytest.approx(ratio[0])


def test_assignment_of_many_blocks_is_averaged():
    work = work_of("contiguous", 600).pairs
    matrix, _ = assignment(Tile(1, 20, 30), 7, work).axes
    (image,) = matrix.images
    assert image.get_array().shape == (200, 200)
    assert image.get_array().mean() == pytest.approx(work.mean() / work.max())
    assert image.get_extent() == [0, 600, 600, 0]


# Timelines


def predicted():
    """Two ranks; rank 1 is the slower; KV #2 overlaps #1, and #3 is not needed by rank 0."""

    def of(*pairs):
        return [np.array(pair) for pair in pairs]

    steps = (StepTimes(*of((0, 0), (2, 3), (3, 3))), StepTimes(*of((3, 3), (4, 4), (4, 6))))
    moves = (
        Moved("KV", 1, 0, *of((0, 0), (3, 2.5))),
        Moved("KV", 2, 1, *of((1, 1), (3, 5.5))),
        Moved("Q", 0, 1, *of((0.5, 0.5), (1, 1))),
        Moved("KV", 3, 1, *of((NAN, 5), (NAN, 6))),
    )
    return Timeline("forward", steps, moves, 6.0)


def measured():
    steps = (StepTimes(0.0, 5.0, 5.5), StepTimes(5.5, 8.0, 8.0))
    return Timeline("forward", steps, (Moved("O", 1, 1, 5.5, 7.0),), 8.0)


def spans(axes, label):
    return [(x, x + width) for x, _, width, _ in patches(axes, label)]


def test_timelines_of_the_slowest_ranks_at_one_scale():
    above, below = timeline([("predicted", predicted()), ("measured", {3: measured()})], title="a machine").axes
    assert above.get_xlim() == below.get_xlim() == (0, 8)
    assert spans(above, "blocks") == [(0, 3), (3, 4)] and spans(above, "waiting") == [(4, 6)]
    assert spans(above, "KV") == [(0, 2.5), (1, 5.5), (5, 6)] and spans(above, "Q") == [(0.5, 1)]
    assert spans(below, "blocks") == [(0, 5), (5.5, 8)] and spans(below, "waiting") == [(5, 5.5)]
    assert spans(below, "O") == [(5.5, 7)]
    assert [tick.get_text() for tick in above.get_yticklabels()] == ["blocks", "Q", "KV"]
    assert [tick.get_text() for tick in below.get_yticklabels()] == ["blocks", "O"]
    assert above.get_title(loc="left") == "predicted, rank 1, which ends last: 6 s, of which 2 s waiting (33.3 %)"
    assert below.get_title(loc="left") == "measured, rank 3, which ends last: 8 s, of which 500 ms waiting (6.2 %)"
    assert set(texts(above)) == {"#1", "#2", "#3", "all"}
    assert below.get_xlabel().endswith("what arrives, #n: from the rank n hops away")
    rectangles = [box for kind in ("blocks", "waiting", "KV", "Q") for box in patches(above, kind)]
    for i, (x, y, width, height) in enumerate(rectangles):
        for other_x, other_y, other_width, other_height in rectangles[:i]:
            apart_in_time = x >= other_x + other_width - 1e-9 or other_x >= x + width - 1e-9
            assert apart_in_time or y >= other_y + other_height - 1e-9 or other_y >= y + height - 1e-9


def test_timelines_of_several_ranks():
    (axes,) = timeline([("predicted", predicted())], ranks=[1, 0]).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["rank 1", "rank 0"]
    rows = {y > 1: [] for _, y, *_ in patches(axes, "blocks")}
    for x, y, width, _ in patches(axes, "blocks"):
        rows[y > 1].append((x, x + width))
    assert rows == {True: [(0, 3), (3, 4)], False: [(0, 2), (3, 4)]}
    assert len(patches(axes, "KV")) == 5  # all but the one that rank 0 does not need
    assert "rank 1, which ends last: 6 s" in axes.get_title(loc="left")
    (key,) = axes.figure.legends
    assert [text.get_text() for text in key.get_texts()] == ["blocks", "waiting", "Q", "KV"]
    colors = {text.get_text(): patch.get_facecolor() for text, patch in zip(key.get_texts(), key.get_patches())}
    drawn = {patch.get_label(): patch.get_facecolor() for patch in axes.patches}
    assert colors == {name: drawn[name] for name in colors}
    with pytest.raises(ArgumentError, match="rank is 2; the timeline is of 2 ranks"):
        timeline([("predicted", predicted())], ranks=[2])
    with pytest.raises(ArgumentError, match="rank is 0; the timeline is of 3"):
        timeline([("measured", {3: measured()})], ranks=[0])
    with pytest.raises(ArgumentError, match="entries is empty"):
        timeline([])


def test_hops_are_explained_where_they_are_named():
    """Bars too narrow for a text have none, and nothing is said of it."""
    narrow = measured()._replace(moves=(Moved("O", 1, 1, 5.5, 5.501),))
    (axes,) = timeline([("measured", {3: narrow})]).axes
    assert not texts(axes) and "#" not in axes.get_xlabel()


# Traffic


def test_traffic():
    problem = Problem(1048576, 32, 128)
    (axes,) = traffic(problem, 256).axes
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    ranks = [2**i for i in range(1, 9)]
    assert lines["Ring"].tolist() == [[n, formulas.mean_sent(problem, Tile(1, 1, n))] for n in ranks]
    assert lines["USP"].tolist() == [[n, formulas.best_usp(problem, n)[1]] for n in ranks]
    assert lines["Ulysses"].tolist() == [[n, formulas.ulysses(problem, n)] for n in ranks[:5]]  # 32 heads
    assert lines["best mesh"][-1].tolist() == [256, formulas.mean_sent(problem, Tile(1, 16, 16))]
    assert lines["planes"][-1].tolist() == [256, mean_sent(problem, Tile(32, 2, 4))]
    assert {
        "Ring",
        "best mesh, 16x16:\n88.2 % less",
        "USP, 32x8:\n96.5 % less",
        "best with planes, 32x2x4:\n97.7 % less",
        "4x8",
        "diamonds: Ulysses, on no more ranks than the 32 KV heads",
    } <= set(texts(axes))
    heights = sorted(text.get_position()[1] for text in axes.texts if "less" in text.get_text())
    assert min(np.diff(heights)) > 0.05, "labels lie on one another"


def test_traffic_of_few_ranks_and_both_directions():
    problem = Problem(1000, 6, 128, kv_heads=1)
    (axes,) = traffic(problem, 7, "both").axes
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    assert set(lines) == {"Ring", "best mesh", "planes"}  # one KV head allows neither Ulysses nor USP
    assert lines["Ring"][:, 0].tolist() == [2, 4, 7]
    assert lines["Ring"][-1, 1] == pytest.approx(
        sum(formulas.mean_sent(problem, Tile(1, 1, 7), direction) for direction in ("forward", "backward"))
    )
    assert "best mesh: Ring" in texts(axes)
    (axes,) = traffic(Problem(1000, 4, 8), 6).axes  # 4 heads allow USP in pairs, and Ulysses on 4 ranks
    assert {"USP, 2x3:\n40.0 % less"} < set(texts(axes))
    (axes,) = traffic(Problem(1000, 2, 8), 7).axes  # 7 ranks have no group: the line ends at 4
    assert "USP" in texts(axes)
    with pytest.raises(ArgumentError, match="no tokens"):
        traffic(Problem(0, 2, 8), 4)
    with pytest.raises(ArgumentError, match="ranks is 1"):
        traffic(problem, 1)


# Scaling


def test_scaling():
    runs = [[4.0, 5.0, 6.0], [2.0, 2.5, 9.0], [1.5, 1.0, 1.25]]
    figure = scaling(
        [Series("mesh", [2, 4, 8], runs), Series("mesh", [2, 4, 8], [4.8, 2.4, 1.2], predicted=True)], "a machine"
    )
    time, speedup = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in time.lines}
    assert lines["mesh"] == [[n, median(some)] for n, some in zip((2, 4, 8), runs)]
    assert lines["mesh, predicted"] == [[2, 4.8], [4, 2.4], [8, 1.2]]
    assert lines["ideal"] == [[2, 5], [8, 1.25]]
    (bars,) = time.collections
    assert [segment.tolist() for segment in bars.get_segments()] == [
        [[n, min(some)], [n, max(some)]] for n, some in zip((2, 4, 8), runs)
    ]
    lines = {line.get_label(): line.get_xydata().tolist() for line in speedup.lines}
    assert lines["mesh"] == [[2, 2], [4, 4], [8, 8]] and lines["ideal"] == [[2, 2], [8, 8]]
    assert lines["mesh, predicted"][0] == [2, 2 * 5 / 4.8]
    assert set(texts(time)) == set(texts(speedup)) == {"mesh", "mesh, predicted", "ideal"}
    assert figure.get_suptitle() == "a machine"


@pytest.mark.parametrize(
    "series, message",
    [
        ([], "series is empty"),
        ([Series("x", [2, 1], [1, 1])], "increasing"),
        ([Series("x", [1], [1, 2])], "with 2 times"),
        ([Series("x", [1, 2], [[1], []])], "at least one"),
        ([Series("x", [1], [0.0])], "positive"),
    ],
)
def test_scaling_errors(series, message):
    with pytest.raises(ArgumentError, match=message):
        scaling(series, "nothing")
