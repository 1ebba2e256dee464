"""Attention of PyTorch tensors, with gradients, for training code.

    from mpiattn.torch import attention

    out, lse = attention(plan, q, k, v)        # this rank's chunks, as plan.forward takes them
    loss(out).backward()                       # collective too: calls plan.backward

Tensors are the plan's arguments and results as they are, see `MeshAttention.forward`.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

try:
    import torch
except ImportError as error:
    raise ImportError(
        f"mpiattn.torch needs torch ({error}); the `torch` extra has it: pip install 'mpiattn[torch]'"
    ) from error

from . import backends
from .arguments.biases import WITH_GRADIENTS, BiasArguments
from .arguments.documents import DocumentArguments
from .arguments.untraced import untraced
from .comm.refusal import refusing
from .errors import ArgumentError
from .plan.arguments import checked_plan, refused
from .plan.gradient_shares import divide
from .problem.tensors import check_transforms, shared
from .system.values import truth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .plan.mesh_attention import MeshAttention
    from .problem.documents import PerDocument

# The tensors of a call that may require a gradient, in the order of `_Attention.forward`.
TENSORS = ("q", "k", "v", "sinks", *WITH_GRADIENTS)


@untraced
@refusing("mpiattn.torch.attention", refused("torch.attention"))
def attention(
    plan: MeshAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None = None,
    *,
    cu_seqlens: PerDocument = None,
    cu_seqlens_k: PerDocument = None,
    lengths: PerDocument = None,
    lengths_k: PerDocument = None,
    prefixes: PerDocument = None,
    causal_documents: PerDocument = None,
    padding: bool = False,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    key_bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    relative_bias: torch.Tensor | None = None,
    relative_grid: Sequence[int] | None = None,
    relative_cyclic: Sequence[bool] | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    bias_shared: Sequence[str] | None = None,
    check: bool = True,
    verify: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's chunks, differentiable with respect to all tensors among the arguments; collective.

    Gradients are those of the sum of all ranks' losses, in the dtypes of their inputs.  Those of sinks, alibi_slopes
    and relative_bias are equal shares on all ranks; the sum over ranks, as for any replicated parameter, is the whole
    gradient.  So it is for a bias that planes of the mesh share: each rank with the same tile gets an equal share.

    The backward pass is collective too: all ranks run it or none, in the same order for several calls of `attention`.
    Therefore all ranks must agree whether any tensor requires a gradient, and which of the biases do.  Every rank's
    loss must depend on its results of `attention`, even for a chunk without tokens.  The backward pass computes the
    gradients of q, k, v and sinks, requested or not, and those of the biases that required one in the forward pass.
    It can itself not be differentiated.  Torch runs the backward pass of CUDA tensors in its own thread, so
    MPI must provide MPI_THREAD_SERIALIZED or more; mpi4py requests that.

    Functions that call it may be compiled by torch.compile, which leaves the call as it is, but not with
    fullgraph=True.  Transforms of torch.func and forward-mode differentiation raise ArgumentError.

    Parameters
    ----------
    plan : MeshAttention
        It must stay open until the backward pass has ended.
    q : torch.Tensor, (batch, tokens, heads, head_dim)
        Dense, in the plan's dtype, on the plan's GPU with the back end "cuda", else on the CPU.  Tokens as in
        plan.positions.  q, k and v are copied only where `MeshAttention.forward` copies.
    k : torch.Tensor, (batch, tokens_k, kv_heads, head_dim)
        As q; tokens as in plan.positions_k.
    v : torch.Tensor, (batch, tokens_k, kv_heads, value_dim)
        As k; None in a plan with shared_kv, where k's gradient is that of keys and values.
    cu_seqlens, cu_seqlens_k, lengths, lengths_k, prefixes, causal_documents, padding
        As in `MeshAttention.forward`; the backward pass uses them too.
    sinks : torch.Tensor, (heads,), default None
        In lse's dtype, the same on every rank.
    bias, key_bias, alibi_slopes, relative_bias : torch.Tensor, default None
        As in `MeshAttention.forward`.  The backward pass needs those that it got, unchanged.
    relative_grid, relative_cyclic, dropout, seed
        As in `MeshAttention.forward`; the backward pass drops the weights that the forward pass dropped.
    bias_shared : sequence of str, default None
        As in `MeshAttention.backward`, which takes it if bias requires a gradient.
    check : bool, default True
        As in `MeshAttention.forward`; the backward pass uses it too.  It adds two small allreduces to those of the
        plan in the forward pass, and one in the backward pass.
    verify : bool, default False
        Whether to compare a sample of out and lse with float64 attention, and in the backward pass of the gradients
        too, by `MeshAttention.verify`, whose docstring says what that costs.

    Returns
    -------
    out : torch.Tensor, (batch, tokens, heads, value_dim)
        In the plan's dtype.  The loss may depend on out, on lse or on both.
    lse : torch.Tensor, (batch, heads, tokens)
        float32 (float64 for float64).

    Raises
    ------
    ArgumentError
        The same on every rank.
    VerificationError
        The same on every rank, here or in the backward pass: with verify, and a result is wrong.
    """
    biases = {"bias": bias, "key_bias": key_bias, "alibi_slopes": alibi_slopes, "relative_bias": relative_bias}
    biases = {name: tensor for name, tensor in biases.items() if tensor is not None}
    tensors = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks}) | biases
    with checked_plan(plan).call("torch.attention") as call, call.agreement(check) as same:
        _check(plan, tensors)
        if bias_shared is not None and bias is None:
            raise ArgumentError("bias_shared is given without bias, which alone it is about")
        same["verify"] = truth("verify", verify)
        # if this differed, only some ranks would run the backward pass
        wanted = [name for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad]
        same["requires_grad (of any tensor)"] = torch.is_grad_enabled() and bool(wanted)
        wanted = [name for name in wanted if name in biases]
        if biases:
            same["requires_grad (of biases)"] = wanted if torch.is_grad_enabled() else []
    # copies, because the caller may change the originals before the backward pass
    documents = deepcopy(
        DocumentArguments(cu_seqlens, cu_seqlens_k, lengths, lengths_k, prefixes, causal_documents, padding)
    )
    options = deepcopy(BiasArguments(None, None, None, None, relative_grid, relative_cyclic, dropout, seed))
    how = _How(documents, options, wanted, deepcopy(bias_shared) if "bias" in wanted else None, check, verify)
    return _Attention.apply(plan, how, q, k, v, sinks, bias, key_bias, alibi_slopes, relative_bias)


