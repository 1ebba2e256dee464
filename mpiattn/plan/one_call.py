"""`attention`: a plan made for the chunks at hand, run once and closed."""

from ..backends.cuda.arrays import as_cupy, load_cupy, on_device
from ..backends.cuda.backend import stay_on
from ..comm.agreement import agreement
from ..comm.mesh import Home
from ..comm.peers import time_limit
from ..errors import ArgumentError
from ..problem.layout import Layout
from ..problem.tensors import as_array, as_given
from .mesh_attention import MeshAttention

# Options of `MeshAttention.forward`.
OF_CALL = ("cu_seqlens", "cu_seqlens_k", "lengths", "lengths_k", "prefixes", "causal_documents", "sinks")


def attention(q, k, v, *, comm, causal=False, scale=None, layout="contiguous", **options):
    """Attention in one call: makes a plan for these chunks, runs it, and closes it; collective.

    q, k, v: this rank's chunks, as for `MeshAttention.forward`.  With the default layout they are consecutive
    pieces of the sequence in order of rank, of any lengths, which the ranks tell each other; with "striped" or
    "zigzag" they are what `Layout` says.  options: further arguments of `MeshAttention`, of which backend is by default
    "cuda" for arrays on a GPU, else "numpy", and of its `forward`: documents and what they see, sinks.  Positions and
    lengths in these are of the whole sequence.

    Returns out and lse.  To run more than once, make a plan.
    """
    limit, given = time_limit(options.get("timeout")), q
    call = {name: options.pop(name) for name in OF_CALL if name in options}
    home = Home.enter(comm, limit)
    peers = home.peers(limit)
    try:
        with home.call("attention"):
            with agreement(peers, call="attention"):
                q, k, v = (as_array(name, array) for name, array in (("q", q), ("k", k), ("v", v)))
                if options.get("backend", "auto") == "auto" and on_device(q):
                    options["backend"] = "cuda"
                if options.get("backend") == "cuda":
                    cupy = load_cupy()
                    q, k, v = (as_cupy(cupy, name, array) for name, array in (("q", q), ("k", k), ("v", v)))
                    if isinstance(q, cupy.ndarray):
                        stay_on(cupy, q.device.id)
                for name, array in (("q", q), ("k", k), ("v", v)):
                    if getattr(array, "ndim", None) != 4 or not hasattr(array, "dtype"):
                        raise ArgumentError(f"{name} is {_what(array)}; it must be an array (batch, tokens, heads, "
                                            "dim)")
            lengths = peers.allgather((q.shape[1], k.shape[1]))
        q_sizes, k_sizes = zip(*lengths)
        if layout == "contiguous":
            layout = tuple(Layout(layout, sum(sizes), comm.size, sizes) for sizes in (q_sizes, k_sizes))
        with MeshAttention(comm, batch=q.shape[0], seqlen=sum(q_sizes), seqlen_k=sum(k_sizes), heads=q.shape[2],
                           kv_heads=k.shape[2], head_dim=q.shape[3], value_dim=v.shape[3], dtype=str(q.dtype),
                           causal=causal, scale=scale, layout=layout, **options) as plan:
            return as_given(given, *plan.forward(q, k, v, **call))
    finally:
        home.leave()


def _what(array):
    return f"of shape {tuple(array.shape)}" if hasattr(array, "shape") else f"a {type(array).__name__}"
