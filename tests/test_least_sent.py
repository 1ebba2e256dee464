"""The fewest bytes that ranks can send: against what tiles send, and against every choice of rows and keys."""

import json
import math
import os
import random

import pytest

from mpiattn.cli import main
from mpiattn.problem.problem import Problem
from mpiattn.schedule.least_sent import least_sent
from mpiattn.schedule.regroup import every_tile, mean_sent
from mpiattn.schedule.tile import parse_tile
from mpiattn.system.words import size

LONG = 1048576


def times_least(problem, tile, ranks):
    return mean_sent(problem, parse_tile(tile, ranks)) / least_sent(problem, ranks, problem.whole_mask.pairs())


def test_the_best_tiles_of_256_ranks():
    heads = Problem(LONG, 32, 128)
    assert times_least(heads, "32x2x4", 256) == pytest.approx(1.06, abs=0.005)
    assert times_least(heads, "32x1x8", 256) == pytest.approx(1.60, abs=0.005)
    assert times_least(heads, "1x256", 256) == pytest.approx(45.6, abs=0.1)
    assert times_least(heads, "32x2x2", 128) == pytest.approx(1.0, abs=0.005)  # a square plane of every head
    assert times_least(Problem(LONG, 32, 128, kv_heads=8), "8x2x16", 256) == pytest.approx(1.06, abs=0.005)
    # 4 d N (sqrt(H / P) - 1 / P) elements of a head, and the lse of its rows
    least = 4 * 128 * LONG * (math.sqrt(32 / 256) - 1 / 256) * 4
    assert least_sent(heads, 256, LONG**2) == pytest.approx(least, rel=0.005)
    assert least_sent(heads, 256, LONG**2, "both") == sum(
        least_sent(heads, 256, LONG**2, direction) for direction in ("forward", "backward")
    )


def test_ring_is_the_best_of_few_kv_heads_on_few_ranks():
    """Keys of all ranks are fewer bytes than queries of one."""
    assert times_least(Problem(LONG, 32, 128, kv_heads=8), "1x2", 2) == pytest.approx(1)
    assert times_least(Problem(4 * LONG, 4, 64, seqlen_k=1024), "1x8", 8) == pytest.approx(1)
    assert times_least(Problem(1024, 4, 64, seqlen_k=LONG * 4), "8x1", 8) == pytest.approx(1, rel=0.02)  # and lse


def test_no_tile_sends_less():
    rng = random.Random(3)
    for _ in range(300):
        ranks, kv_heads = rng.choice([2, 3, 4, 6, 7, 8, 12, 16, 32]), rng.choice([1, 2, 4, 8])
        problem = Problem(
            ranks * rng.choice([1, 3, 50]),
            kv_heads * rng.choice([1, 2, 8]),
            rng.choice([1, 8, 64]),
            kv_heads=kv_heads,
            batch=rng.choice([1, 2, 4]),
            seqlen_k=ranks * rng.choice([1, 5, 200]),
            value_dim=rng.choice([1, 16, 64]),
            dtype=rng.choice(["float16", "float32", "float64"]),
        )
        for direction in ("forward", "backward"):
            least = least_sent(problem, ranks, problem.whole_mask.pairs(), direction)
            for tile in every_tile(ranks, problem.heads, kv_heads, problem.batch):
                assert mean_sent(problem, tile, direction) >= least * (1 - 1e-12), (problem, tile, direction)


@pytest.mark.parametrize("kv_heads, seqlen, seqlen_k", [(3, 9, 9), (3, 27, 3), (2, 3, 27), (1, 9, 9)])
def test_no_choice_of_rows_and_keys_takes_less(kv_heads, seqlen, seqlen_k):
    """Of every group of heads any rows and any keys: the cheapest that have a rank's share of the pairs."""
    ranks, problem = 3, Problem(seqlen, 2 * kv_heads, 5, kv_heads=kv_heads, seqlen_k=seqlen_k)
    of_query, of_key, whole, own = 4 * (5 + 5 + 1), 4 * (5 + 5), 2 * seqlen, 2 * seqlen // ranks
    choices = {}  # the least bytes by pairs, of a group
    for rows in range(own, whole + 1):
        for keys in range(seqlen_k // ranks, seqlen_k + 1):
            sent = of_query * (rows - own) + of_key * (keys - seqlen_k // ranks)
            choices[rows * keys] = min(sent, choices.get(rows * keys, sent))
    for pairs in (seqlen * seqlen_k, seqlen * seqlen_k // 2):
        share = problem.heads * pairs / ranks
        totals = {0: 0}
        for _ in range(kv_heads):
            following = {}
            for had, before in totals.items():
                for more, sent in choices.items():
                    reached = min(had + more, share)
                    following[reached] = min(before + sent, following.get(reached, math.inf))
            totals = following
        least = least_sent(problem, ranks, pairs)
        assert least <= totals[share] * (1 + 1e-12)
        assert least >= 0.85 * totals[share] - of_query - of_key, "whole rows and keys take a little more"


def test_nothing_has_to_be_sent():
    assert least_sent(Problem(100, 4, 8), 1, 100 * 100) == 0
    assert least_sent(Problem(0, 4, 8), 4, 0) == 0
    assert least_sent(Problem(3, 1, 1, causal=True), 7, 6) == 0


def plan(capsys, *words):
    """The table of `mpiattn plan` and its JSON."""
    assert main(["plan", *map(str, words)]) == 0
    text = capsys.readouterr().out
    assert main(["plan", *map(str, words), "--json", "-"]) == 0
    return text, json.loads(capsys.readouterr().out)


def test_plan_says_how_far_tiles_are_from_it(capsys, monkeypatch):
    """Each tile and method, in the table and in JSON; the legend has the bytes."""
    monkeypatch.setattr(os, "environ", os.environ.copy())  # main sets the BLAS variables
    shape = "--seqlen", LONG, "--heads", 32, "--head-dim", 128
    text, data = plan(capsys, "--ranks", 256, *shape)
    lines = text.splitlines()
    end = lines[2].index("x least") + len("x least")
    shown = {line.split()[0]: line[:end].split()[-1] for line in lines[4:20] if line}
    assert (shown["32x2x4"], shown["1x256"], shown["16x16"]) == ("1.06", "45.6", "5.37")
    least = data["least_sent_bytes"]
    assert least == least_sent(Problem(LONG, 32, 128), 256, LONG**2)
    assert f"how many times {size(least)}, below which no schedule gets" in text
    for entry in (*data["tiles"], *(other for other in data["others"] if "sent_bytes" in other)):
        sent = entry["sent_bytes"]
        assert entry["times_least"] == (sent["total"] if isinstance(sent, dict) else sent) / least
    text, data = plan(capsys, "--ranks", 4, *shape, "--window", "1,0")
    assert data["least_sent_bytes"] == 0
    assert "\nx least    unknown, as no bytes are known that every schedule has to send\nmemory" in text
    text, data = plan(capsys, "--ranks", 4, *shape, "--causal")
    assert data["least_sent_bytes"] == least_sent(Problem(LONG, 32, 128), 4, LONG * (LONG + 1) // 2)
    assert "Of a mask only the number of pairs counts" in text
    text, data = plan(capsys, "--ranks", 1, *shape)
    assert data["least_sent_bytes"] == 0 and data["tiles"][0]["times_least"] is None
