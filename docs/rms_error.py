"""RMS error of half types on every tile, beside one rank's, and with partials that travel in a half type.

    mpiexec -n 16 python docs/rms_error.py            # the tables of numbers.md
    mpiexec -n 16 python docs/rms_error.py --json

An error is that of out, dq, dk or dv against float64, as a share of the RMS of float64's.
"""

import argparse
import json
import time

import numpy as np
from mpi4py import MPI

from mpiattn import MeshAttention
from mpiattn.schedule.tile import tiles
from mpiattn.verify import reference

NAMES = ("out", "dq", "dk", "dv")
SHAPE = {"seqlen": 1024, "heads": 2, "head_dim": 64}
SEED = 0


def inputs(dtype):
    """Whole q, k, v and dout, standard normal, the same on every rank."""
    rng = np.random.default_rng(SEED)
    return rng.standard_normal((4, 1, SHAPE["seqlen"], SHAPE["heads"], SHAPE["head_dim"])).astype(dtype)


def errors(comm, dtype, exact, **options):
    """RMS error of each result relative to the RMS of the exact one, on a communicator."""
    with MeshAttention(comm, **SHAPE, dtype=dtype, layout="striped", **options) as plan:
        at = plan.positions
        q, k, v, dout = (np.ascontiguousarray(array[:, at]) for array in inputs(plan.problem.dtype))
        out, lse = plan.forward(q, k, v)
        results = (out, *plan.backward(dout, q, k, v, out, lse))
    squares = np.array(
        [
            [np.square(part.astype(np.float64) - whole[:, at]).sum(), np.square(whole[:, at]).sum()]
            for part, whole in zip(results, exact)
        ]
    )
    off, size = comm.allreduce(squares).T
    return dict(zip(NAMES, np.sqrt(off / size).tolist()))


def measure(comm, dtype, causal):
    """Rows of a table: one rank, then every tile, with partials in float32 and in each half type."""
    if dtype == "bfloat16":
        import ml_dtypes  # noqa: F401  (NumPy learns the dtype)
    exact = None
    if comm.rank == 0:
        q, k, v, dout = inputs(dtype)
        exact = (reference.attention(q, k, v, causal)[0], *reference.backward(dout, q, k, v, causal))
    there = comm.Ibarrier()
    while not there.Test():
        time.sleep(0.01)  # ranks may share cores: leave them to the one that computes
    exact = comm.bcast(exact)
    yield {"tile": "one rank", "wire_dtype": "", **errors(MPI.COMM_SELF, dtype, exact, causal=causal)}
    for wire in ("float32", "float16", "bfloat16"):
        for tile in tiles(comm.size):
            yield {
                "tile": str(tile),
                "wire_dtype": wire,
                **errors(comm, dtype, exact, causal=causal, tile=tile, wire_dtype=wire),
            }


def main():
    """Measure on all ranks and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args()
    comm, tables = MPI.COMM_WORLD, []
    for dtype in ("bfloat16", "float16"):
        for causal in (False, True):
            tables.append(
                {
                    "dtype": dtype,
                    "causal": causal,
                    "ranks": comm.size,
                    **SHAPE,
                    "errors": list(measure(comm, dtype, causal)),
                }
            )
    if comm.rank:
        return
    if arguments.json:
        print(json.dumps(tables, indent=1))
        return
    for table in tables:
        print(f"\n{table['dtype']}, {'causal' if table['causal'] else 'full'}\n")
        print(f"| tile | partials travel in | {' | '.join(NAMES)} |\n|---|---|{'---|' * len(NAMES)}")
        for row in table["errors"]:
            print(f"| {row['tile']} | {row['wire_dtype']} | {' | '.join(f'{row[name]:.3e}' for name in NAMES)} |")


if __name__ == "__main__":
    main()
