"""Files of pictures: the same for the same picture, short, and whole or not written."""

import os
import runpy
import sys
import xml.etree.ElementTree as ElementTree

import launch
import pytest

from mpiattn.errors import ArgumentError, FileError
from mpiattn.plots import style
from mpiattn.plots.assignment import assignment
from mpiattn.plots.timeline import timeline
from mpiattn.schedule.tile import Tile
from mpiattn.schedule.timeline import StepTimes, Timeline

pytest.importorskip("matplotlib", reason="takes matplotlib (extra plot)")


def measured():
    return timeline([("measured", {0: Timeline("forward", (StepTimes(0.0, 5.0, 5.5),), (), 5.5)})])


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_the_same_picture_gives_the_same_file(tmp_path, kind):
    import matplotlib

    before = dict(matplotlib.rcParams)
    for name in ("one", "two"):
        style.save(measured(), str(tmp_path / f"{name}.{kind}"))
    assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"two.{kind}").read_bytes()
    assert sorted(os.listdir(tmp_path)) == [f"one.{kind}", f"two.{kind}"]
    assert dict(matplotlib.rcParams) == before, "the caller's settings are the caller's"
    start = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}[kind]
    assert (tmp_path / f"one.{kind}").read_bytes().startswith(start)


SVG = "{http://www.w3.org/2000/svg}"


def written(path):
    """The texts of an SVG file."""
    return ["".join(element.itertext()) for element in ElementTree.parse(path).iter(f"{SVG}text")]


@pytest.mark.skipif(not launch.DOCS.is_dir(), reason="takes the docs of a checkout")
def test_committed_pictures_say_what_is_drawn_now(tmp_path):
    """If not: python docs/figures/draw.py."""
    folder = launch.DOCS / "figures"
    figures = runpy.run_path(str(folder / "draw.py"))["figures"]()
    assert sorted(figures) == sorted(path.name for path in folder.glob("*.svg"))
    for name, figure in figures.items():
        style.save(figure, str(tmp_path / name))
        assert written(folder / name) == written(tmp_path / name), f"{name} is out of date"


def test_svg_is_text_and_short(tmp_path):
    style.save(assignment(Tile(1, 2, 3), 1), str(tmp_path / "a.svg"))
    text = (tmp_path / "a.svg").read_text()
    assert {"Blocks of 6 ranks, tile 2x3", "KV chunk", "KV5"} <= set(written(tmp_path / "a.svg"))
    root = ElementTree.fromstring(text)
    assert len(list(root.iter(f"{SVG}path"))) >= 36 + 6 + 3
    assert "<dc:date>" not in text and len(text) < 25_000
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(set(ids)) == len(ids)


def test_a_picture_that_cannot_be_written(tmp_path, monkeypatch):
    figure = measured()
    for path, message in ((tmp_path / "a.jpg", "must end in .png, .svg, .pdf"), (tmp_path / "svg", "must end in")):
        with pytest.raises(ArgumentError, match=rf"--plot is .*{path.name}'; it {message}"):
            style.save(figure, str(path), "--plot")
    with pytest.raises(FileError, match="there is no folder"):
        style.check("--plot", str(tmp_path / "no" / "a.svg"))
    (tmp_path / "a.svg").write_text("old")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure, "savefig", full)
    with pytest.raises(FileError, match=r"--plot is .*a\.svg'; it cannot be written: No space left"):
        style.save(figure, str(tmp_path / "a.svg"), "--plot")
    assert os.listdir(tmp_path) == ["a.svg"] and (tmp_path / "a.svg").read_text() == "old"


def test_a_benchmark_draws_what_it_measured(tmp_path):
    """Predicted above measured, both passes; the measured lanes end when the last run did."""
    launch.require_launch()
    command = [
        sys.executable,
        *"-m mpiattn bench --seqlen 96 --heads 2 --head-dim 8 --runs 1 --tile ring --direction both --plot".split(),
    ]
    launch.mpirun(3, [*command, tmp_path / "b.svg"])
    drawn = " ".join(ElementTree.parse(tmp_path / "b.svg").getroot().itertext())
    for text in (
        "forward, predicted for",
        "forward, measured",
        "backward, predicted for",
        "backward, measured",
        "96 tokens x 2 heads x 8",
        "tile 1x3",
    ):
        assert text in drawn
    assert "--plot" in launch.mpirun(3, [*command, tmp_path / "b.txt"], check=False).stderr