class _How(NamedTuple):
    """The arguments of `attention` besides the plan and the tensors.

    biases: those without tensors.  wanted: names of the tensors among the biases that require a gradient.
    """

    documents: DocumentArguments
    biases: BiasArguments
    wanted: list[str]
    bias_shared: Sequence[str] | None
    check: bool
    verify: bool

    def call(self, sinks: Any, biases: Sequence[Any]) -> dict[str, Any]:
        """The keywords that all calls of the plan have.  biases: the tensors, in the order of WITH_GRADIENTS."""
        given = self.biases._replace(**dict(zip(WITH_GRADIENTS, biases, strict=True)))
        return {"sinks": sinks, **self.documents._asdict(), **({} if given.none else given._asdict())}


class _Attention(torch.autograd.Function):
    """The plan's forward and backward pass as one node of torch's graph."""

    @staticmethod
    def forward(ctx: Any, plan: MeshAttention, how: _How, q: Any, k: Any, v: Any, sinks: Any, *biases: Any) -> Any:
        given = how.call(sinks, biases)
        out, lse = plan.forward(q, k, v, check=how.check, **given)
        ctx.plan, ctx.how = plan, how
        if how.verify:
            plan.verify(q, k, v, out, lse, **given)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *biases)
        ctx.set_materialize_grads(False)  # plan.backward accepts dlse=None
        return out, lse

    @staticmethod
    @untraced  # compiled code may hold loss.backward()
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        saved, changed = _saved(ctx)
        return None, None, *_Gradients.apply(ctx.plan, ctx.how, changed, dout, dlse, *(saved or ()))


class _Gradients(torch.autograd.Function):
    """The plan's backward pass, a node of its own in the graph that create_graph=True asks for.

    Torch's once_differentiable would not do: it takes the gradients for constants where dout is one, as that of a sum
    is, and what is made of them would have wrong gradients.
    """

    @staticmethod
    def forward(ctx: Any, plan: MeshAttention, how: _How, changed: Any, dout: Any, dlse: Any, *saved: Any) -> Any:
        with plan.call("torch.attention's backward pass") as call, call.agreement(how.check):
            if changed:
                raise changed
            q, k, v, out, lse, sinks, *biases = saved
            dout = torch.zeros_like(out) if dout is None else dout
            _check(plan, {"dout": dout, "dlse": dlse})
        given = how.call(sinks, biases)
        more: dict[str, Any] = {}
        if any(bias is not None for bias in biases):
            more = {"bias_gradients": how.wanted, "bias_shared": how.bias_shared}
        grads = plan.backward(dout, q, k, v, out, lse, dlse=dlse, check=how.check, **given, **more)
        if how.verify:
            plan.verify(q, k, v, out, lse, dout=dout, dlse=dlse, grads=grads, **given, **more)
        names = ["q", "k", "v", *["sinks"] * (sinks is not None), *how.wanted]
        of = dict(zip(names, grads, strict=True))
        divide(plan, of, None if biases[0] is None else biases[0].shape, how.bias_shared)
        return tuple(of.get(name) for name in TENSORS)  # torch casts them to the dtypes of the tensors

    @staticmethod
    def backward(ctx: Any, *of_gradients: Any) -> Any:
        raise ArgumentError("the gradients of mpiattn.torch.attention cannot be differentiated again")


def _saved(ctx: Any) -> tuple[Any, RuntimeError | None]:
    """(saved tensors, None), or (None, error) if tensors were changed since the forward pass.

    With activation checkpointing, torch may call `attention` here to recompute what it has not saved.
    """
    try:
        return ctx.saved_tensors, None
    except RuntimeError as error:
        return None, error


def _check(plan: MeshAttention, tensors: dict[str, Any]) -> None:
    """Raise ArgumentError unless all are tensors where the plan computes, or None where that may be."""
    kind = backends.find(plan.backend)
    for name, tensor in tensors.items():
        if tensor is None and name in ("sinks", "dlse", *["v"] * plan.problem.shared_kv):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(tensor).__name__}; it must be a torch tensor")
        check_transforms(name, tensor)
        if tensor.device.type != kind.device:
            place = "its plan's GPU" if kind.on_gpu else "the CPU"
            raise ArgumentError(f"{name} is on device {tensor.device}; it must be on {place}")
        if not kind.on_gpu:
            shared(name, tensor)
