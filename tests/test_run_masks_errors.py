"""Wrong gradients' inputs, masks and documents: one message on all ranks, a non-zero code, no OUT."""

import h5py
import numpy as np
import pytest
from files import write_input
from test_run_errors import fails


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.h5"


def test_no_dout(tmp_path, out):
    assert "no dataset 'dout'" in fails(write_input(tmp_path / "in.h5"), out, "--backward")


@pytest.mark.parametrize("dout", [np.zeros((1, 66, 4, 16), "f4"), np.zeros((1, 67, 4, 16), "f8"), np.zeros(3, "f4")])
def test_wrong_dout(tmp_path, out, dout):
    message = fails(write_input(tmp_path / "in.h5", dout=dout), out, "--backward")
    assert f"its dout is {dout.shape} in {dout.dtype}; it must be" in message
    assert "(1, 67, 4, 16) in float32" in message


@pytest.mark.draw(1)
@pytest.mark.parametrize("dtype, other", [("bfloat16", "float16"), ("float16", "bfloat16"), ("float32", "bfloat16")])
def test_mixed_dtypes(tmp_path, out, dtype, other):
    """bfloat16 is told from what h5py reads it as."""
    source, foreign = tmp_path / "in.h5", tmp_path / "other.h5"
    write_input(source, dtype=dtype)
    write_input(foreign, dtype=other)
    with h5py.File(source, "r+") as file, h5py.File(foreign) as given:
        del file["v"]
        given.copy("v", file)
    assert f"{dtype}, {dtype}, {other}" in fails(source, out)


@pytest.mark.draw(1)
@pytest.mark.parametrize("window", ["5", "1,2,3", "a,b", "1.5,0", ""])
def test_window_that_cannot_be_read(tmp_path, out, window):
    message = fails(write_input(tmp_path / "in.h5"), out, "--window", window, code=2)
    assert f"--window: {window!r} is not a window; write LEFT,RIGHT" in message


@pytest.mark.draw(2)
@pytest.mark.parametrize(
    "option, says",
    [
        ("--window=-2,0", "window is (-2, 0); it must be"),
        ("--softcap=-1", "softcap is -1.0; it must be positive"),
        ("--softcap=nan", "softcap is nan"),
        ("--prefix=-1", "prefix is -1"),
        ("--causal-block=0", "--causal-block is 0"),
        ("--wire-dtype=float64", "--wire-dtype is 'float64'; it may be"),
    ],
)
def test_options(tmp_path, out, option, says):
    assert says in fails(write_input(tmp_path / "in.h5"), out, option)


def test_narrow_wire_on_the_ring_route(tmp_path, out):
    assert "on the ring route" in fails(
        write_input(tmp_path / "in.h5"), out, "--wire-dtype", "float16", "--route", "ring"
    )


@pytest.mark.draw(2)
@pytest.mark.parametrize(
    "text, says",
    [
        ("0 40 20", "--documents is [ 0 40 20]; it must be"),
        ("0 68", "positions from 0 to 67"),
        ("0 30 60", "--documents is [ 0 30 60]; it must begin with 0 and end with 67, the number of tokens; if "),
        ("0 1\n2 3\n4 5", "one for each of 2"),
        ("0 half 67", "it holds 'half', it must hold whole numbers, between them blanks or commas"),
        ("0 3.5", "it holds '3.5', it must hold whole numbers"),
        ("", "it holds no numbers"),
    ],
)
def test_wrong_documents(tmp_path, out, text, says):
    (tmp_path / "cuts").write_text(text)
    assert says in fails(write_input(tmp_path / "in.h5", batch=2), out, "--documents", tmp_path / "cuts")


@pytest.mark.draw(2)
@pytest.mark.parametrize(
    "options, says",
    [
        (["--documents", "none"], "it must be a dataset of IN or a file, and there is none"),
        (["--documents", "/"], "it cannot be read"),
        (["--documents", "q"], "it must hold whole numbers"),
        (["--documents-k", "cuts"], "--documents-k is given without --documents"),
        (["--padding"], "--padding is given without --documents"),
        (["--documents", "cuts", "--documents-k", "more"], "--documents-k has 3 documents; it must have 2, as --doc"),
    ],
)
def test_documents_that_are_not_there(tmp_path, out, options, says):
    source = write_input(tmp_path / "in.h5", cuts=np.array([0, 9, 67]), more=np.array([0, 9, 10, 67]))
    assert says in fails(source, out, *options)


def test_documents_of_keys_are_missing(tmp_path, out):
    source = write_input(tmp_path / "in.h5", seqlen_k=80, cuts=np.array([0, 9, 67]))
    assert "--documents-k is not given" in fails(source, out, "--documents", "cuts")
