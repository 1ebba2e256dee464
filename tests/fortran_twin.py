"""What Fortran programs have written, computed again from the same inputs, on as many ranks: the same bits.

mpiexec -n 4 python -m mpi4py tests/fortran_twin.py FOLDER calls          # FOLDER/calls.RANK, of fortran_calls.f90
mpiexec -n 3 python -m mpi4py tests/fortran_twin.py FOLDER ocean 1x3      # FOLDER/ocean.RANK, in blocks of 1x3 ranks
"""

import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpiattn

COMM = MPI.COMM_WORLD
KINDS = {4: np.float32, 8: np.float64, -8: np.int64}


def same(name, array, expected):
    """Fail unless all bits are the same."""
    array, expected = np.ascontiguousarray(array), np.ascontiguousarray(expected)
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype), f"{name}: {array.shape}, {expected.shape}"
    differ = array.view(np.uint8) != expected.view(np.uint8)
    assert not differ.any(), f"{name} differs on rank {COMM.rank}: {array.ravel()[:5]}, {expected.ravel()[:5]}"


def records(path):
    """The arrays of a file by name, in C order."""
    data, at, arrays = path.read_bytes(), 0, {}
    while at < len(data):
        name = data[at : at + 16].decode().rstrip()
        kind, axes = np.frombuffer(data, np.int32, 2, at + 16)
        shape = tuple(np.frombuffer(data, np.int32, axes, at + 24))[::-1]
        at += 24 + 4 * axes
        arrays[name] = np.frombuffer(data, KINDS[kind], np.prod(shape, dtype=int), at).reshape(shape)
        at += arrays[name].nbytes
    return arrays


def masked(got):
    options = dict(batch=2, seqlen=23, seqlen_k=31, heads=4, kv_heads=2, head_dim=8, value_dim=6, causal=True)
    options |= dict(window=(15, None), scale=0.375, softcap=2.5, layout="contiguous", direction="both")
    call = dict(cu_seqlens=[0, 10, 23], cu_seqlens_k=[0, 14, 31], bias=got["tile"])
    with mpiattn.MeshAttention(COMM, **options) as plan:
        places = plan.positions, plan.positions_k, *plan.bias_positions
        for name, positions in zip(("positions", "keys", "rows", "columns"), places):
            same(name, got[name], positions)
        numbers = np.arange(1, 1 + 2 * 23 * 4 * 8)  # as in the program, but for rounding of a sine
        whole = np.sin(1.7 * numbers + 0.3 * (numbers % 17)).reshape(2, 23, 4, 8)
        assert np.abs(got["q"] - whole[:, plan.positions]).max(initial=0) < 1e-6
        call["sinks"] = np.sin(1.7 * np.arange(1, 5) + 0.3 * np.arange(1, 5)).astype(np.float32)
        q, k, v = (got[name] for name in "qkv")
        out, lse = plan.forward(q, k, v, **call)
        *grads, dsinks, dbias = plan.backward(out, q, k, v, out, lse, **call)
        for name, result in zip(("out", "lse", "dq", "dk", "dv", "dsinks", "dbias"), (out, lse, *grads, dsinks, dbias)):
            same(name, got[name], result)
        whole = plan.gather_bias(dbias, root=0)
        if COMM.rank == 0:
            same("whole_dbias", got["whole_dbias"], whole)
        same("whole_lse", got["whole_lse"], plan.gather(lse, root=None, axis=2))
        whole = plan.gather(out, root=None)
        if COMM.rank == 1:
            same("whole_out", got["whole_out"], whole)


def double(got):
    options = dict(seqlen=24, heads=2, head_dim=4, dtype="float64", key_bias=True, tile="bands")
    call = dict(dropout=0.25, seed=123456789012, alibi_slopes=np.array([0.25, 0.0625]), key_bias=got["of_keys"])
    call |= dict(relative_bias=got["table"], relative_grid=(4, 6), relative_cyclic=(True, False))
    with mpiattn.MeshAttention(COMM, **options) as plan:
        q, k, v = (got[f"{name}64"] for name in "qkv")
        out, lse = plan.forward(q, k, v, **call)
        results = plan.backward(out, q, k, v, out, lse, dlse=got["dlse"], **call)
        dq, _, dv, _, dslopes, dtable = results
        names = "out64", "lse64", "dq64", "dv64", "dtable", "dslopes"
        for name, result in zip(names, (out, lse, dq, dv, dtable, dslopes)):
            same(name, got[name], result)


def cached(got):
    with mpiattn.KVCache(COMM, capacity=64, sequences=2, kv_heads=2, head_dim=8) as cache:
        cache.append(got["kept_k"], got["kept_v"], counts=[9, 6])
        cache.truncate([8, 6])
        same("lengths", got["lengths"], np.array(cache.lengths))
        same("held", got["held"], cache.positions(1))
        out, lse = mpiattn.tree_decode(got["asked"], cache, scale=0.5)
        same("decoded", got["decoded"], out)
        same("decoded_lse", got["decoded_lse"], lse)


def calls(folder):
    got = records(folder / f"calls.{COMM.rank}")
    masked(got)
    double(got)
    cached(got)


def ocean(folder, dims):
    grid, heads, dim = (19, 26), 2, 8
    layout = mpiattn.Layout.grid(grid, dims)
    mask = mpiattn.masks.neighborhood(grid, (5, 7), cyclic=(False, True))
    options = dict(seqlen=19 * 26, heads=heads, head_dim=dim, mask=mask, layout=layout, direction="both")
    with mpiattn.MeshAttention(COMM, **options) as plan:
        n, data = len(plan.positions), np.fromfile(folder / f"ocean.{COMM.rank}", np.float32)
        assert len(data) == 8 * n * heads * dim + n * heads
        parts = np.split(data, np.cumsum([n * heads * dim] * 5 + [n * heads] + [n * heads * dim] * 2))
        q, k, v, dout, out, *grads = (part.reshape(1, n, heads, dim) for part in (*parts[:5], *parts[6:]))
        expected = plan.forward(q, k, v)
        same("out", out, expected[0])
        same("lse", parts[5].reshape(1, heads, n), expected[1])
        for name, got, result in zip(("dq", "dk", "dv"), grads, plan.backward(dout, q, k, v, *expected)):
            same(name, got, result)
        assert all(array.any() for array in (q, k, v, dout, out, *grads))


if __name__ == "__main__":
    of = Path(sys.argv[1])
    if sys.argv[2] == "calls":
        calls(of)
    else:
        ocean(of, tuple(map(int, sys.argv[3].split("x"))))
