"""The choice for documents that calls will have, and `mpiattn plan --documents`; test_load.py has what it counts."""

import json
import os

import numpy as np
import pytest
from searches import choices, flat_choices

from mpiattn.cli import main
from mpiattn.problem.problem import Problem

SHORT = range(0, 16_385, 64)


def test_a_quick_search_finds_the_best():
    """As without documents: what is left out cannot be better."""
    rng = np.random.default_rng(1)
    for _ in range(6):
        seqlen, heads = int(rng.integers(64, 4096)), int(rng.choice([4, 6, 8]))
        problem = Problem(seqlen, heads, 32, causal=bool(rng.integers(2)), window=(int(rng.integers(500)), None))
        cuts = tuple(np.sort(rng.integers(0, seqlen + 1, int(rng.integers(2, 30)))).tolist())
        how = {"mask": problem.mask_of(cuts), "direction": str(rng.choice(["forward", "both"]))}
        best = choices(problem, 8, route="auto", **how)[0]
        quick = choices(problem, 8, route="auto", **how, every=None)[0]
        assert quick == best


def test_one_document_is_none():
    """The whole sequence as one document is chosen for as without documents, and a mesh needs the same memory."""
    problem = Problem(5000, 8, 64, causal=True)
    without = choices(problem, 12, meshes=True)[0]
    single = choices(problem, 12, mask=problem.mask_of((0, 5000)), meshes=True)[0]
    assert single._replace(seconds=0, waiting=0) == without._replace(seconds=0, waiting=0)
    assert single.seconds == pytest.approx(without.seconds, rel=0.02)


def test_short_documents_stay_where_they_are():
    """Documents that seldom cross the edge of a chunk send next to nothing. A mesh has the memory of any call."""
    problem = Problem(SHORT[-1], 8, 64)  # not causal: without documents no layout is better than another
    assert choices(problem, 16, mask=problem.mask_of(tuple(SHORT)))[0].sent_bytes == 0
    best = choices(problem, 16, mask=problem.mask_of(tuple(SHORT)), meshes=True)[0]
    assert best.tile.h == 1 and best.layouts == best.mesh_layouts and best.layouts[0].kind == "contiguous"
    assert best.sent_bytes == 0
    same = flat_choices(problem, 16, tiles=[best.tile], schedules=[best.schedule], layout_pairs=[best.layouts])[0]
    assert best.nbytes == same.nbytes and best.seconds < same.seconds / 50


def test_plan_of_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())  # main sets the BLAS variables
    path = tmp_path / "cuts.npy"
    np.save(path, np.array(SHORT))
    asked = ["plan", "--ranks=16", f"--seqlen={SHORT[-1]}", "--heads=8", "--head-dim=64", "--causal", "--documents"]
    assert main([*asked, str(path)]) == 0
    assert "causal in 256 documents" in capsys.readouterr().out
    assert main([*asked, str(path), "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["documents"] == 256
    auto = next(row for row in data["tiles"] if row["tile"] == data["auto"])
    assert auto["sent_bytes"]["total"] == 0 and auto["layout"] == "contiguous"
    assert main([*asked, "none.npy"]) == 1
    assert "--documents is 'none.npy'; it must be a file" in capsys.readouterr().err
    np.save(path, np.array([0, SHORT[-1] + 1]))
    assert main([*asked, str(path)]) == 1
    error = capsys.readouterr().err
    assert "--documents is [" in error and "it must be two or more positions from 0 to 16384" in error
