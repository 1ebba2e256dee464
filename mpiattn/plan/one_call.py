"""`attention`: makes a plan for the given chunks, or takes the one that it made for such chunks, and runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import backends
from ..arguments.arrays import heads_first
from ..arguments.biases import BiasArguments
from ..arguments.documents import DocumentArguments
from ..arguments.keywords import names_of_arguments, unknown
from ..arguments.untraced import untraced
from ..comm.agreement import agreement, digest_of
from ..comm.available import agreed_backend
from ..comm.mesh import Home
from ..comm.peers import time_limit
from ..comm.refusal import of_function, refusing
from ..errors import ArgumentError
from ..model.memory import chunk_bytes
from ..problem.layout import LAYOUTS, Layout
from ..problem.tensors import as_array, what_is
from ..system.choices import one_of
from ..system.values import truth
from .mesh_attention import MeshAttention

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..backends.base import Array
    from ..problem.layout import AnyLayout

# The arguments of `MeshAttention.forward` that `attention` hands on; all other options are those of `MeshAttention`.
OF_CALL = (*DocumentArguments._fields, "sinks", *BiasArguments._fields)
# Plans that are kept on a communicator, and the most bytes of a rank's chunks: a larger plan takes little of its call.
KEPT_PLANS, KEPT_PLAN_BYTES = 4, 2**24
MANY_HEADS = 128  # more than models have: where no option says the order of axes, fewer are taken as they are


# Of a plan, `attention` takes the options that its arrays do not say.
OF_ARRAYS = ("seqlen", "heads", "head_dim", "batch", "kv_heads", "dtype", "seqlen_k", "shared_kv")
ARGUMENTS = (
    "q", "k", "v", *(name for name in names_of_arguments("MeshAttention") if name not in (*OF_ARRAYS, *OF_CALL)),
    "verify", *OF_CALL,
)  # fmt: skip


@untraced
@refusing("attention", of_function("attention"), ARGUMENTS)
def attention(
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    comm: MPI.Intracomm,
    value_dim: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    layout: AnyLayout = "contiguous",
    verify: bool = False,
    **options: Any,
) -> tuple[Array, Array]:
    """Attention in one call: makes a plan for these chunks and runs it; collective.

    The last 4 plans for small chunks, up to 16 MiB a rank, are kept for calls with the same shapes and options, until
    the caller frees the communicator.  Others and those on a GPU are closed.  For repeated calls, make a
    `MeshAttention` once.

    Parameters
    ----------
    q : array, (batch, tokens, heads, head_dim)
        This rank's chunk of the queries, of dtype float16, bfloat16, float32 or float64: a NumPy array, a torch tensor,
        any with NumPy's or DLPack's interface or, for the back end "cuda", on a GPU.  With the default
        layout, chunks are consecutive pieces of the sequence in order of rank, of any lengths, which are exchanged.
        With "striped" or "zigzag", chunks are as in `Layout`.
    k : array, (batch, tokens_k, kv_heads, head_dim)
        This rank's chunk of the keys, in q's dtype.  kv_heads divides heads.
    v : array, (batch, tokens_k, kv_heads, value_dim)
        This rank's chunk of the values, in q's dtype.  None if a value is the first value_dim elements of its key.
    comm : mpi4py.MPI.Intracomm
        The ranks; it stays the caller's.
    value_dim : int, default that of v
        Elements of a value; needed where v is None.
    causal : bool, default False
        Whether query i sees only keys j <= i + seqlen_k - seqlen (bottom-right aligned).
    scale : float, default 1/sqrt(head_dim)
        Factor of the scores; it has no default where v is None.
    layout : str, Layout, tuple of int, or pair of the latter two, default "contiguous"
        The tokens of each rank: "contiguous", "striped", "zigzag" or as in `MeshAttention`.
    verify : bool, default False
        Whether to compare a sample of the results with float64 attention, as `MeshAttention.verify` does.
    **options
        Other arguments of `MeshAttention`, and cu_seqlens, cu_seqlens_k, lengths, lengths_k, prefixes,
        causal_documents, padding, sinks, key_bias, alibi_slopes, relative_bias, relative_grid, relative_cyclic,
        dropout and seed of `MeshAttention.forward`, whose positions and lengths are those of the whole sequence.  Not
        bias: a `MeshAttention` says which tile of it this rank needs.  The default backend is "cuda" if q is on a GPU,
        else "auto".

    Returns
    -------
    out : array, (batch, tokens, heads, value_dim)
        In q's dtype, of q's library as in `MeshAttention`.  0 for a query that sees no key.
    lse : array, (batch, heads, tokens)
        Natural logarithms of the rows' sums of exponentials, float32 (float64 for float64).  -inf for a query that
        sees no key.

    Raises
    ------
    ArgumentError
        The same on every rank.
    PeerFailure
        Another rank failed during the call, or did not call in time.
    VerificationError
        The same on every rank: with verify, and a result is wrong.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> import mpiattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 100, 4, 16), np.float32)
    >>> out, lse = mpiattn.attention(q, k, v, comm=MPI.COMM_WORLD, causal=True)
    >>> out.shape, lse.shape
    ((1, 100, 4, 16), (1, 4, 100))
    """
    limit, given = time_limit(options.get("timeout")), (q, k, v)
    call = {name: options.pop(name) for name in OF_CALL if name in options}
    home = Home.enter(comm, limit)
    peers = home.peers(limit)
    try:
        with home.call("attention"):
            with agreement(peers, call="attention") as same:
                wrong = unknown("attention", options, ARGUMENTS)
                if wrong:
                    raise wrong
                if call.pop("bias", None) is not None:
                    raise ArgumentError(
                        "bias is given; mpiattn.attention itself chooses which tile of it a rank computes with: make "
                        "a MeshAttention, whose bias_positions say which that is, and give the tile to its forward"
                    )
                if v is None and value_dim is None:
                    raise ArgumentError(
                        "v is None; it must be an array, or value_dim must say how much of a key is its value"
                    )
                if isinstance(layout, str):  # the chunks are in place, so "auto" cannot be
                    one_of("layout", layout, LAYOUTS)
                arrays = {"q": q, "k": k} | ({} if v is None else {"v": v})
                arrays = {name: as_array(name, array) for name, array in arrays.items()}
                backend = options.pop("backend", "auto")
                backend = backends.for_array(arrays["q"]) if backend == "auto" else backend
                same |= {"backend": backend, "verify": truth("verify", verify)}
                backends.candidates(backend)
            backend = agreed_backend(peers, backend)
            with agreement(peers):
                arrays = backends.find(backend).load().adopt(arrays)
                for name, array in arrays.items():
                    if getattr(array, "ndim", None) != 4 or not hasattr(array, "dtype"):
                        must = "it must be an array (batch, tokens, heads, head_dim)"
                        raise ArgumentError(f"{name} {_what(array)}; {must}{_how(name, array)}")
                q, k, v = (arrays.get(name) for name in ("q", "k", "v"))
                asked = {
                    "value_dim": value_dim,
                    "causal": causal,
                    "scale": scale,
                    "layout": layout,
                    "backend": backend,
                    "key_bias": call.get("key_bias") is not None,
                    **options,
                }
                asked |= {name: (len(array), *array.shape[2:], str(array.dtype)) for name, array in arrays.items()}
            # ranks whose arguments differ have no plan in common: making one says what differs
            of_ranks = peers.each([q.shape[1], k.shape[1], digest_of("attention", asked)])
        plan = home.plans.pop(of_ranks.tobytes(), None)
        if plan is not None:
            home.plans[of_ranks.tobytes()] = plan  # now the newest
            return _run(plan, given, call, verify)
        q_sizes, k_sizes, _ = map(tuple, of_ranks.T.tolist())
        with agreement(peers):
            _check_order(q.shape, k.shape, sum(q_sizes), sum(k_sizes))
        if isinstance(layout, str) and layout in LAYOUTS:  # the chunks are in place: a plan must not deal them out
            uneven = layout == "contiguous"
            layout = (
                Layout(layout, sum(q_sizes), comm.size, q_sizes if uneven else None),
                Layout(layout, sum(k_sizes), comm.size, k_sizes if uneven else None),
            )
        plan = MeshAttention(
            comm,
            batch=q.shape[0],
            seqlen=sum(q_sizes),
            seqlen_k=sum(k_sizes),
            heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim=q.shape[3],
            value_dim=v.shape[3] if value_dim is None else value_dim,
            shared_kv=v is None,
            dtype=str(q.dtype),
            causal=causal,
            scale=scale,
            layout=layout,
            backend=backend,
            key_bias=call.get("key_bias") is not None,
            **options,
        )
        if backends.find(backend).on_gpu or chunk_bytes(plan.problem, max(q_sizes), max(k_sizes)) > KEPT_PLAN_BYTES:
            with plan:
                return _run(plan, given, call, verify)
        home.plans[of_ranks.tobytes()] = plan
        if len(home.plans) > KEPT_PLANS:
            home.plans.pop(next(iter(home.plans))).close()
        return _run(plan, given, call, verify)
    finally:
        home.leave()


def _run(plan: MeshAttention, given: tuple[Array, ...], call: dict[str, Any], verify: bool) -> tuple[Array, Array]:
    results = plan.forward(*given, **call)
    if verify:
        q, k, v = given
        plan.verify(q, k, v, *results, **call)
    return results


def _check_order(q: tuple[int, ...], k: tuple[int, ...], tokens: int, tokens_k: int) -> None:
    """Raise ArgumentError if q and k look like (batch, heads, tokens, head_dim).

    q, k: shapes on this rank.  tokens, tokens_k: on all ranks.
    """
    whole = {"q": (q[0], tokens, *q[2:]), "k": (k[0], tokens_k, *k[2:])}
    name = heads_first(*whole.values())
    if name and whole[name][2] > MANY_HEADS:
        raise ArgumentError(
            f"{name} has shape {dict(q=q, k=k)[name]}, which is {whole[name][2]} heads and, of all ranks, "
            f"{whole[name][1]} tokens; it must be (batch, tokens, heads, head_dim): np.swapaxes({name}, 1, 2) makes "
            "that of (batch, heads, tokens, head_dim).  A MeshAttention takes so many heads of few tokens"
        )


def _what(array: Array) -> str:
    return f"has shape {tuple(array.shape)}" if hasattr(array, "shape") else f"is a {type(array).__name__}"


def _how(name: str, array: Array) -> str:
    """How to make an array of four axes of it, if that is known."""
    if getattr(array, "ndim", None) == 3:
        return f", which {name}[None] makes of one sequence"
    return "" if hasattr(array, "shape") else what_is(array)
