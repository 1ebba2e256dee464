"""A transformer in JAX, trained with its sequence spread over the ranks of an MPI program.

    mpiexec -n 4 python -m mpi4py docs/train_jax.py --check

It learns to continue the text of the licence, byte by byte.  Each step packs four pieces of it, of random lengths, as
documents into one sequence.  What is worth copying from here into a program of your own:

- One function, compiled once, has the whole model and both passes of attention.  The layers are a `lax.scan` whose body
  is recomputed (`jax.checkpoint`).
- Documents are a JAX array of a fixed number of positions, so that new ones compile nothing again.
- Every rank runs the model on its own tokens, plan.positions of the sequence.  What depends on a token's place in the
  sequence is made for the whole and then cut: targets and the positions of RoPE.
- Parameters are replicated.  A rank's loss is its tokens' part of the mean over the whole sequence, so gradients, and
  losses, are summed over the ranks.

With --check, rank 0 then trains the same model alone, with dense attention under an explicit mask, and compares the
losses of every step.  The exit code is 1 if they differ by more than TOLERANCE.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI

try:
    import jax
except ImportError:
    sys.exit("train_jax.py needs JAX: pip install '.[mpich,jax]'")

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from mpiattn import ArgumentError, MeshAttention, MpiattnError
from mpiattn.jax import attention

TEXT = np.frombuffer((Path(__file__).resolve().parents[1] / "LICENSE").read_bytes(), np.uint8).astype(np.int32)
VOCABULARY, LAYERS, HEADS, HEAD_DIM = 128, 2, 4, 16
WIDTH = HEADS * HEAD_DIM
DOCUMENTS = 4
LEARNING_RATE = 2e-3
TOLERANCE = 1e-5  # relative difference of losses


def draw(step, seqlen):
    """The sequence of a step, the same on every rank: tokens, targets, places in the document; cuts of documents."""
    rng = np.random.default_rng(step)
    cuts = np.sort([0, *rng.integers(1, seqlen, DOCUMENTS - 1), seqlen]).astype(np.int32)  # a document may be empty
    lengths = np.diff(cuts)
    starts = rng.integers(0, len(TEXT) - seqlen, DOCUMENTS)
    pieces = [TEXT[start : start + length + 1] for start, length in zip(starts, lengths)]
    tokens, targets = (np.concatenate([piece[at] for piece in pieces]) for at in (slice(0, -1), slice(1, None)))
    return tokens, targets, np.arange(seqlen) - np.repeat(cuts[:-1], lengths), cuts


def parameters():
    """Those of the model; of the layers with a first axis of their number."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), jnp.float32)

    layers = {
        "qkv": normal(LAYERS, WIDTH, 3 * WIDTH),
        "project": normal(LAYERS, WIDTH, WIDTH),
        "up": normal(LAYERS, WIDTH, 4 * WIDTH),
        "down": normal(LAYERS, 4 * WIDTH, WIDTH),
    }
    return {"embedding": normal(VOCABULARY, WIDTH), "layers": layers, "head": normal(WIDTH, VOCABULARY)}


def normalised(x):
    """Each token's vector, of length sqrt(WIDTH)."""
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def rotate(x, places):
    """RoPE: each pair of x (1, tokens, heads, dim) turned by an angle that grows with its token's place."""
    half = x.shape[-1] // 2
    angles = places[:, None, None] * 1e4 ** (-jnp.arange(half) / half)
    cos, sin, a, b = jnp.cos(angles), jnp.sin(angles), x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def loss(model, tokens, targets, places, cuts, attend, seqlen):
    """The part of these tokens of the mean over the sequence.  attend(q, k, v, cuts) of (1, tokens, heads, dim)."""

    @jax.checkpoint
    def layer(x, weights):
        q, k, v = jnp.moveaxis((normalised(x) @ weights["qkv"]).reshape(1, len(tokens), 3, HEADS, HEAD_DIM), 2, 0)
        out = attend(rotate(q, places), rotate(k, places), v, cuts)
        x = x + out.reshape(x.shape) @ weights["project"]
        return x + jax.nn.gelu(normalised(x) @ weights["up"]) @ weights["down"], None

    x, _ = jax.lax.scan(layer, model["embedding"][tokens][None], model["layers"])
    logits = jax.nn.log_softmax(normalised(x)[0] @ model["head"])
    return -jnp.take_along_axis(logits, targets[:, None], 1).sum() / seqlen


