"""A two-layer transformer trained with its sequence spread over the ranks of an MPI program.

    mpiexec -n 4 python docs/train_transformer.py --check

It learns to continue the text of the licence, byte by byte.  Each step packs pieces of it, of random lengths, as
documents into one sequence.  What is worth copying from here into a program of your own:

- Every rank runs the whole model on its own tokens, plan.positions of the sequence.  All layers but attention look at
  one token at a time, so they need not know; attention is `mpiattn.torch.attention`.
- What depends on a token's place in the sequence is made for the whole and then cut: targets (the next token may be
  another rank's) and the positions of RoPE, which restart with every document.
- Parameters are replicated: the same seed makes them the same, the same gradients keep them so.  A rank's loss is its
  tokens' part of the mean over the whole sequence, so gradients, and losses, are summed over the ranks.

With --check, rank 0 then trains the same model alone, with torch's dense attention under an explicit mask, and compares
the losses of every step.  They differ by rounding: over 100 steps by up to 4e-7 in float32 and 4e-16 in float64.  The
exit code is 1 if they differ by more than TOLERANCE.  (Training is chaotic: with some hundreds of steps, or a larger
learning rate, it amplifies rounding a thousandfold, however attention is computed.)

Put `-m mpi4py` before the script's name, and an exception on one rank ends all of them.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
except ImportError:
    sys.exit("train_transformer.py needs PyTorch: pip install '.[mpich,torch]'")

from mpiattn import ArgumentError, MeshAttention, MpiattnError
from mpiattn.torch import attention

TEXT = np.frombuffer((Path(__file__).resolve().parents[1] / "LICENSE").read_bytes(), np.uint8).astype(np.int64)
VOCABULARY, LAYERS, HEADS, HEAD_DIM = 128, 2, 4, 16
DOCUMENTS = 4  # at most, in one sequence
LEARNING_RATE = 2e-3
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}  # relative difference of losses over 100 steps
TOLD = 10  # lines of the table


def draw(step, args):
    """The sequence of a step, the same on every rank: tokens, targets, places in the document; where documents end."""
    rng = np.random.default_rng([args.seed, step])
    cuts = np.unique([0, *rng.integers(1, args.seqlen, DOCUMENTS - 1), args.seqlen])
    lengths = np.diff(cuts)
    pieces = [
        TEXT[start : start + length + 1]
        for start, length in zip(rng.integers(0, len(TEXT) - args.seqlen, len(lengths)), lengths)
    ]
    tokens, targets = (np.concatenate([piece[at] for piece in pieces]) for at in (slice(0, -1), slice(1, None)))
    return tokens, targets, np.arange(args.seqlen) - np.repeat(cuts[:-1], lengths), cuts


def rotate(x, places):
    """RoPE: each pair of x (1, tokens, heads, dim) turned by an angle that grows with its token's place."""
    half = x.shape[-1] // 2
    angles = places[:, None, None] * 1e4 ** (-torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Layer(nn.Module):
    """Attention and an MLP, each added to what comes in normalised."""

    def __init__(self, width):
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, places, attend):
        """x (1, tokens, width); attend(q, k, v) on (1, tokens, heads, dim)."""
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        x = x + self.project(attend(rotate(q, places), rotate(k, places), v).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """Logits (1, tokens, vocabulary) of the tokens that come next."""

    def __init__(self):
        super().__init__()
        width = HEADS * HEAD_DIM
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens, places, attend):
        """tokens and places: (tokens,), in any selection that attend knows."""
        x = self.embedding(tokens)[None]
        for layer in self.layers:
            x = layer(x, places, attend)
        return self.head(x)


