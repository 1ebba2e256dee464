"""Published methods in the table of `mpiattn plan`: each has one line, with its name."""

import json
import os

import pytest

from mpiattn.cli import main

SHAPE = ["--seqlen", "4096", "--head-dim", "8", "--causal"]


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())  # main sets the BLAS variables


def plan(capsys, words):
    """The JSON of `mpiattn plan` and the names at the beginning of the table's lines."""
    assert main(["plan", *words.split(), *SHAPE, "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert main(["plan", *words.split(), *SHAPE]) == 0
    text = capsys.readouterr().out
    return data, text, [line.split("  ")[0] for line in text.splitlines()]


@pytest.mark.parametrize(
    "words, methods, others",
    [
        ("--ranks 8 --heads 8 --kv-heads 4", {"2x1x4": "USP", "4x1x2": "USP", "8x1x1": None}, ["Ulysses"]),
        ("--ranks 4 --heads 4", {"1x4": "Ring", "4x1": "Q-ring", "2x1x2": "USP", "4x1x1": "Ulysses"}, []),
        # planes split the batch
        ("--ranks 4 --heads 4 --batch 2", {"2x1x2": None, "4x1x1": None}, ["Ulysses"]),
        ("--ranks 8 --heads 4 --batch 2", {"2x1x4": None, "8x1x1": None}, ["Ulysses", "USP 4x2, no mask"]),
        ("--ranks 1 --heads 4", {"1x1": None}, []),
    ],
)
def test_a_method_has_one_line(capsys, words, methods, others):
    """Of tiles those are called Ulysses or USP that are; a line without a tile is of what no tile is."""
    data, _, names = plan(capsys, words)
    listed = {tile["tile"]: tile["method"] for tile in data["tiles"]}
    assert {tile: listed[tile] for tile in methods} == methods
    assert [other["method"] for other in data["others"]] == others
    named = [method for method in listed.values() if method == "Ulysses"] + [
        name for name in names if name == "Ulysses"
    ]
    assert len(named) <= 1
    for tile, method in methods.items():
        assert (f"{tile} {method}" if method else tile) in names


def test_why_ulysses_is_not_possible(capsys):
    _, text, _ = plan(capsys, "--ranks 8 --heads 8 --kv-heads 4")
    why = "4 KV heads cannot be divided among 8 ranks; 8x1x1 has each KV head on 2 ranks"
    assert f"Ulysses: not possible, {why}" in text
    _, text, _ = plan(capsys, "--ranks 7 --heads 8")
    assert "Ulysses: not possible, 8 KV heads cannot be divided among 7 ranks\n" in text


def test_one_figure_of_usp(capsys):
    """A causal mask leaves it less to send than the formula without a mask says."""
    data, text, _ = plan(capsys, "--ranks 64 --heads 32 --kv-heads 8")
    assert text.count("8x1x8 USP") == 1 and "USP 8x8" not in text
    assert [other["method"] for other in data["others"]] == ["Ulysses"] and "not_possible" in data["others"][0]


def test_a_halo_exchange_of_blocks(capsys):
    """Of the caller's own layout; as many bytes as a flat mesh sends that computes in it."""

    def planned(mask, dims):
        words = "plan --ranks 16 --heads 1 --head-dim 64 --schedule greedy --json - --grid 64x128 --dims".split()
        assert main([*words, dims, "--mask", mask]) == 0
        data = json.loads(capsys.readouterr().out)
        return data["tiles"], {other["method"]: other.get("sent_bytes") for other in data["others"]}

    blocks = 2 * (24 * 40 - 16 * 32), 2 * (20 * 40 - 16 * 32)  # points around a block: inner ones, and at the edges
    _, others = planned("neighborhood 9x9 cyclic=1", "4x4")
    assert others["halo exchange"] == sum(blocks) / 4 * 2 * 64 * 4
    rows = 14 * 8 * 128, 2 * 5 * 128  # the window of the first row is shifted, by 4
    tiles, others = planned("neighborhood 9x9 cyclic=1", "16x1")
    assert others["halo exchange"] == sum(rows) / 16 * 2 * 64 * 4
    (flat,) = (tile for tile in tiles if tile["tile"] == "1x16")
    assert (flat["mesh_layout"], flat["sent_bytes"]["total"]) == ("grid", others["halo exchange"])
    _, others = planned("global 1 | neighborhood 9x9", "4x4")
    assert "halo exchange" not in others, "all ranks see the first token"
