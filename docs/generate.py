"""Greedy decoding with a small transformer whose KV caches are spread over the ranks of an MPI program.

    mpiexec -n 4 python docs/generate.py --check

The transformer is wired by hand, so that what it writes can be judged: an induction head.  Its first layer has HEADS
query heads over one KV head; head h looks h + 1 places back.  Its second layer looks for an earlier place with the same
HEADS tokens before it, and gives the token that came there.  So it goes on with a text that it has seen before.

What is worth copying from here into a program of your own:

- The prompt is a prefill: every rank has a chunk of it, attention is a `MeshAttention` plan's, and the keys and values
  go into a `KVCache` where they are.
- From then on every rank runs the model on the one new token, which is little work.  `append` leaves its key and value
  on the rank that holds the fewest.  The algorithm "butterfly" of `tree_decode` gives every rank the same bits, so that
  all take the same token.

With --check, rank 0 does the same alone and compares.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpiattn import ArgumentError, KVCache, MeshAttention, MpiattnError, tree_decode

TEXT = " ".join((Path(__file__).resolve().parents[1] / "LICENSE").read_text().split())
HEADS, WIDTH, SHARP = 8, 64, 60.0  # SHARP: what a match adds to a score
RNG = np.random.default_rng(0)
EMBEDDING = RNG.standard_normal((128, WIDTH), np.float32)
EMBEDDING /= np.linalg.norm(EMBEDDING, axis=1, keepdims=True)
FREQUENCIES = RNG.uniform(0, np.pi, WIDTH // 2)


def places(positions):
    """Unit vectors (tokens, WIDTH) that are alike for equal positions only."""
    angles = positions[:, None] * FREQUENCIES
    return (np.concatenate([np.cos(angles), np.sin(angles)], axis=1) / np.sqrt(WIDTH // 2)).astype(np.float32)


def first_layer(tokens, positions):
    """q (1, tokens, HEADS, WIDTH), k and v (1, tokens, 1, WIDTH): head h looks for the place h + 1 before its own."""
    q = np.stack([SHARP * places(positions - back) for back in range(1, HEADS + 1)], axis=1)
    return q[None], places(positions)[None, :, None], EMBEDDING[tokens][None, :, None]


def second_layer(tokens, before):
    """q, k (1, tokens, 1, HEADS * WIDTH) and v (1, tokens, 1, WIDTH); before: what the first layer gave.

    A query asks for its own token and those before it, a key offers those before its own.
    """
    own = EMBEDDING[tokens][None, :, None]
    shape = 1, len(tokens), 1, HEADS * WIDTH
    q = SHARP * np.concatenate([own, before[:, :, :-1]], axis=2)
    return q.reshape(shape), before.reshape(shape), own


class Generator:
    """A cache for each layer, on the ranks of `comm`."""

    def __init__(self, comm, capacity):
        self.comm, self.position = comm, 0
        shapes = {"first": {"head_dim": WIDTH}, "second": {"head_dim": HEADS * WIDTH, "value_dim": WIDTH}}
        self.caches = {name: KVCache(comm, capacity=capacity, kv_heads=1, **dims) for name, dims in shapes.items()}

    def prefill(self, tokens):
        """Run the model on a prompt, every rank on its chunk."""
        seqlen, self.position = len(tokens), len(tokens)

        def attend(name, q, k, v, plan):
            out, _ = plan.forward(q, k, v)
            self.caches[name].append(k, v, layout=plan.k_layout)
            return out

        how = {"seqlen": seqlen, "kv_heads": 1, "causal": True, "scale": 1.0, "layout": "zigzag"}
        with (
            MeshAttention(self.comm, heads=HEADS, head_dim=WIDTH, **how) as first,
            MeshAttention(self.comm, heads=1, head_dim=HEADS * WIDTH, value_dim=WIDTH, **how) as second,
        ):
            chunk = tokens[first.positions]
            before = attend("first", *first_layer(chunk, first.positions), first)
            attend("second", *second_layer(chunk, before), second)

    def step(self, token):
        """Take in one token and return the next; the same on every rank."""

        def attend(name, q, k, v):
            self.caches[name].append(k, v)
            return tree_decode(q, self.caches[name], scale=1.0, algorithm="butterfly")[0]

        tokens = np.array([token])
        before = attend("first", *first_layer(tokens, np.array([self.position])))
        after = attend("second", *second_layer(tokens, before))
        self.position += 1
        return int(np.argmax(EMBEDDING @ after[0, 0, 0]))

    def close(self):
        """Give up the caches."""
        for cache in self.caches.values():
            cache.close()


def generate(comm, prompt, count):
    """The `count` tokens that follow a prompt, and how many keys this rank holds in the end."""
    generator = Generator(comm, len(prompt) + count)
    generator.prefill(prompt[:-1])
    tokens = [int(prompt[-1])]
    for _ in range(count):
        tokens.append(generator.step(tokens[-1]))
    keys = generator.caches["first"].local_lengths[0]
    generator.close()
    return tokens[1:], keys


def run(comm, args):
    """Generate, tell, compare if asked to; returns the exit code."""
    for name, least in (("tokens", 1), ("context", 2 * HEADS)):
        if not least <= getattr(args, name) <= len(TEXT):
            raise ArgumentError(f"--{name} is {getattr(args, name)}; it must be from {least} to {len(TEXT)}")
    text = TEXT[: args.context]
    prompt = np.frombuffer((text + text[:HEADS]).encode(), np.uint8)
    tokens, keys = generate(comm, prompt, args.tokens)
    all_tokens, held = comm.gather(tokens), comm.gather(keys)
    code = 0
    if comm.rank == 0:
        print(
            f"{len(prompt)} tokens of prompt; {args.tokens} generated on {comm.size} ranks, which hold "
            f"{', '.join(map(str, held))} keys of each layer:\n{text[:HEADS]}|{bytes(tokens).decode()}"
        )
        code = int(any(other != tokens for other in all_tokens))
        if args.check:
            code |= int(generate(MPI.COMM_SELF, prompt, args.tokens)[0] != tokens)
            print("NOT the same tokens as on one rank" if code else "the same tokens as on one rank", flush=True)
    return comm.bcast(code)


def main():
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Greedy decoding with KV caches spread over MPI ranks.")
    parser.add_argument("--tokens", type=int, default=100, help="to generate (default: %(default)s)")
    parser.add_argument("--context", type=int, default=600, help="tokens of text in the prompt (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="compare with the tokens that one rank generates")
    args, comm = parser.parse_args(), MPI.COMM_WORLD
    try:
        return run(comm, args)
    except MpiattnError as error:  # the same on every rank: one of them says it
        if comm.rank == 0:
            print(f"generate: {error}", file=sys.stderr, flush=True)
        comm.Barrier()
        return 1


if __name__ == "__main__":
    sys.exit(main())
