"""Input files for the tests of the command line, and what their output must hold."""

from pathlib import Path

import h5py
import numpy as np

from mpiattn.verify import reference

# Problems of a file with many, by group: what `write_input` takes; and the order in which they are computed.
LAYERS = {
    "layers/10": {"seqlen": 41},
    "layers/2": {"seqlen": 67},
    "layers/1": {"seqlen": 41},
    "encoder": {"seqlen": 30, "heads": 2, "dtype": "float64", "batch": 2},
}
ORDER = ["encoder", "layers/1", "layers/2", "layers/10"]

# A program: the command line, in whose first block rank 1 raises.
RANK_1_RAISES = """
import sys, mpiattn.engine.executor as e
from mpi4py import MPI
def broken(self, *arguments):
    if MPI.COMM_WORLD.rank == 1: raise ZeroDivisionError('on purpose')
    return run_block(self, *arguments)
run_block, e.Executor._run_block = e.Executor._run_block, broken
from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))
"""


def bfloat16_type():
    """What a file stores bfloat16 as: a float of 16 bits, 8 of exponent and 7 of mantissa."""
    kind = h5py.h5t.IEEE_F16LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_ebias(127)
    return kind


def write_input(
    path,
    seqlen=67,
    heads=4,
    kv_heads=2,
    head_dim=16,
    value_dim=None,
    seqlen_k=None,
    batch=1,
    dtype="float32",
    seed=0,
    backward=False,
    **datasets,
):
    """An input file of random q, k, v, with `backward` dout; `datasets` replaces or adds some, None leaves one out."""
    rng = np.random.default_rng(seed)
    queries, keys = (batch, seqlen, heads), (batch, seqlen_k or seqlen, kv_heads)
    shapes = {"q": (*queries, head_dim), "k": (*keys, head_dim), "v": (*keys, value_dim or head_dim)}
    if backward:
        shapes["dout"] = (*queries, value_dim or head_dim)
    drawn = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    with h5py.File(path, "w") as file:
        for name, data in (drawn | datasets).items():
            if data is None:
                continue
            if name in datasets or dtype != "bfloat16":
                file[name] = data if name in datasets else data.astype(dtype)
            else:  # HDF5 itself rounds float32 to what the dataset holds
                h5py.h5d.create(file.id, name.encode(), bfloat16_type(), h5py.h5s.create_simple(data.shape))
                file[name][...] = data.astype(np.float32)
    return path


def write_problems(path, shapes, backward=False):
    """An input file of several problems.  shapes: arguments of `write_input` by the path of the group."""
    with h5py.File(path, "w") as file:
        for number, (group, shape) in enumerate(shapes.items()):
            single = write_input(f"{path}.single", backward=backward, seed=number, **shape)
            with h5py.File(single) as given:
                for name in given:
                    given.copy(name, file.require_group(group))
            Path(single).unlink()
    return path


def datasets(path):
    """The bytes of all datasets of a file, by path."""
    contents = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, item: contents.update({name: item[()].tobytes()}) if isinstance(item, h5py.Dataset) else None
        )
    return contents


def assert_right(source, result, causal=False, scale=None, tolerance=1e-5, backward=False, group="/", **masks):
    """The output file holds float64 attention of the input file, in natural order and the input's type.

    backward: and its gradients, and none without.  group: of both.  masks: as of the reference.
    """
    with h5py.File(source) as of_source, h5py.File(result) as of_result:
        given, made = of_source[group], of_result[group]
        q, k, v = (given[name][:] for name in "qkv")
        out, lse = reference.attention(q, k, v, causal, scale, **masks)
        expected = {"out": out}
        if backward:
            grads = reference.backward(given["dout"][:], q, k, v, causal, scale, **masks)
            expected |= dict(zip(("dq", "dk", "dv"), grads))
        assert set(made) == {*expected, "lse"}
        for name, right in expected.items():
            assert made[name].id.get_type() == given["q"].id.get_type()
            assert made[name].shape == right.shape
            assert np.abs(made[name][:] - right).max() <= tolerance * np.abs(right).max(), name
        assert made["lse"].dtype == (np.float64 if given["q"].dtype == np.float64 else np.float32)
        assert np.array_equal(np.isneginf(made["lse"][:]), np.isneginf(lse))
        seen = ~np.isneginf(lse)
        allowed = min(tolerance, 1e-5) * np.abs(lse[seen]).max(initial=1)
        assert np.abs(made["lse"][:][seen] - lse[seen]).max(initial=0) <= allowed
        return dict(made.attrs)
