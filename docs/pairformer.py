"""A small pairformer trained with its tokens, and its pairs of tokens, spread over the ranks of an MPI program.

    mpiexec -n 4 python docs/pairformer.py --tile 2x2
    mpiexec -n 6 python docs/pairformer.py --tile 2x3

Models of proteins hold a vector for each token and one for each pair of tokens.  A projection of the pair's vector is
added to the score of the pair: attention with pair bias (AlphaFold 3, algorithm 24).  What is worth copying from here:

- A rank holds the vectors of its own tokens, plan.positions, and of the pairs of plan.bias_positions, its tile.
- The bias is made of the tile where the tile lies.  Neither it nor its gradient is sent to another rank, and the
  gradient goes on into the tile and the weights that made the bias.
- Weights are alike on all ranks, so their gradients are summed over the ranks.  The gradient of the tile is not.

Each token has to learn the mean of the inputs of those that are near it in space.  Only the pairs know which these are.
Rank 0 then trains the same model alone, with torch's dense attention, and compares the losses of every step.  After
that comes triangle attention (`TriangleAttention`), compared with dense attention too.  The exit code is 1 if anything
differs by more than TOLERANCE.

With --count, plans run with and without a bias instead: what a rank sends, and the memory that it needs.
"""

import argparse
import sys
import time
from functools import partial

import numpy as np
from mpi4py import MPI

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
except ImportError:
    sys.exit("pairformer.py needs PyTorch: pip install '.[mpich,torch]'")

from mpiattn import ArgumentError, MeshAttention, MpiattnError
from mpiattn.torch import attention

BLOCKS, HEADS, HEAD_DIM, PAIR, INPUTS = 2, 4, 16, 16, 8
WIDTH = HEADS * HEAD_DIM
COUNTED = {"heads": 16, "head_dim": 24}  # with --count: the single representation of AlphaFold 3
LEARNING_RATE = 3e-3
TOLERANCE = 1e-4  # relative difference of float32 losses over 100 steps, and of results of triangle attention
LINES = 10  # of the table


def transition(width):
    """The MLP that looks at one token, or at one pair."""
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))


class PairBiasAttention(nn.Module):
    """Attention of tokens whose scores are raised by what is known of each pair."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkvg = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.bias = nn.Sequential(nn.LayerNorm(PAIR), nn.Linear(PAIR, HEADS, bias=False))
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, s, z, attend):
        """s (1, tokens, width); z (rows, columns, pair), the tile; attend(q, k, v, bias)."""
        q, k, v, gate = self.qkvg(self.norm(s)).unflatten(-1, (4, HEADS, HEAD_DIM)).unbind(2)
        bias = self.bias(z).permute(2, 0, 1)[None]  # (1, heads, rows, columns)
        return self.project((gate.sigmoid() * attend(q, k, v, bias)).flatten(2))


class Pairformer(nn.Module):
    """A prediction (tokens, inputs) for each token.

    z: the first vectors of the pairs of a tile, (rows, columns, pair), which are trained too.
    """

    def __init__(self, z):
        super().__init__()
        self.embedding, self.head = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, INPUTS)
        self.of_pairs = nn.ModuleList(transition(PAIR) for _ in range(BLOCKS))
        self.attention = nn.ModuleList(PairBiasAttention() for _ in range(BLOCKS))
        self.of_tokens = nn.ModuleList(transition(WIDTH) for _ in range(BLOCKS))
        self.replicated = list(self.parameters())
        self.z = nn.Parameter(z)

    def forward(self, x, attend):
        """x (tokens, inputs)."""
        s, z = self.embedding(x)[None], self.z
        for of_pairs, attention_of, of_tokens in zip(self.of_pairs, self.attention, self.of_tokens):
            z = z + of_pairs(z)
            s = s + attention_of(s, z, attend)
            s = s + of_tokens(s)
        return self.head(s)[0]


class TriangleAttention(nn.Module):
    """Triangle attention around starting nodes (AlphaFold 2, algorithm 13).

    In each row of the pairs, pair (i, j) attends to the pairs (i, k).  The rows are the batch, and all have the same
    bias: that of (j, k), made of the pair (j, k).
    """

    def __init__(self):
        super().__init__()
        self.norm, self.qkvg = nn.LayerNorm(PAIR), nn.Linear(PAIR, 4 * WIDTH)
        self.bias, self.project = nn.Linear(PAIR, HEADS, bias=False), nn.Linear(WIDTH, PAIR)

    def forward(self, z, attend):
        """z (rows, columns, pair): some columns, whole.  Rows are the batch, columns this rank's tokens."""
        z = self.norm(z)
        q, k, v, gate = self.qkvg(z).unflatten(-1, (4, HEADS, HEAD_DIM)).unbind(2)
        bias = self.bias(z).permute(2, 0, 1)[None]
        return self.project((gate.sigmoid() * attend(q, k, v, bias)).flatten(2))


