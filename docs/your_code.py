"""Particles with their own communicators and messages: mpiexec -n 4 python docs/your_code.py --steps 4."""

import argparse

import numpy as np
from mpi4py import MPI

import mpiattn

HEADS, DIM, PARTICLES = 2, 8, 300


def owned(rank, ranks):
    """The positions of this rank's particles: domains are of unequal width, and the second has none at first."""
    x = np.random.default_rng(0).random((PARTICLES, 3), np.float32)
    domain = (x[:, 0] ** 2 * ranks).astype(int)
    return x[np.where(domain == 1, 0, domain) == rank]


def main():
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args().steps
    world = MPI.COMM_WORLD
    writer = world.size - 1  # which computes only if it is alone
    computes = world.size == 1 or world.rank != writer
    work = world.Split(0 if computes else MPI.UNDEFINED, world.rank)
    reports = []
    if computes:
        x, rng = owned(work.rank, work.size), np.random.default_rng(1)  # the same weights on every rank
        make = rng.standard_normal((3, 3, HEADS * DIM), np.float32)
        read = rng.standard_normal((HEADS * DIM, 3), np.float32) / 50
        right, left, plan, counts = (work.rank + 1) % work.size, (work.rank - 1) % work.size, None, None
        for step in range(steps):
            # Particles that leave the domain travel while attention is computed: mpiattn has its own communicator.
            # The receiver learns first how many come.
            leaves = x[:, 0] > 0.9
            leaving, coming = x[leaves], np.empty((work.sendrecv(leaves.sum(), right, source=left), 3), np.float32)
            requests = [work.Irecv(coming, left), work.Isend(leaving, right)]
            # Each rank has as many tokens as particles, in any order: without a mask, order does not matter.
            now = tuple(work.allgather(len(x)))
            if now != counts:  # a plan is for certain numbers of tokens; making it takes milliseconds
                if plan is not None:
                    plan.close()
                plan, counts = (
                    mpiattn.MeshAttention(work, seqlen=sum(now), heads=HEADS, head_dim=DIM, layout=now, timeout=60),
                    now,
                )
            q, k, v = (x @ make).reshape(3, 1, len(x), HEADS, DIM)
            try:
                out, _ = plan.forward(q, k, v)
            except mpiattn.PeerFailure as failure:  # a rank is lost, and with it its particles
                print(failure, flush=True)
                world.Abort(1)
            moved = (x + out.reshape(len(x), HEADS * DIM) @ read) % 1
            MPI.Request.Waitall(requests)
            x = np.concatenate([moved[~leaves], (coming + 0.05) % 1])
            total = work.reduce(np.append(x.astype(float).sum(0), len(x)), root=0)
            if work.rank == 0:
                reports.append(world.isend(total, writer, tag=step))
        plan.close()
        work.Free()
    if world.rank == writer:
        for step in range(steps):
            *mean, count = world.recv(source=0, tag=step)
            print(f"step {step}: {count:.0f} particles, mean {' '.join(f'{m / count:.4f}' for m in mean)}")
    MPI.Request.waitall(reports)


if __name__ == "__main__":
    main()
