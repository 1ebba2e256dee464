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