def coordinates(tokens):
    """Where the tokens of a folded chain are, (tokens, 3), the same on every rank."""
    steps = np.random.default_rng(0).standard_normal((tokens, 3))
    path = np.cumsum(steps, axis=0)
    return 1.5 * path / np.sqrt((path**2).sum(1, keepdims=True) + tokens / 8)  # in a ball


def distances(tokens, rows, columns):
    """Of some tokens from others, (rows, columns)."""
    at = coordinates(tokens)
    return np.linalg.norm(at[rows, None] - at[columns], axis=-1)


def pairs(tokens, rows, columns):
    """The first vectors of some pairs, (rows, columns, pair): bumps along their distance."""
    bumps = np.exp(-(((distances(tokens, rows, columns)[..., None] - np.linspace(0, 2, PAIR)) / 0.2) ** 2))
    return torch.from_numpy(bumps.astype(np.float32))


def train(args, own, tile, attend, sum_over_ranks):
    """Train from the seed and return the loss of every step, over all tokens.

    own: the tokens that are trained on here.  tile: (rows, columns), the tokens of the pairs that are held here.
    attend(q, k, v, bias): the attention function.
    sum_over_ranks(array): adds up an array over whoever holds the other tokens, in place.
    """
    torch.manual_seed(args.seed)
    model, losses = Pairformer(pairs(args.tokens, *tile)), []
    near = (distances(args.tokens, own, np.arange(args.tokens)) < 0.4).astype(np.float32)
    near /= near.sum(1, keepdims=True)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    for step in range(args.steps):
        x = np.random.default_rng([args.seed, step]).standard_normal((args.tokens, INPUTS), np.float32)
        wanted = torch.from_numpy(near @ x)
        loss = F.mse_loss(model(torch.from_numpy(x[own]), attend), wanted, reduction="sum") / (args.tokens * INPUTS)
        optimizer.zero_grad()
        loss.backward()
        flat = torch.cat([loss.detach()[None], *(weight.grad.flatten() for weight in model.replicated)])
        sum_over_ranks(flat.numpy())  # shares memory with flat
        total, *sums = flat.split([1, *(weight.numel() for weight in model.replicated)])
        for weight, gradient in zip(model.replicated, sums):
            weight.grad = gradient.view_as(weight)
        optimizer.step()  # each rank updates its own tile of the pairs
        losses.append(total.item())
    return np.array(losses)


def attend_on(plan):
    """The attention function of a plan."""
    return lambda q, k, v, bias: attention(plan, q, k, v, bias=bias)[0]


