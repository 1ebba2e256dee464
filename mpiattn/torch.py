"""Attention as a function of PyTorch tensors, with gradients: what training code calls.

    from mpiattn.torch import attention

    out, lse = attention(plan, q, k, v)        # this rank's chunks, as plan.forward takes them
    loss(out).backward()                       # collective too: calls plan.backward

Tensors and the plan's arrays share memory both ways: CPU tensors with NumPy arrays (see `problem.tensors`); of a plan
with the back end "cuda", CUDA tensors with CuPy arrays, on torch's current stream.
"""

from contextlib import contextmanager
from copy import deepcopy

import numpy as np

try:
    import torch
except ImportError as error:
    raise ImportError(f"mpiattn.torch needs torch ({error}); the `torch` extra has it: "
                      "pip install 'mpiattn[torch]'") from error

from torch.autograd.function import once_differentiable

from . import backends
from .errors import ArgumentError
from .problem.tensors import as_tensor, shared


def attention(plan, q, k, v, *, cu_seqlens=None, cu_seqlens_k=None, lengths=None, lengths_k=None, prefixes=None,
              causal_documents=None, sinks=None, check=True):
    """Attention of this rank's chunks, differentiable by q, k, v and sinks; collective, and so is its backward pass.

    Gradients are of the sum of all ranks' losses, in the dtypes of what they belong to.  That of sinks is an equal
    share on every rank: summed over the ranks, as any replicated parameter's, it is the whole.

    The backward pass computes all gradients, wanted or not, and needs every rank: either all of them call it or none,
    and several calls of `attention` in the same order.  So whether any of q, k, v and sinks requires a gradient must be
    the same on every rank, and every rank's loss must depend on what attention returned there, a chunk of no tokens
    included.  It can be differentiated once only.  Torch runs the backward pass of CUDA tensors in a thread of its own,
    so that MPI must allow threads to call it in turn, as mpi4py asks for.

    Parameters
    ----------
    plan : MeshAttention
        It must stay open until the backward pass is over.
    q : torch.Tensor, (batch, tokens, heads, head_dim)
        Dense, in the plan's dtype, on its GPU if the back end is "cuda" and else on the CPU; tokens as in
        plan.positions.  It is copied only where `MeshAttention.forward` copies, and so are k and v.
    k : torch.Tensor, (batch, tokens_k, kv_heads, head_dim)
        As q; tokens as in plan.positions_k.
    v : torch.Tensor, (batch, tokens_k, kv_heads, value_dim)
        As k.
    cu_seqlens, cu_seqlens_k, lengths, lengths_k, prefixes, causal_documents : default None
        As of `MeshAttention.forward`, and used by the backward pass too.
    sinks : torch.Tensor, (heads,), default None
        In lse's dtype, the same on every rank.
    check : bool, default True
        As of `MeshAttention.forward`, and used by the backward pass too.  With it, forward costs two more small
        allreduces than the plan's own and backward one.

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
    """
    tensors = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
    with plan.call("torch.attention") as call, call.agreement(check) as same:
        for name, tensor in tensors.items():
            _array(plan, name, tensor)
        # else some ranks alone would come to the backward pass
        same["requires_grad (of any of q, k, v and sinks)"] = (
            torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values()))
    # the caller may change them before the backward pass
    documents = deepcopy({"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k, "lengths": lengths,
                          "lengths_k": lengths_k, "prefixes": prefixes, "causal_documents": causal_documents})
    return _Attention.apply(plan, {**documents, "check": check}, q, k, v, sinks)


class _Attention(torch.autograd.Function):
    """The plan's two passes as one node of a graph."""

    @staticmethod
    def forward(ctx, plan, options, q, k, v, sinks):
        with _torch_stream(plan):
            out, lse = map(_tensor, plan.forward(*_arrays(plan, q=q, k=k, v=v), sinks=_array(plan, "sinks", sinks),
                                                 **options))
        ctx.plan, ctx.options = plan, options
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.set_materialize_grads(False)               # a plan knows what to do without dlse
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        plan = ctx.plan
        saved, changed = _saved(ctx)
        with plan.call("torch.attention's backward pass") as call, call.agreement(ctx.options["check"]):
            if changed:
                raise changed
            q, k, v, out, lse, sinks = saved
            dout = torch.zeros_like(out) if dout is None else dout
            arrays = _arrays(plan, dout=dout, q=q, k=k, v=v, out=out, lse=lse)
            more = {"dlse": _array(plan, "dlse", dlse), "sinks": _array(plan, "sinks", sinks)}
        with _torch_stream(plan):
            dq, dk, dv, *dsinks = map(_tensor, plan.backward(*arrays, **more, **ctx.options))
        share = dsinks[0] / plan.q_layout.chunks if dsinks else None
        return None, None, dq, dk, dv, share


def _saved(ctx):
    """The saved tensors, or None and the error that a rank gets whose tensors were changed meanwhile.

    Torch may call `attention` here, to compute again what it has not saved.
    """
    try:
        return ctx.saved_tensors, None
    except RuntimeError as error:
        return None, error


class _Stream:
    """Torch's current stream, as CuPy takes other libraries' streams."""

    def __init__(self):
        self.pointer = torch.cuda.current_stream().cuda_stream

    def __cuda_stream__(self):
        return 0, self.pointer


@contextmanager
def _torch_stream(plan):
    """Torch's stream is CuPy's meanwhile, so that the pass comes after its work and results are freed in its order."""
    if not backends.find(plan.backend).on_gpu:
        yield
        return
    import cupy
    with cupy.cuda.Stream.from_external(_Stream()):
        yield


def _arrays(plan, **tensors):
    return [_array(plan, name, tensor) for name, tensor in tensors.items()]


def _array(plan, name, tensor):
    """A tensor's memory as an array of any strides, or on a GPU the tensor, which the plan shares; None for None."""
    if tensor is None and name in ("sinks", "dlse"):
        return None
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{name} is a {type(tensor).__name__}; it must be a torch tensor")
    kind = backends.find(plan.backend)
    if tensor.device.type != kind.device:
        place = "its plan's GPU" if kind.on_gpu else "the CPU"
        raise ArgumentError(f"{name} is on device {tensor.device}; it must be on {place}")
    return tensor.detach() if kind.on_gpu else shared(name, tensor)


def _tensor(array):
    """An array's memory as a tensor."""
    return as_tensor(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)
