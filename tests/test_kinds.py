"""The table of what travels, and what follows from it, against figures worked out by hand."""

import pytest

from mpiattn.model.memory import chunk_bytes, gradient_bytes
from mpiattn.problem.problem import Problem
from mpiattn.schedule.kinds import GATHERED, IN_COLUMNS, KINDS, NAMES, REDUCED, TAG, arena_of, matrices, shapes
from mpiattn.schedule.travels import ELEMENTS, token_bytes

SHAPE = {"seqlen": 10, "heads": 4, "head_dim": 16}


def test_bytes_of_a_token():
    problem = Problem(**SHAPE, batch=3, kv_heads=2, value_dim=8, dtype="float16")
    keys = 3 * 2 * (16 + 8)
    assert token_bytes(problem) == {"Q": 3 * 4 * 16 * 2, "KV": keys * 2, "O": 3 * 4 * (8 + 1) * 4}
    assert token_bytes(problem, "backward") == {
        "Q": 3 * 4 * ((16 + 8) * 2 + 2 * 4),
        "KV": keys * 2,
        "dQ": 3 * 4 * 16 * 4,
        "dKV": keys * 4,
    }
    assert token_bytes(Problem(**SHAPE, dtype="float64"))["O"] == 4 * 17 * 8


def test_bytes_of_a_partial_on_the_wire():
    """Its lse keeps the dtype of accumulation."""
    problem = Problem(**SHAPE, kv_heads=2, wire_dtype="bfloat16")
    assert token_bytes(problem)["O"] == 4 * (16 * 2 + 4)
    backward = token_bytes(problem, "backward")
    assert backward["dQ"] == 4 * 16 * 2 and backward["dKV"] == 2 * 32 * 2
    assert token_bytes(Problem(**SHAPE, dtype="float64", wire_dtype="float32"), "backward")["dQ"] == 4 * 16 * 4


def test_bytes_of_a_ranks_own_arrays():
    problem = Problem(**SHAPE, kv_heads=2, value_dim=8, dtype="float16")
    assert chunk_bytes(problem, 5, 3) == 5 * 4 * (16 * 2 + 8 * 2 + 4) + 3 * 2 * 24 * 2
    assert gradient_bytes(problem, 5, 3) == 5 * 4 * (8 * 2 + 3 * 4 + 16 * 2) + 3 * 2 * 24 * 2


def test_kinds():
    assert GATHERED == ("Q", "KV") and IN_COLUMNS == ("KV", "dKV") and NAMES == ("Q", "KV", "O", "dQ", "dKV")
    assert REDUCED == {"forward": ("O",), "backward": ("dQ", "dKV")}
    assert [arena_of(name) for name in NAMES] == ["Q", "KV", "+O", "+dQ", "+dKV"]
    assert ELEMENTS == {"forward": (2, 2), "backward": (3, 4), "both": (5, 6)}
    assert matrices("backward", False) == ("Q", "dO", "dQ") and matrices("backward", True) == ("K", "V", "dK", "dV")


@pytest.mark.parametrize("direction", KINDS)
def test_every_array_has_a_tag_of_its_own(direction):
    tags = [TAG[name] + i for name, kind in KINDS[direction].items() for i in range(len(kind.arrays))]
    assert len(set(tags)) == len(tags)


def test_what_is_held_and_what_travels():
    problem = Problem(**SHAPE, batch=2, kv_heads=2, value_dim=8, dtype="float16", wire_dtype="bfloat16")
    assert shapes(problem, "forward") == {
        "Q": [((8, 16), "float16")],
        "KV": [((4, 16), "float16"), ((4, 8), "float16")],
        "O": [((8, 8), "float32"), ((8,), "float32")],
        "+O": [((8, 8), "bfloat16"), ((8,), "float32")],
    }
    assert shapes(problem, "backward") == {
        "Q": [((8, 16), "float16"), ((8, 8), "float16"), ((8,), "float32"), ((8,), "float32")],
        "KV": [((4, 16), "float16"), ((4, 8), "float16")],
        "dQ": [((8, 16), "float32")],
        "+dQ": [((8, 16), "bfloat16")],
        "dKV": [((4, 16), "float32"), ((4, 8), "float32")],
        "+dKV": [((4, 16), "bfloat16"), ((4, 8), "bfloat16")],
    }
