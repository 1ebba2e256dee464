"""The halo exchanges by hand that plans are measured against: right, and no more bytes than the keys that are seen."""

import numpy as np
import pytest
from mpi4py import MPI
from runs import agreed, on

from mpiattn import backends
from mpiattn.bench import halo
from mpiattn.comm.peers import Peers
from mpiattn.errors import ArgumentError
from mpiattn.problem.layout import Layout
from mpiattn.problem.problem import Problem


def near(size, kernel, cyclic):
    """Which points of an axis see which, from the definition: bool (size, size)."""
    apart = np.arange(size) - np.arange(size)[:, None]
    if cyclic:
        apart = (apart + kernel // 2) % size - kernel // 2
    return (apart >= -(kernel // 2)) & (apart < kernel - kernel // 2)


def check(comm, options, layout, sees):
    """The exchange that the options ask for against dense attention, and its bytes against the keys that are seen."""
    case = (halo._Grid if "--grid" in options else halo._Window)(comm.size, halo._arguments().parse_args(options))
    tokens, heads, dim = layout.seqlen, 2, 8
    problem = Problem(tokens, heads, dim, dtype="float64", **case.mask)
    cart = comm.Create_cart(case.dims, case.periods)
    exchange = case.exchange(Peers(cart), cart, backends.get("numpy"), problem)
    q, k, v = np.random.default_rng(0).standard_normal((3, tokens, heads, dim))
    own = layout.positions(comm.rank)
    out = np.full((len(own), heads, dim), np.nan)
    for _ in range(2):  # what is left of the first must not be in the second
        exchange.forward(q[own], k[own], v[own], out)
    cart.Free()
    scores = np.where(sees[own], np.einsum("ihd,jhd->hij", q[own], k) / dim**0.5, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    wanted = np.einsum("hij,jhd->ihd", weights / weights.sum(axis=-1, keepdims=True), v)
    off = np.abs(out - wanted).max()
    others = [layout.positions(rank) for rank in range(comm.size) if rank != comm.rank]
    seen = sum(int(sees[at][:, own].any(axis=0).sum()) for at in others) * 2 * heads * dim * 8
    agreed(comm, None if off < 1e-12 else f"off by {off}")
    agreed(comm, None if exchange.sent == seen else f"{exchange.sent} bytes are sent, {seen} are seen")


@on(4, 6)
@pytest.mark.parametrize("cyclic", ["1", "0", "0,1", ""])
@pytest.mark.parametrize("kernel", [(3, 5), (4, 2), (1, 3)])
def test_grid(group, kernel, cyclic):
    """Uneven blocks, whose rows and columns are not multiples of anything; axes of one, two and more blocks."""
    for dims in ((2, group.size // 2), (group.size, 1), (1, group.size)):
        shape = 4 * dims[0] + 1, 5 * dims[1] + 1
        rows, columns = (
            near(size, points, str(axis) in cyclic.split(",")) for axis, (size, points) in enumerate(zip(shape, kernel))
        )
        texts = ("x".join(map(str, numbers)) for numbers in (shape, dims, kernel))
        options = [word for pair in zip(("--grid", "--dims", "--kernel"), texts) for word in pair]
        check(group, [*options, "--cyclic", cyclic], Layout.grid(shape, dims), np.kron(rows, columns))


@on(4)
def test_window(group):
    for tokens, window in ((30, 7), (9, 0)):
        apart = np.arange(tokens)[:, None] - np.arange(tokens)
        options = ["--seqlen", str(tokens), "--window", str(window)]
        check(group, options, Layout("contiguous", tokens, group.size), (apart >= 0) & (apart <= window))


@pytest.mark.parametrize(
    "options, message",
    [
        ("--dims 1x2", "--dims is given without --grid"),
        ("--kernel 3x3", "--kernel is given without --grid"),
        ("--cyclic 0", "--cyclic is given without --grid"),
        ("--grid 4x4", "--kernel is missing"),
        ("--grid 4x4 --kernel 3", "--kernel is 3; it must have two axes"),
        ("--grid 4x4x4 --kernel 3x3", "--grid is 4x4x4; it must have two axes"),
        ("--grid 4x4 --kernel 3x3 --cyclic 2", "--cyclic is 2; it must be axes of --grid: 0, 1 or 0,1"),
        ("--grid 4x4 --kernel 3x3 --window 5", "--window is given with --grid"),
        ("--grid 4x4 --kernel 3x3 --seqlen 16", "--seqlen is given with --grid"),
        ("--grid 4x4 --kernel 3x5", "may be at most 4"),
    ],
)
def test_arguments(options, message):
    args = halo._arguments().parse_args(options.split())
    with pytest.raises(ArgumentError, match=message):
        (halo._Window if args.grid is None else halo._Grid)(1, args)


def test_windows_wider_than_a_block():
    """Keys would have to come from further away than a neighbour."""
    for options, message in (
        ("--seqlen 8 --window 9", "window is 9; by hand it must be at most a rank's 8 tokens"),
        ("--grid 4x4 --kernel 5x3", "--kernel has 5 points along axis 0; by hand it may have at most the 4"),
    ):
        args = halo._arguments().parse_args(options.split())
        case = (halo._Window if args.grid is None else halo._Grid)(1, args)
        cart = MPI.COMM_SELF.Create_cart(case.dims, case.periods)
        with pytest.raises(ArgumentError, match=message):
            case.exchange(Peers(cart), cart, backends.get("numpy"), Problem(case.seqlen, 1, 8, **case.mask))
        cart.Free()