def attend_dense(q, k, v, bias):
    """The same of one process that has all."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    bias = bias.expand(len(q), -1, -1, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def train_spread(comm, args):
    """Each rank trains on its tokens and its pairs; the losses, and what was chosen, in words."""
    with MeshAttention(
        comm,
        seqlen=args.tokens,
        heads=HEADS,
        head_dim=HEAD_DIM,
        tile=args.tile or tuple(MPI.Compute_dims(comm.size, 2)),
        direction="both",
        backend=args.backend,
    ) as plan:
        if range(HEADS)[plan.bias_heads] != range(HEADS):
            raise ArgumentError(f"--tile is {plan.tile}; it must be AxB: planes would each hold the same pairs")
        rows, columns = plan.bias_positions
        losses = train(args, plan.positions, (rows, columns), attend_on(plan), partial(comm.Allreduce, MPI.IN_PLACE))
        held = f"rank 0 holds {len(plan.positions)} tokens and {len(rows)} x {len(columns)} pairs"
        return losses, f"{comm.size} ranks, tile {plan.tile}, {args.tokens} tokens; {held}"


def compare_triangle(comm, args):
    """The largest relative difference of triangle attention, spread and dense: of its results, and of its gradients."""
    tokens = min(args.tokens, 48)  # tokens ** 3 scores a head
    everything, generator = np.arange(tokens), torch.Generator().manual_seed(args.seed)
    torch.manual_seed(args.seed)
    model, weight = TriangleAttention(), torch.randn(tokens, tokens, PAIR, generator=generator)
    with MeshAttention(
        comm,
        batch=tokens,
        seqlen=tokens,
        heads=HEADS,
        head_dim=HEAD_DIM,
        tile="qring",  # a rank has all queries and its own keys: the pairs that it holds are its tile of the bias
        layout="contiguous",
        backend=args.backend,
    ) as plan:
        z = pairs(tokens, *plan.bias_positions).requires_grad_()
        out = model(z, attend_on(plan))
        (out * weight[:, plan.positions]).sum().backward()
        spread = [out.detach(), z.grad]
        own = plan.positions
    of_weights = torch.cat([part.grad.flatten() for part in model.parameters()])
    comm.Allreduce(MPI.IN_PLACE, of_weights.numpy())
    model.zero_grad()
    z = pairs(tokens, everything, everything).requires_grad_()
    out = model(z, attend_dense)
    (out * weight).sum().backward()
    dense = [out.detach()[:, own], z.grad[:, own], torch.cat([part.grad.flatten() for part in model.parameters()])]
    off = [(a - b).abs().max() / b.abs().max() for a, b in zip([*spread, of_weights], dense) if b.numel()]
    return comm.allreduce(float(max(off, default=0)), MPI.MAX)


def count(comm, args):
    """Print what plans with and without a bias send and need; the most that a rank does."""
    shape = {"seqlen": args.tokens, **COUNTED}
    with MeshAttention(
        comm, **shape, tile=args.tile or tuple(MPI.Compute_dims(comm.size, 2)), backend=args.backend
    ) as plan:
        rows, columns = map(len, plan.bias_positions)
        q, k, v, dout = torch.randn(4, 1, len(plan.positions), *COUNTED.values())
        tile, numbers = torch.zeros(1, COUNTED["heads"], rows, columns), []
        for options in ({}, {"bias": tile}):
            before = plan.sent[0]
            out, lse = plan.forward(q, k, v, **options)
            after = plan.sent[0]
            *_, last = plan.backward(dout, q, k, v, out, lse, **options)
            numbers += [after - before, plan.sent[0] - after, plan.nbytes]
        assert last.shape == tile.shape
        numbers = np.array([*numbers, tile.numel()])
        comm.Allreduce(MPI.IN_PLACE, numbers, MPI.MAX)
        if comm.rank == 0:
            shape = f"{args.tokens} tokens, {COUNTED['heads']} heads x {COUNTED['head_dim']}"
            print(f"{comm.size} ranks, tile {plan.tile}, {shape}")
            for how, (forward, backward, memory) in zip(("without a bias", "with a bias"), numbers[:6].reshape(2, 3)):
                print(f"{how}: {forward} bytes sent forward, {backward} backward, {memory} bytes of memory")
            print(f"the bias has {numbers[6]} elements on a rank, its gradient as many")


def tell(what, losses, dense):
    """Print a table of losses."""
    print(what)
    print(f"{'step':>6}{'loss':>12}{'dense':>12}{'difference':>13}")
    for step in np.unique(np.linspace(0, len(losses) - 1, LINES).astype(int)):
        print(f"{step + 1:6}{losses[step]:12.6f}{dense[step]:12.6f}{abs(losses[step] / dense[step] - 1):13.1e}")


def wait_asleep(comm):
    """A barrier in which early ranks leave their cores to the others."""
    everyone = comm.Ibarrier()
    while not everyone.Test():
        time.sleep(0.02)


def run(comm, args):
    """Train, compare, tell; returns the exit code."""
    for name, least in (("steps", 1), ("tokens", 2)):
        if getattr(args, name) < least:
            raise ArgumentError(f"--{name} is {getattr(args, name)}; it must be at least {least}")
    torch.set_num_threads(1)
    if args.count:
        count(comm, args)
        return 0
    losses, what = train_spread(comm, args)
    off = [0.0, compare_triangle(comm, args)]
    if comm.rank == 0:
        everything = np.arange(args.tokens)
        dense = train(args, everything, (everything, everything), attend_dense, lambda array: None)
        tell(what, losses, dense)
        off[0] = np.abs(losses / dense - 1).max()
        for name, difference in zip(("losses", "triangle attention"), off):
            verdict = "the same to rounding" if difference <= TOLERANCE else "NOT the same"
            print(f"{name}: {verdict}, largest difference {difference:.1e}, {TOLERANCE:.0e} is allowed", flush=True)
    wait_asleep(comm)
    return int(not all(difference <= TOLERANCE for difference in comm.bcast(off)))


def main():
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Train a small pairformer with its pairs spread over MPI ranks.")
    parser.add_argument("--steps", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="(default: %(default)s)")
    parser.add_argument("--tile", help="AxB, ring or qring (default: as square as can be)")
    parser.add_argument("--backend", default="auto", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and data (default: %(default)s)")
    parser.add_argument("--count", action="store_true", help="train nothing, but count bytes and memory")
    args, comm = parser.parse_args(), MPI.COMM_WORLD
    try:
        return run(comm, args)
    except MpiattnError as error:  # the same on every rank: one of them says it
        if comm.rank == 0:
            print(f"pairformer: {error}", file=sys.stderr, flush=True)
        comm.Barrier()
        return 1


if __name__ == "__main__":
    sys.exit(main())