def train(args, own, attend_in, sum_over_ranks):
    """Train from the seed and return the loss of every step, over the whole sequence.

    own: positions in the sequence of the tokens that are trained on here.
    attend_in(cuts): the attention function of a sequence with these documents.
    sum_over_ranks(array): adds up an array over whoever holds the other tokens, in place.
    """
    torch.manual_seed(args.seed)
    model, losses = Transformer(), []
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, LEARNING_RATE)
    for step in range(args.steps):
        *whole, cuts = draw(step, args)
        tokens, targets, places = (torch.from_numpy(array[own]) for array in whole)
        logits = model(tokens, places, attend_in(cuts))
        loss = F.cross_entropy(logits[0], targets, reduction="sum") / args.seqlen
        gradients = torch.autograd.grad(loss, parameters)
        flat = torch.cat([loss.detach()[None], *(gradient.flatten() for gradient in gradients)])
        sum_over_ranks(flat.numpy())  # shares memory with flat
        total, *sums = flat.split([1, *(parameter.numel() for parameter in parameters)])
        for parameter, gradient in zip(parameters, sums):
            parameter.grad = gradient.view_as(parameter)
        optimizer.step()
        losses.append(total.item())
    return np.array(losses)


def train_spread(comm, args):
    """Each rank trains on its chunk; the losses, and the name of what was chosen."""
    with MeshAttention(
        comm,
        seqlen=args.seqlen,
        heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=args.dtype,
        causal=True,
        tile=args.tile,
        layout=args.layout,
        direction="both",
    ) as plan:

        def attend_in(cuts):
            return lambda q, k, v: attention(plan, q, k, v, cu_seqlens=cuts)[0]

        losses = train(args, plan.positions, attend_in, partial(comm.Allreduce, MPI.IN_PLACE))
        return losses, f"{comm.size} ranks, tile {plan.tile}, {plan.q_layout.kind} layout"


def train_dense(args):
    """One process holds all tokens, and a mask says which see which."""
    rows = np.arange(args.seqlen)

    def attend_in(cuts):
        document = np.searchsorted(cuts, rows, "right")
        mask = torch.from_numpy((document[:, None] == document) & (rows[:, None] >= rows))

        def attend(*qkv):
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), attn_mask=mask).transpose(1, 2)

        return attend

    return train(args, rows, attend_in, lambda array: None)


def tell(args, what, losses, dense):
    """Print a table of losses."""
    print(f"{what}, {args.seqlen} tokens, {args.dtype}")
    print(f"{'step':>6}{'loss':>12}" + (f"{'dense':>12}{'difference':>13}" if dense is not None else ""))
    for step in np.unique(np.linspace(0, args.steps - 1, TOLD).astype(int)):
        print(
            f"{step + 1:6}{losses[step]:12.6f}"
            + (f"{dense[step]:12.6f}{abs(losses[step] / dense[step] - 1):13.1e}" if dense is not None else "")
        )


def wait_asleep(comm):
    """A barrier in which early ranks leave their cores to the others."""
    everyone = comm.Ibarrier()
    while not everyone.Test():
        time.sleep(0.02)


def run(comm, args):
    """Train, compare if asked to, tell; returns the exit code."""
    for name, least in (("steps", 1), ("seqlen", 2)):
        if getattr(args, name) < least:
            raise ArgumentError(f"--{name} is {getattr(args, name)}; it must be at least {least}")
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, args.dtype))
    losses, what = train_spread(comm, args)
    off = 0.0
    if comm.rank == 0:
        dense = train_dense(args) if args.check else None
        tell(args, what, losses, dense)
        if args.check:
            off, allowed = np.abs(losses / dense - 1).max(), TOLERANCE[args.dtype]
            verdict = "the same to rounding" if off <= allowed else "NOT the same"
            print(f"{verdict}: largest difference {off:.1e}, {allowed:.0e} is allowed", flush=True)
    wait_asleep(comm)
    return int(not comm.bcast(off) <= TOLERANCE[args.dtype])


def main():
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Train a small transformer with its sequence spread over MPI ranks.")
    parser.add_argument("--steps", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--seqlen", type=int, default=128, help="tokens of the whole sequence (default: %(default)s)")
    parser.add_argument("--tile", default="auto", help="AxB, ring, qring or auto (default: %(default)s)")
    parser.add_argument("--layout", default="auto", help="contiguous, striped, zigzag or auto (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=TOLERANCE, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and data (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="compare losses with those of dense attention")
    args, comm = parser.parse_args(), MPI.COMM_WORLD
    try:
        return run(comm, args)
    except MpiattnError as error:  # the same on every rank: one of them says it
        if comm.rank == 0:
            print(f"train_transformer: {error}", file=sys.stderr, flush=True)
        comm.Barrier()
        return 1


if __name__ == "__main__":
    sys.exit(main())
