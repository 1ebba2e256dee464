"""Input files for the tests of the command line, and what their output must hold."""

import h5py
import numpy as np

from mpiattn import reference


def write_input(path, seqlen=67, heads=4, kv_heads=2, head_dim=16, value_dim=None, seqlen_k=None, batch=1,
                dtype="float32", seed=0, **datasets):
    """An input file of random q, k, v; `datasets` replaces some of them, None leaves one out."""
    rng = np.random.default_rng(seed)
    keys = (batch, seqlen_k or seqlen, kv_heads)
    shapes = {"q": (batch, seqlen, heads, head_dim), "k": (*keys, head_dim), "v": (*keys, value_dim or head_dim)}
    with h5py.File(path, "w") as file:
        for name, shape in shapes.items():
            data = datasets.get(name, rng.standard_normal(shape).astype(dtype))
            if data is not None:
                file[name] = data
    return path


def assert_right(source, result, causal=False, scale=None, tolerance=1e-5):
    """The output file holds float64 attention of the input file, in natural order and the input's dtype."""
    with h5py.File(source) as given, h5py.File(result) as made:
        out, lse = reference.attention(given["q"][:], given["k"][:], given["v"][:], causal, scale)
        assert made["out"].dtype == given["q"].dtype
        assert made["out"].shape == out.shape
        assert made["lse"].dtype == (np.float64 if given["q"].dtype == np.float64 else np.float32)
        assert np.abs(made["out"][:] - out).max() <= tolerance * np.abs(out).max()
        assert np.array_equal(np.isneginf(made["lse"][:]), np.isneginf(lse))
        seen = ~np.isneginf(lse)
        assert np.abs(made["lse"][:][seen] - lse[seen]).max() <= tolerance * max(1, np.abs(lse[seen]).max())
        return dict(made.attrs)
