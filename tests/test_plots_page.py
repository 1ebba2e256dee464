"""The page that `mpiattn plan --plot` draws: its numbers are those of the table, and its texts can be read."""

import json
import os

import numpy as np
import pytest

from mpiattn.cli import main
from mpiattn.console.table import duration, percent
from mpiattn.model import cost
from mpiattn.model.machine import DEFAULT
from mpiattn.model.simulate import simulate
from mpiattn.model.workload import Load, Work
from mpiattn.plots import style
from mpiattn.problem.layout import Layout
from mpiattn.problem.problem import Problem
from mpiattn.schedule import travels as formulas
from mpiattn.schedule.tile import Tile
from mpiattn.system.words import size

pytest.importorskip("matplotlib", reason="takes matplotlib (extra plot)")


def patches(axes, label):
    """(x, y, width, height) of the rectangles of a label, from the left."""
    labelled = [patch for patch in axes.patches if patch.get_label() == label]
    return sorted((*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in labelled)


def spans(axes, label):
    return [(x, x + width) for x, _, width, _ in patches(axes, label)]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def title(axes):
    return axes.get_title(loc="left")


def plan(monkeypatch, capsys, tmp_path, words):
    """The figure that `mpiattn plan` draws, its table, and its JSON."""
    drawn, path = [], tmp_path / "plan.json"
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(style, "save", lambda figure, path, name: drawn.append((figure, path, name)))
    assert main(["plan", *words.split(), "--plot", "page.svg", "--json", str(path)]) == 0
    ((figure, *rest),) = drawn
    assert rest == ["page.svg", "--plot"]
    return figure, capsys.readouterr().out, json.loads(path.read_text())


PLANES = "--ranks 64 --seqlen 262144 --heads 32 --kv-heads 8 --head-dim 128 --causal --machine h100"


@pytest.mark.parametrize(
    "words",
    [
        PLANES + " --tile 8x8",
        "--ranks 8 --seqlen 999 --batch 2 --heads 4 --kv-heads 2 --head-dim 8 --direction both",
        "--ranks 6 --seqlen 6000 --heads 8 --head-dim 64 --causal --window 100,0 --schedule greedy",
    ],
)
def test_bars_are_the_table(monkeypatch, capsys, tmp_path, words):
    """Of every line its bytes by kind and its time; the labels are texts of the table."""
    figure, table, data = plan(monkeypatch, capsys, tmp_path, words)
    sent, times = figure.axes[3:5]
    entries = data["tiles"] + [other for other in data["others"] if "sent_bytes" in other]
    lines = {line.split("  ")[0].strip(): line for line in table.splitlines()}
    names = [label.get_text() for label in sent.get_yticklabels()]
    assert len(names) == len(entries) == len(sent.texts)
    bars = {}
    for bar in (*sent.patches, *times.patches):
        bars.setdefault((bar.axes is times, round(bar.get_y() + bar.get_height() / 2)), []).append(bar)
    for y, (name, entry) in enumerate(zip(names, entries)):
        words = name.split(" <- ")[0]
        total = entry["sent_bytes"]["total"] if "tile" in entry else entry["sent_bytes"]
        assert sum(bar.get_width() for bar in bars.get((False, y), [])) == pytest.approx(total)
        label = sent.texts[y].get_text()
        assert label.split(",")[0] == size(total) and size(total) in lines[words]
        if entry["saving"] and entry["saving"] > 0:
            assert f"{percent(entry['saving'])} less" in label and percent(entry["saving"]) in lines[words]
        if entry["times_least"]:
            assert (
                f"{entry['times_least']:.3g} x least" in label and f" {entry['times_least']:.3g} " in f"{lines[words]} "
            )
        if "tile" in entry:
            assert (" <- " in name) == (entry["tile"] in (data["auto"], data["tile"])) == ("<-" in lines[words])
            assert sum(bar.get_width() for bar in bars[True, y]) == pytest.approx(entry["seconds"])
            assert f"{duration(entry['seconds'])}, {percent(entry['waiting'])} waits" in texts(times)
            assert duration(entry["seconds"]) in lines[words]
    (least,) = {line.get_xdata()[0] for line in sent.lines} or {0}
    assert least == data["least_sent_bytes"]
    shown = next(entry for entry in data["tiles"] if entry["tile"] == data["tile"])
    assert f"{duration(shown['seconds'])} predicted" in figure.get_suptitle()


def test_planes_are_drawn_as_planes_of_all_ranks(monkeypatch, capsys, tmp_path):
    """What the table saves, what the passes take of its time, and which ranks a plane has."""
    figure, table, _ = plan(monkeypatch, capsys, tmp_path, f"{PLANES} --tile mesh")
    matrix, _, mesh, sent, _, forward = figure.axes
    assert "in one of 8 planes" in title(matrix) and "n of plane p is rank 8 n + p" in title(mesh)
    assert {"A = 1 column", "B = 8 rows"} < set(texts(mesh)) and "of a plane in the forward pass" in title(forward)
    assert any("80.8 % less" in text for text in texts(sent)) and "80.8 %" in table
    assert "8x1x8 USP <- auto" in [label.get_text() for label in sent.get_yticklabels()]
    assert "regrouping before and after" in figure.get_suptitle()


def test_the_mesh_says_that_a_is_columns(monkeypatch, capsys, tmp_path):
    figure, table, _ = plan(monkeypatch, capsys, tmp_path, "--ranks 6 --seqlen 600 --heads 1 --head-dim 8 --tile 3x2")
    _, tile, mesh = figure.axes[:3]
    assert {"A = 3 columns", "B = 2 rows"} < set(texts(mesh)) and "A x B = 3 x 2" in title(mesh)
    assert "A x B = 3 x 2 blocks" in title(tile)
    places = {text.get_text(): text.get_position() for text in mesh.texts if text.get_text().isdigit()}
    assert {number: (int(x), int(y)) for number, (x, y) in places.items()} == {
        str(3 * y + x): (x, y) for y in range(2) for x in range(3)
    }
    assert "mesh of tile 3x2: A = 3 columns x B = 2 rows, rank = 3 * row + column" in table


def read(figure):
    """Every text that can be seen, with its box in pixels."""
    figure.canvas.draw()
    seen = [figure._suptitle]
    for axes in figure.axes:
        legend = axes.get_legend()
        seen += [axes._left_title, *axes.texts, *(legend.get_texts() if legend else [])]
        if axes.axison:
            for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
                ticks = zip(axis.get_ticklocs(), axis.get_ticklabels())
                seen += [axis.label, *(label for at, label in ticks if min(limits) <= at <= max(limits))]
    return [(text.get_text(), text.get_window_extent()) for text in seen if text.get_visible() and text.get_text()]


@pytest.mark.parametrize(
    "words",
    [
        "--ranks 7 --seqlen 3 --heads 1 --head-dim 1 --causal",
        PLANES + " --direction both",
        "--ranks 16 --seqlen 262144 --heads 32 --kv-heads 8 --head-dim 128 --causal --window 4096,0 --tile 16x1",
        "--ranks 12 --seqlen 32768 --heads 6 --head-dim 64 --documents cuts.txt --direction backward --tile 3x4",
        "--ranks 256 --seqlen 262144 --heads 32 --head-dim 64 --schedule greedy --layout zigzag --tile 32x4x2",
        "--ranks 31 --seqlen 65536 --batch 2 --heads 8 --head-dim 64 --window 5000,0 --tile bands --direction both",
    ],
)
def test_texts_neither_overlap_nor_leave_the_page(monkeypatch, capsys, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cuts.txt").write_text("0 1000 1500 9000 20000 20001 32768")
    figure, *_ = plan(monkeypatch, capsys, tmp_path, words)
    width, height = figure.canvas.get_width_height()
    seen = read(figure)
    for i, (text, box) in enumerate(seen):
        assert box.x0 > -1 and box.y0 > -1 and box.x1 < width + 1 and box.y1 < height + 1, f"{text!r} leaves the page"
        for other, beside in seen[:i]:
            across, down = np.minimum(box.max, beside.max) - np.maximum(box.min, beside.min)
            assert across < 1 or down < 1, f"{text!r} lies on {other!r}"


def test_chunks_of_a_collective_move_if_any_rank_of_the_row_needs_them(monkeypatch, capsys, tmp_path):
    """They are counted and drawn as moving; what moves in part is said."""
    cuts = tmp_path / "cuts.txt"
    cuts.write_text("0 1000 1500 9000 20000 20001 32768")
    figure, *_ = plan(
        monkeypatch,
        capsys,
        tmp_path,
        "--ranks 12 --seqlen 32768 --heads 6 --head-dim 64 --causal --layout contiguous --mesh-layout contiguous "
        f"--tile 3x4 --schedule collective --documents {cuts}",
    )
    tile = figure.axes[1]
    labels = [text for text in texts(tile) if text.startswith(("in:", "out:"))]
    for label in labels:
        _, count, kind, *_ = label.split()
        assert (int(count) > 0) == ("(0 B)" not in label) and len(patches(tile, f"{kind} moved")) == int(count)
    assert any("0 B" not in label for label in labels)


def test_page_of_pieces(monkeypatch, capsys, tmp_path):
    """The KV heads, with the rank of every piece and a frame around it; the bars of all tiles; the slowest rank."""
    words = "--ranks 7 --seqlen 4096 --heads 8 --kv-heads 2 --head-dim 64 --causal --tile bands --steps"
    figure, _, data = plan(monkeypatch, capsys, tmp_path, words)
    *heads, sent, _, forward = figure.axes
    assert [title(axes) for axes in heads] == ["KV head 0", "KV head 1"]
    pieces = [(piece["kv_head"], rank) for rank, of in enumerate(data["steps"]["forward"]["ranks"]) for piece in of]
    drawn = {(head, int(text)) for head, axes in enumerate(heads) for text in texts(axes)}
    assert drawn <= set(pieces) and {rank for _, rank in drawn} == set(range(7))  # narrow ones have no number
    assert sum(len(axes.lines) for axes in heads) == len(pieces)
    assert any(label.get_text().startswith("bands <-") for label in sent.get_yticklabels())
    assert "which ends last in the forward pass" in title(forward)
    assert "tile bands, pieces schedule" in figure.get_suptitle()


def test_page(monkeypatch, capsys, tmp_path):
    """The tile that the table marks, its slowest rank, and its predicted time."""
    figure, table, _ = plan(
        monkeypatch,
        capsys,
        tmp_path,
        "--ranks 12 --seqlen 12000 --heads 4 --head-dim 64 --causal --layout contiguous --mesh-layout contiguous "
        "--tile 3x4 --direction both --schedule greedy",
    )
    matrix, tile, _, _, _, forward, backward = figure.axes
    assert "12 ranks, batch 1, 12000 tokens" in figure.get_suptitle() and "tile 3x4, greedy" in figure.get_suptitle()
    problem, layout = Problem(12000, 4, 64, causal=True), Layout("contiguous", 12000, 12)
    shape = Tile(1, 3, 4)
    load = Load(Work(problem.whole_mask, layout, layout), shape)
    runs = [
        simulate(cost.build("greedy", shape, "direct", problem, direction=direction), problem, load, DEFAULT)
        for direction in ("forward", "backward")
    ]
    rank = int(runs[0].steps[-1].ended.argmax())
    assert len(patches(matrix, "tile")) == 4 and patches(matrix, "tile")[0][1] == rank // 3 * 3
    assert f"Rank {rank}, forward: A x B = 3 x 4 blocks" in title(tile)
    moved = load.moved("KV")[:, rank].sum() * formulas.token_bytes(problem)["KV"]
    assert any(size(moved) in text for text in texts(tile))
    for axes, run in zip((forward, backward), runs):
        assert f"in the {run.direction} pass: " in title(axes)
        assert max(stop for _, stop in spans(axes, "blocks") + spans(axes, "waiting")) == pytest.approx(
            run.steps[-1].ended[rank]
        )
        assert axes.get_xlim() == (0, max(run.seconds for run in runs))
    marked = next(line for line in table.splitlines() if line.startswith("3x4"))
    assert duration(sum(run.seconds for run in runs)) in marked
    both = ", ".join(f"{run.direction} {duration(run.seconds)}" for run in runs)
    assert f"predicted for machine default ({both})" in figure.get_suptitle()


@pytest.mark.parametrize("ranks, seqlen, panels", [(1, 100, 4), (2, 0, 6), (7, 3, 6)])
def test_page_of_little(monkeypatch, capsys, tmp_path, ranks, seqlen, panels):
    words = f"--ranks {ranks} --seqlen {seqlen} --heads 1 --head-dim 1 --causal --tile mesh"
    figure, *_ = plan(monkeypatch, capsys, tmp_path, words)
    assert len(figure.axes) == panels
    needed = {(i, j) for i in range(ranks) for j in range(i + 1) if i < seqlen} if seqlen < 100 else {(0, 0)}
    white = {
        (y, x)
        for patch in figure.axes[0].patches
        if patch.get_label() == "block" and patch.get_facecolor()[:3] == (1, 1, 1)
        for x, y in [patch.get_xy()]
    }
    assert white == {(i, j) for i in range(ranks) for j in range(ranks)} - needed
