"""Contradictions in what a program says of a grid are errors that say both sides; what only comes near is none."""

import ctypes
import pickle

import embedded
import numpy as np
import pytest
from mpi4py import MPI

from mpiattn import ArgumentError, Layout, MeshAttention, masks

GRID = 12, 16


def plan(comm, mask, layout="auto", **how):
    return MeshAttention(comm, seqlen=192, heads=1, head_dim=8, mask=mask, layout=layout, **how)


def refused(comm, says, mask, layout="auto"):
    """Every rank has the one error, which has these words."""
    with pytest.raises(ArgumentError) as raised:
        plan(comm, mask, layout)
    text = str(raised.value)
    assert all(word in text for word in says), text
    assert comm.allgather(text) == [text] * comm.size


def made(comm, *given, **how):
    """A plan that is made and runs."""
    with plan(comm, *given, **how) as some:
        q = np.ones((1, len(some.positions), 1, 8), np.float32)
        some.forward(q, q, q)


def cart_of(comm, dims=None, periods=(False, False), **how):
    return comm.Create_cart(dims or MPI.Compute_dims(comm.size, 2), periods, **how)


def test_the_grid_of_the_mask_is_not_that_of_the_layout(comm):
    says = ["grid=16x12", "layout is of a grid of 12x16", "same order"]
    refused(comm, says, masks.neighborhood((16, 12), 5), Layout.grid(GRID, (comm.size, 1)))
    says = ["grid=12x16 order=fortran", "a grid of 16x12, in Fortran's order too"]
    refused(comm, says, masks.neighborhood((12, 16), 5, order="fortran"), Layout.grid(GRID, (comm.size, 1)))
    mixed = masks.global_tokens(2) | masks.neighborhood((8, 24), 5)
    refused(comm, ["grid=8x24", "12x16", "the same grid"], mixed, Layout.grid(GRID, cart_of(comm)))


@pytest.mark.parametrize("order", ["c", "fortran"])
def test_a_period_of_the_communicator_is_an_edge_of_the_mask(comm, order):
    layout = Layout.grid(GRID, cart := cart_of(comm, periods=(False, True)), order=order)
    says = ["neighborhood 5x3 grid=12x16", "the periods (False, True)", "cyclic"]
    refused(cart, says, masks.neighborhood(GRID, (5, 3), order=order), layout)
    refused(cart, says, masks.neighborhood(GRID, (5, 3), cyclic=(True, False), order=order), layout)
    made(cart, masks.neighborhood(GRID, (5, 3), cyclic=(False, True), order=order), layout)


def test_the_layout_is_forgotten(comm, at_least):
    at_least(2)
    cart = cart_of(comm, (1, comm.size))
    says = ["layout is left out", "grid=12x16", f"dims (1, {comm.size})", "Layout.grid((12, 16), comm)"]
    refused(cart, says, masks.neighborhood(GRID, 5))
    made(cart, masks.neighborhood(GRID, 5), "contiguous")
    made(cart, masks.neighborhood((16, 12), 5, order="fortran"))  # whole lines of the memory
    says = ["Layout.grid((16, 12), comm, order='fortran')"]
    refused(cart_of(comm, (comm.size, 1)), says, masks.neighborhood((16, 12), 5, order="fortran"))


def test_the_layout_is_of_another_order_of_ranks(comm, at_least):
    at_least(2)
    layout, mask = Layout.grid(GRID, cart := cart_of(comm)), masks.neighborhood(GRID, 5)
    refused(comm.Split(0, -comm.rank), ["its rank 0 is", f"rank {comm.size - 1} of comm"], mask, layout)
    refused(comm.Split(0, -comm.rank), ["another order"], None, layout)
    made(cart, mask, layout)
    made(comm, mask, layout)


def test_what_is_no_contradiction(comm):
    mask, cart = masks.neighborhood(GRID, 5, cyclic=(False, True)), cart_of(comm)
    made(comm, mask)
    made(comm, mask, "contiguous")
    made(cart, mask, Layout.grid(GRID, cart))  # a communicator for its dims alone
    line = comm.Create_cart([comm.size])
    made(line, mask)
    made(line, mask, Layout.grid(GRID, line))
    made(comm.Create_cart([comm.size], [True]), mask)
    made(again := cart_of(comm, periods=(False, True), reorder=True), mask, Layout.grid(GRID, again))
    made(cart, mask, Layout.grid((12, 4, 4), cart))  # axes that the mask has as one
    made(cart, masks.neighborhood((12, 4, 4), 3), Layout.grid(GRID, cart))
    made(cart, masks.neighborhood((12, 16, 1), (3, 3, 1)), Layout.grid(GRID, cart))
    made(cart, masks.sphere([16] * 12, 0.3), Layout.grid(GRID, cart))
    made(cart, masks.sphere([16] * 12, 0.3))
    made(cart, masks.causal())
    turning = cart_of(comm, periods=(True, True))
    blocks = Layout.grid(GRID, turning)
    made(turning, masks.neighborhood(GRID, (1, 16)), blocks)  # no window has an edge
    made(turning, masks.neighborhood(GRID, (12, 1)), blocks)
    made(turning, masks.neighborhood(GRID, (2**62, 1), edge="clipped"), blocks)
    made(turning, None, blocks)
    made(turning, masks.neighborhood(GRID, 5), Layout.grid(GRID, tuple(turning.dims)))
    made(comm, masks.neighborhood(GRID, 5), pickle.loads(pickle.dumps(blocks)))


def test_layouts_apart_and_plans_alike(comm, at_least):
    at_least(2)
    cart = cart_of(comm, periods=(False, True))
    lines, layout = Layout("contiguous", 192, comm.size), Layout.grid(GRID, cart)
    good = masks.neighborhood(GRID, 5, cyclic=(False, True))
    with plan(cart, good, (lines, layout)) as some, some.like() as other:
        assert (other.positions_k == some.positions_k).all()
    refused(cart, ["the periods"], masks.neighborhood(GRID, 5), (lines, layout))


@embedded.needed
def test_c_programs_have_these_errors(c, comm):
    cart = cart_of(comm, (1, comm.size), (True, False))
    shape = "heads=1, head_dim=8"
    wrong = {
        "grid=12x16, mask=neighborhood 5": ["the periods (True, False)", "grid=12x16"],
        "grid=16x12, order=fortran, mask=neighborhood 5": ["grid=16x12 order=fortran", "the periods (True, False)"],
        "grid=12x16, mask=neighborhood 5 grid=16x12": ["grid=16x12", "layout is of a grid of 12x16"],
        "grid=12x16, order=fortan": ["order is 'fortan'", "fortran"],
        "grid=12x16, sizes=12x1,1": ["sizes[1] is (1, 1)"],
        "seqlen=192, order=fortran": ["order is 'fortran', given without grid"],
    }
    if comm.size > 1:
        wrong["seqlen=192, mask=neighborhood 5 grid=12x16"] = ["layout is left out", "the option grid"]
    for text, says in wrong.items():
        status, error = c.fails("plan_create_text", cart.py2f(), f"{text}, {shape}", ctypes.byref(embedded.Handle()))
        assert status == embedded.ARGUMENT and all(word in error for word in says), error
        assert comm.allgather(error) == [error] * comm.size
    good = "grid=16x12, order=fortran, mask=neighborhood 5 cyclic=0"
    plan = c.new("plan_create_text", cart.py2f(), f"{good}, {shape}")
    c.ok("plan_free", ctypes.byref(plan))
    cart.Free()