@jax.jit
def adam(flat, gradient, moments, step):
    """One step of Adam on all parameters as one vector."""
    first, second = 0.9 * moments[0] + 0.1 * gradient, 0.999 * moments[1] + 0.001 * gradient**2
    update = (first / (1 - 0.9**step)) / (jnp.sqrt(second / (1 - 0.999**step)) + 1e-8)
    return flat - LEARNING_RATE * update, (first, second)


def train(args, own, attend, sum_over_ranks):
    """The loss of every step, over the whole sequence.

    own: positions in the sequence of the tokens that are trained on here.
    sum_over_ranks(array): adds up an array over whoever holds the other tokens, in place.
    """
    flat, unravel = ravel_pytree(parameters())
    moments, losses = (jnp.zeros_like(flat), jnp.zeros_like(flat)), []
    differentiated = jax.jit(
        jax.value_and_grad(lambda flat, *data: loss(unravel(flat), *data, attend=attend, seqlen=args.seqlen))
    )
    for step in range(args.steps):
        *whole, cuts = draw(step, args.seqlen)
        value, gradient = differentiated(flat, *(array[own] for array in whole), jnp.asarray(cuts))
        summed = np.array([value, *np.asarray(gradient)], np.float32)  # waits for the compiled calls
        sum_over_ranks(summed)
        flat, moments = adam(flat, summed[1:], moments, step + 1)
        losses.append(summed[0])
    return np.array(losses)


def train_spread(comm, args):
    """Each rank trains on its chunk; the losses, and the name of what was chosen."""
    with MeshAttention(
        comm, seqlen=args.seqlen, heads=HEADS, head_dim=HEAD_DIM, causal=True, tile=args.tile, direction="both"
    ) as plan:

        def attend(q, k, v, cuts):
            return attention(plan, q, k, v, cu_seqlens=cuts)[0]

        losses = train(args, plan.positions, attend, partial(comm.Allreduce, MPI.IN_PLACE))
        return losses, f"{comm.size} ranks, tile {plan.tile}, {plan.q_layout.kind} layout"


def train_dense(args):
    """One process holds all tokens, and a mask says which see which."""
    rows = np.arange(args.seqlen)

    def attend(q, k, v, cuts):
        document = jnp.searchsorted(cuts, rows, side="right")
        mask = (document[:, None] == document) & (rows[:, None] >= rows)
        score = jnp.where(mask, jnp.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(HEAD_DIM), -jnp.inf)
        return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(score), v)

    return train(args, rows, attend, lambda array: None)


def run(comm, args):
    """Train, compare if asked to, print; returns the exit code."""
    for name, least in (("steps", 1), ("seqlen", 2)):
        if getattr(args, name) < least:
            raise ArgumentError(f"--{name} is {getattr(args, name)}; it must be at least {least}")
    losses, what = train_spread(comm, args)
    off = 0.0
    if comm.rank == 0:
        print(f"{what}, {args.seqlen} tokens")
        dense = train_dense(args) if args.check else losses
        for step in np.unique(np.linspace(0, args.steps - 1, 6).astype(int)):
            print(f"{step + 1:6}{losses[step]:12.6f}" + (f"{dense[step]:12.6f}" if args.check else ""))
        if args.check:
            off = np.abs(losses / dense - 1).max()
            verdict = "the same to rounding" if off <= TOLERANCE else "NOT the same"
            print(f"{verdict}: largest difference {off:.1e}, {TOLERANCE:.0e} is allowed", flush=True)
    everyone = comm.Ibarrier()
    while not everyone.Test():
        time.sleep(0.02)  # early ranks leave their cores to rank 0
    return int(not comm.bcast(off) <= TOLERANCE)


def main():
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Train a small transformer in JAX, its sequence spread over MPI ranks."
    )
    parser.add_argument("--steps", type=int, default=30, help="(default: %(default)s)")
    parser.add_argument("--seqlen", type=int, default=128, help="tokens of the whole sequence (default: %(default)s)")
    parser.add_argument("--tile", default="auto", help="AxB, ring, qring or auto (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="compare losses with those of dense attention")
    args, comm = parser.parse_args(), MPI.COMM_WORLD
    try:
        return run(comm, args)
    except MpiattnError as error:  # the same on every rank: one of them says it
        if comm.rank == 0:
            print(f"train_jax: {error}", file=sys.stderr, flush=True)
        comm.Barrier()
        return 1


if __name__ == "__main__":
    sys.exit(main())
