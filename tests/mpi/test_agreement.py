"""One rank's wrong argument is every rank's error: the same text, naming argument, value and what it may be."""

import numpy as np
import pytest
from dense import draw
from runs import my_chunks

from mpiattn import ArgumentError, Layout, MeshAttention
from mpiattn.agreement import agree_on, agreement
from mpiattn.errors import FileError, MpiattnError

SHAPE = {"seqlen": 24, "heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}


def same_error(comm, call, kind=ArgumentError):
    """The text of the error that `call` raises, after checking that all ranks raise the same."""
    with pytest.raises(MpiattnError) as caught:
        call()
    told = comm.allgather((type(caught.value).__name__, str(caught.value), caught.value.everywhere))
    assert len(set(told)) == 1, told
    assert type(caught.value) is kind and caught.value.everywhere
    return str(caught.value)


WRONG = [
    ("seqlen", -1, ["-1", "at least 0"]), ("seqlen", 2.5, ["2.5", "whole number"]), ("heads", 0, ["0", "at least 1"]),
    ("heads", True, ["True"]), ("kv_heads", 3, ["3", "divide heads", "4"]), ("head_dim", None, ["None"]),
    ("value_dim", -2, ["-2"]), ("batch", 0, ["0"]), ("seqlen_k", "many", ["many"]),
    ("dtype", "bfloat17", ["bfloat17", "float16, float32, float64"]), ("causal", 2, ["2", "True or False"]),
    ("scale", float("nan"), ["nan", "finite"]), ("scale", "big", ["big"]),
    ("tile", "3x99", ["3x99", "ring, qring or auto"]), ("tile", "square", ["square", "auto"]),
    ("tile", (1, 2, 3), ["1x2x3"]),
    ("layout", "diagonal", ["diagonal", "contiguous, striped, zigzag"]),
    ("layout", Layout("striped", 25, 1), ["seqlen=25", "24"]),
    ("schedule", "lazy", ["lazy", "greedy, collective, auto"]), ("route", "scenic", ["scenic", "direct, ring"]),
    ("backend", "abacus", ["abacus", "numpy"]), ("max_message", 0, ["0", "2^31"]),
    ("max_message", 2 ** 31, [str(2 ** 31)]),
]


@pytest.mark.parametrize(("name", "value", "parts"), WRONG)
def test_wrong_on_one_rank(comm, name, value, parts):
    guilty = comm.size - 1
    arguments = {**SHAPE, name: value} if comm.rank == guilty else SHAPE
    text = same_error(comm, lambda: MeshAttention(comm, **arguments))
    assert name in text and all(part in text for part in parts), text
    if comm.size > 1:
        assert f"on rank {guilty} of {comm.size}" in text


@pytest.mark.many
def test_wrong_on_every_rank(comm):
    text = same_error(comm, lambda: MeshAttention(comm, **{**SHAPE, "heads": 0}))
    assert " on rank" not in text


@pytest.mark.parametrize(("name", "value"), [("seqlen", 25), ("heads", 8), ("head_dim", 16), ("dtype", "float64"),
                                             ("causal", True), ("tile", "ring"), ("layout", "striped"), ("scale", 0.25),
                                             ("schedule", "collective"), ("route", "ring"), ("max_message", 999)])
def test_different_on_one_rank(comm, at_least, name, value):
    at_least(2)
    arguments = {**SHAPE, name: value} if comm.rank == 1 else SHAPE
    text = same_error(comm, lambda: MeshAttention(comm, **arguments))
    assert name in text and "rank 0" in text and "rank 1" in text and "same on every rank" in text
    MeshAttention(comm, **SHAPE).close()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_wrong_at_a_call(comm, name):
    with MeshAttention(comm, **SHAPE) as plan:
        good = dict(zip("qkv", my_chunks(plan, *draw(plan.problem))))
        expected = plan.forward(**good)
        for guilty in {0, comm.size - 1}:
            for wrong in (good[name][:, :-1], np.concatenate([good[name]] * 2, axis=1), good[name].astype("f8"), None):
                if wrong is not None and wrong.shape == good[name].shape and wrong.dtype == good[name].dtype:
                    continue                          # an empty chunk can't be shortened
                given = {**good, name: wrong} if comm.rank == guilty else good
                text = same_error(comm, lambda given=given: plan.forward(**given))
                assert text.startswith(name)
                if comm.size > 1:
                    assert f"rank {guilty}" in text
        again = plan.forward(**good)                  # the plan is as good as before
        assert all((a == b).all() for a, b in zip(expected, again))


def test_unchecked_call_raises_alone():
    from mpi4py import MPI
    with MeshAttention(MPI.COMM_SELF, **SHAPE) as plan, pytest.raises(ArgumentError, match=r"^q has shape"):
        plan.forward(*[np.zeros((1, 3, 4, 8), "f4")] * 3, check=False)


def test_any_exception_of_one_rank(comm):
    """Errors that are not mpiattn's, and files, arrive as mpiattn's."""
    def fail(error):
        with agreement(comm):
            if comm.rank == comm.size - 1:
                raise error
    assert "KeyError: 'x'" in same_error(comm, lambda: fail(KeyError("x")), MpiattnError)
    assert "no such thing" in same_error(comm, lambda: fail(FileNotFoundError("no such thing")), FileError)
    assert "out of it" in same_error(comm, lambda: fail(MemoryError("out of it")), MpiattnError)


def test_first_of_different_errors(comm):
    def fail():
        with agreement(comm):
            raise ArgumentError(f"wrong as rank {comm.rank} is")
    assert same_error(comm, fail).startswith("wrong as rank 0 is")


def test_agree_on_names_the_argument(comm, at_least):
    at_least(2)
    agree_on(comm, {"x": 1, "y": None})
    text = same_error(comm, lambda: agree_on(comm, {"x": 1, "y": comm.rank if comm.rank == 1 else None}))
    assert text.startswith("y is None on rank 0 but 1 on rank 1")
