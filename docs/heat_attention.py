"""Heat on a grid that an MPI program holds in blocks, and attention of every point to those around it.

    mpiexec -n 6 python -m mpi4py docs/heat_attention.py --grid 48 64 --window 7

The program is a finite-difference code as there are many: a Cartesian communicator, a block on each rank with a border
of ghost points, Sendrecv with derived datatypes.  What attention takes in such a code:

- a mask, `neighborhood`, with those axes cyclic that the communicator has periodic;
- a layout, `Layout.grid`, with the communicator and the lengths of the program's own blocks;
- q, k and v of the block's points in C order.  A block flattened is the rank's chunk: nothing is copied or sorted.

Every tenth step the points attend to each other, and what they get is added to the temperature.  A backward pass gives
the gradient of a loss with respect to the weights.  Weights are alike on all ranks, so their gradients are summed.

The norms that are printed are the same on any number of ranks, to about six digits: attention computes in float32, and
other blocks add in another order.
"""

import argparse
import math
import sys

import numpy as np
from mpi4py import MPI

import mpiattn

HEADS, DIM = 2, 8
DIFFUSION = 0.2  # of the heat step, stable up to 1/4
RATE = 0.5  # of what attention adds to the temperature
EVERY = 10  # steps from one attention to the next


class Field:
    """The temperature on this rank's block of the grid, and its halo of one point.

    sizes: by axis, the lengths of all blocks along it, as this program divides a grid.
    with_ghosts: the block with a border of ghost points, float64 (ny + 2, nx + 2).
    """

    def __init__(self, cart, grid):
        self.cart, self.grid = cart, grid
        dims, _, coords = cart.Get_topo()
        self.sizes = [[n * (i + 1) // parts - n * i // parts for i in range(parts)] for n, parts in zip(grid, dims)]
        self.shape = tuple(lengths[i] for lengths, i in zip(self.sizes, coords))
        starts = (sum(lengths[:i]) for lengths, i in zip(self.sizes, coords))
        y, x = (2 * np.pi * (start + np.arange(n)) / points for start, n, points in zip(starts, self.shape, grid))
        self.with_ghosts = np.zeros([n + 2 for n in self.shape])
        self.values[:] = np.cos(y[:, None] - 1) + np.exp(np.sin(2 * x)) * np.sin(3 * y[:, None])
        self.messages = [message for axis in (0, 1) for message in self._messages(axis)]

    @property
    def values(self):
        """The temperature without ghosts, a view (ny, nx)."""
        return self.with_ghosts[1:-1, 1:-1]

    def _messages(self, axis):
        """Both messages along an axis: (to whom, points that leave, from whom, ghosts that arrive), in datatypes."""
        n, size = self.shape[axis], list(self.shape)
        size[axis] = 1

        def line(at):
            """The points of the block, or ghosts, with the coordinate `at` along the axis."""
            starts = [1, 1]
            starts[axis] = at
            return MPI.DOUBLE.Create_subarray(self.with_ghosts.shape, size, starts).Commit()

        before, after = self.cart.Shift(axis, 1)
        return [(after, line(n), before, line(0)), (before, line(1), after, line(n + 1))]

    def exchange(self):
        """Fill the ghosts with the points of neighbours, and with the block's own at an edge that is not periodic."""
        t = self.with_ghosts
        t[0], t[-1], t[:, 0], t[:, -1] = t[1], t[-2], t[:, 1], t[:, -2]  # insulated
        for to, leaving, source, arriving in self.messages:  # PROC_NULL beyond an edge
            self.cart.Sendrecv([t, 1, leaving], to, 0, [t, 1, arriving], source, 0)

    def step(self):
        """One explicit step of the heat equation."""
        self.exchange()
        t = self.with_ghosts
        around = t[:-2, 1:-1] + t[2:, 1:-1] + t[1:-1, :-2] + t[1:-1, 2:]
        self.values[:] += DIFFUSION * (around - 4 * self.values)

    def features(self):
        """T, dT/dy, dT/dx and 1 of every point of the block in C order: float32 (points, 4)."""
        self.exchange()
        t = self.with_ghosts
        dy, dx = (t[2:, 1:-1] - t[:-2, 1:-1]) / 2, (t[1:-1, 2:] - t[1:-1, :-2]) / 2
        return np.stack([self.values, dy, dx, np.ones(self.shape)], axis=-1).astype(np.float32).reshape(-1, 4)

    def close(self):
        """Free the datatypes."""
        for _, leaving, _, arriving in self.messages:
            leaving.Free()
            arriving.Free()


def weights():
    """Alike on all ranks: (3, 4, heads * dim), which makes q, k and v of features; (heads * dim,), which reads out."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((3, 4, HEADS * DIM), np.float32) / 2, rng.standard_normal(HEADS * DIM, np.float32) / 16


def attend(field, plan, make_qkv, read_out):
    """Points attend to each other, and what they get is added to the field.

    Returns the loss, half the mean square of this change, and the gradient of the loss with respect to make_qkv.
    """
    features = field.features()
    q, k, v = (features @ make_qkv).reshape(3, 1, -1, HEADS, DIM)  # each (1, points of the block, heads, dim)
    out, lse = plan.forward(q, k, v)
    change = out.reshape(-1, HEADS * DIM) @ read_out  # (points,)
    field.values[:] += RATE * change.reshape(field.shape)
    points = math.prod(field.grid)
    dout = (change / points)[:, None] * read_out
    dqkv = plan.backward(dout.reshape(out.shape), q, k, v, out, lse)
    gradient = np.stack([features.T @ d.reshape(-1, HEADS * DIM) for d in dqkv])
    field.cart.Allreduce(MPI.IN_PLACE, gradient)
    return field.cart.allreduce(float(change @ change) / 2 / points), gradient


def run(args):
    """The steps, on all ranks; rank 0 prints."""
    periods = [axis in args.cyclic for axis in (0, 1)]
    cart = MPI.COMM_WORLD.Create_cart(MPI.Compute_dims(MPI.COMM_WORLD.size, 2), periods, reorder=True)
    if any(n < parts for n, parts in zip(args.grid, cart.dims)):
        raise mpiattn.ArgumentError(f"--grid is {args.grid}; it must have a point for each of {cart.dims} blocks")
    field = Field(cart, args.grid)
    plan = mpiattn.MeshAttention(
        cart,
        seqlen=math.prod(args.grid),
        heads=HEADS,
        head_dim=DIM,
        mask=mpiattn.masks.neighborhood(args.grid, args.window, cyclic=periods),
        layout=mpiattn.Layout.grid(args.grid, cart, field.sizes),
        tile=args.tile,
        direction="both",
    )
    with plan:
        make_qkv, read_out = weights()
        sent = cart.allreduce(plan.formula("forward"), MPI.MAX)
        if cart.rank == 0:
            print(f"blocks {cart.dims}, tile {plan.tile}, a rank sends up to {sent} bytes forward")
        for step in range(1, args.steps + 1):
            field.step()
            if step % EVERY:
                continue
            loss, gradient = attend(field, plan, make_qkv, read_out)
            norm = np.sqrt(cart.allreduce(float((field.values**2).sum())))
            if cart.rank == 0:
                print(f"step {step}: |T| {norm:.6e}  loss {loss:.6e}  |gradient| {np.linalg.norm(gradient):.6e}")
    field.close()
    cart.Free()


def main():
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Heat on a grid in blocks, and attention of points to those around.")
    parser.add_argument("--grid", type=int, nargs=2, default=[48, 64], help="points of both axes (default: 48 64)")
    parser.add_argument("--steps", type=int, default=30, help="attention follows every tenth (default: %(default)s)")
    parser.add_argument("--window", type=int, default=7, help="points seen along an axis (default: %(default)s)")
    parser.add_argument(
        "--cyclic", type=int, nargs="*", default=[0, 1], choices=(0, 1), help="axes that are (default: 0 1)"
    )
    parser.add_argument("--tile", default="auto", help="AxB, ring or auto (default: %(default)s)")
    args = parser.parse_args()
    try:
        run(args)
    except mpiattn.MpiattnError as error:  # the same on every rank: one of them says it
        if MPI.COMM_WORLD.rank == 0:
            print(f"heat_attention: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
