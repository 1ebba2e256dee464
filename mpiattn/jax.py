"""Attention of JAX arrays, with gradients, for training code.

    from mpiattn.jax import attention

    @jax.jit
    def loss(q, k, v):                         # this rank's chunks, as plan.forward takes them
        out, lse = attention(plan, q, k, v)
        return (out**2).sum()

    jax.grad(loss, (0, 1, 2))(q, k, v)         # collective: calls plan.forward and plan.backward

In what JAX traces a pass is an ordered callback: compiled code calls it on the host, in the order of the program.  What
JAX does not trace is called at once.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

try:
    import jax
except ImportError as error:
    raise ImportError(f"mpiattn.jax needs jax ({error}); the `jax` extra has it: pip install 'mpiattn[jax]'") from error

import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import backends
from .arguments.arrays import check_form, check_values
from .arguments.biases import WITH_GRADIENTS, BiasArguments
from .arguments.documents import DocumentArguments
from .arguments.untraced import untraced
from .comm.refusal import refusing
from .errors import ArgumentError
from .plan.arguments import checked_plan, forms, refused
from .plan.gradient_shares import divide
from .system.values import truth

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .plan.mesh_attention import MeshAttention
    from .problem.documents import PerDocument

# Arguments that are JAX arrays and have gradients; those that may be JAX arrays.
DIFFERENTIABLE = ("q", "k", "v", "sinks", *WITH_GRADIENTS)
NUMBERS = (*DocumentArguments._fields[:-1], "seed")


@untraced
@refusing("mpiattn.jax.attention", refused("jax.attention"))
def attention(
    plan: MeshAttention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None = None,
    *,
    cu_seqlens: PerDocument = None,
    cu_seqlens_k: PerDocument = None,
    lengths: PerDocument = None,
    lengths_k: PerDocument = None,
    prefixes: PerDocument = None,
    causal_documents: PerDocument = None,
    padding: bool = False,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    key_bias: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    relative_bias: jax.Array | None = None,
    relative_grid: Sequence[int] | None = None,
    relative_cyclic: Sequence[bool] | None = None,
    dropout: float = 0.0,
    seed: int | jax.Array | None = None,
    bias_shared: Sequence[str] | None = None,
    check: bool = True,
    verify: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of this rank's chunks, differentiable with respect to all floating-point arrays; collective.

    Gradients are those of the sum of all ranks' losses, in the dtypes of their inputs.  Those of sinks, alibi_slopes
    and relative_bias are equal shares on all ranks; the sum over ranks, as for any replicated parameter, is the whole
    gradient.  So it is for a bias that planes of the mesh share: each rank with the same tile gets an equal share.

    It may stand in functions that jax.jit, jax.grad, jax.value_and_grad, jax.vjp and jax.checkpoint are applied to, and
    in lax.scan, lax.cond and loops.  All ranks run the same calls in the same order, forward and backward: compiled
    code keeps that of the program, also for calls whose results nobody uses.  Whatever decides about a call, such as
    the predicate of lax.cond or the length of a loop, must be the same on every rank.  jax.checkpoint keeps out and
    lse and does not compute them again.

    JAX may return before a compiled call has run.  Wait by jax.block_until_ready or jax.effects_barrier before another
    collective call that is not made by this function, of a plan or of MPI.  Closing the plan waits by itself.

    The plan's back end is one on the CPU.  jax.vmap, jax.pmap, jax.shard_map, forward-mode differentiation and second
    derivatives are refused.

    Parameters
    ----------
    plan : MeshAttention
        Static: close over it.  It must stay open until the last compiled call has ended.
    q : jax.Array, (batch, tokens, heads, head_dim)
        In the plan's dtype, float64 only where jax_enable_x64 is set.  Tokens as in plan.positions.
    k : jax.Array, (batch, tokens_k, kv_heads, head_dim)
        As q; tokens as in plan.positions_k.
    v : jax.Array, (batch, tokens_k, kv_heads, value_dim)
        As k; None in a plan with shared_kv, where k's gradient is that of keys and values.
    cu_seqlens, cu_seqlens_k, lengths, lengths_k, prefixes, causal_documents
        As in `MeshAttention.forward`.  Lists and NumPy arrays are static, part of what is compiled.  JAX arrays may be
        traced: their values may then change from call to call, not their number.
    padding : bool, default False
        As in `MeshAttention.forward`.  Static, as all that follow and are no JAX arrays.
    sinks : jax.Array, (heads,), default None
        In lse's dtype, the same on every rank.
    bias, key_bias, alibi_slopes, relative_bias : jax.Array, default None
        As in `MeshAttention.forward`.  Only the gradients of those are computed that JAX differentiates.
    relative_grid, relative_cyclic, dropout
        As in `MeshAttention.forward`; the backward pass drops the weights that the forward pass dropped.
    seed : int or jax.Array of one integer, default None
        As in `MeshAttention.forward`.  A JAX array may be traced, and so another one in every step.
    bias_shared : sequence of str, default None
        As in `MeshAttention.backward`, which takes it if bias has a gradient.
    check : bool, default True
        As in `MeshAttention.forward`; the backward pass uses it too.  Without tracing it adds a small allreduce.
    verify : bool, default False
        Whether to compare a sample of out and lse with float64 attention, and in the backward pass of the gradients
        too, by `MeshAttention.verify`, whose docstring says what that costs.

    Returns
    -------
    out : jax.Array, (batch, tokens, heads, value_dim)
        In the plan's dtype.  The loss may depend on out, on lse or on both.
    lse : jax.Array, (batch, heads, tokens)
        float32 (float64 for float64).

    Raises
    ------
    ArgumentError
        The same on every rank; but while JAX traces, on the ranks whose arguments are wrong: a dtype, a shape but for
        its tokens, a kind of array, a transform.
    jax.errors.JaxRuntimeError
        The same on every rank, from compiled code: its text ends with the error of mpiattn.
    VerificationError
        The same on every rank, here or in the backward pass: with verify, and a result is wrong.
    """
    given = {"q": q, "k": k, "v": v, "sinks": sinks}
    given |= {"bias": bias, "key_bias": key_bias, "alibi_slopes": alibi_slopes, "relative_bias": relative_bias}
    documents = DocumentArguments(cu_seqlens, cu_seqlens_k, lengths, lengths_k, prefixes, causal_documents, padding)
    numbers: dict[str, Any] = {**documents._asdict(), "seed": seed}
    traced = {name: numbers.pop(name) for name in NUMBERS if isinstance(numbers[name], jax.Array)}
    arrays = {name: array for name, array in given.items() if array is not None or name in "qk"} | traced
    options = BiasArguments(None, None, None, None, relative_grid, relative_cyclic, dropout, numbers.pop("seed", None))
    documents = DocumentArguments(**numbers)
    # copies, because the caller may change the originals before the call has ended
    call = _Call(checked_plan(plan), *deepcopy((documents, options, bias_shared)), check, verify)
    if _traced(arrays):
        call.check_arguments(arrays)
        check_values(plan.problem.shared_kv, v)
        of_plan = forms(plan.problem)
        for name in of_plan.keys() & arrays.keys():
            check_form(name, arrays[name], of_plan[name])
        plan.before_close(jax.effects_barrier)  # compiled code may be in a call then
    else:
        jax.effects_barrier()  # compiled code may be in a call
        with plan.call("jax.attention") as running, running.agreement(check):
            call.check_arguments(arrays)
    return _differentiable()(call, arrays)


class _Call(NamedTuple):
    """What is static in a call.  options: of the biases and dropout, without arrays."""

    plan: MeshAttention
    documents: DocumentArguments
    options: BiasArguments
    bias_shared: Sequence[str] | None
    check: bool
    verify: bool

    def check_arguments(self, arrays: dict[str, Any]) -> None:
        """Raise ArgumentError about what JAX alone concerns.  arrays: by name, those that may be traced."""
        p, entry = self.plan.problem, backends.find(self.plan.backend)
        if entry.on_gpu:
            raise ArgumentError(
                f"plan has the back end {self.plan.backend}; mpiattn.jax takes plans that compute on the CPU, since a "
                "callback of JAX has its arrays there"
            )
        if "float64" in (p.dtype, p.partial_dtype) and not jax.config.jax_enable_x64:
            raise ArgumentError(
                f"plan has the dtype {p.dtype}, which JAX has only after jax.config.update('jax_enable_x64', True)"
            )
        axes = jax.sharding.get_abstract_mesh().manual_axes
        if axes:
            raise ArgumentError(
                f"plan is used inside jax.pmap or jax.shard_map, over {', '.join(map(str, axes))}; a rank makes each "
                "call once: its ranks are spread by mpiexec, not over devices of JAX"
            )
        static = {**self.documents._asdict(), **self.options._asdict(), "bias_shared": self.bias_shared}
        for name, value in {**static, "check": self.check, "verify": self.verify}.items():
            if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
                may_be = (
                    "one JAX array, or numbers that are none" if name in NUMBERS else "a value that is no JAX array"
                )
                raise ArgumentError(f"{name} is or has a JAX array; it must be {may_be}")
        truth("check", self.check), truth("verify", self.verify)
        for name, array in arrays.items():
            if not isinstance(array, jax.Array):
                raise ArgumentError(f"{name} is a {type(array).__name__}; it must be a JAX array")
        seed = arrays.get("seed")
        if seed is not None and not (seed.shape == () and jax.numpy.issubdtype(seed.dtype, jax.numpy.integer)):
            raise ArgumentError(
                f"seed has shape {seed.shape} and dtype {seed.dtype}; it must be one whole number, as of "
                "jax.random.bits(key, dtype='uint32')"
            )
        if self.bias_shared is not None and "bias" not in arrays:
            raise ArgumentError("bias_shared is given without bias, which alone it is about")

    def keywords(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Those that all calls of the plan have."""
        documents = {**self.documents._asdict(), **{name: arrays[name] for name in NUMBERS if name in arrays}}
        seed = documents.pop("seed", self.options.seed)
        of_biases: dict[str, Any] = {name: arrays.get(name) for name in WITH_GRADIENTS}
        options = self.options._replace(seed=seed if seed is None else int(seed), **of_biases)
        return {"sinks": arrays.get("sinks"), **documents, **({} if options.none else options._asdict())}

    def forward(self, arrays: dict[str, Any]) -> tuple[Any, Any]:
        """The forward pass, of NumPy arrays by name."""
        q, k, v, given = arrays["q"], arrays["k"], arrays.get("v"), self.keywords(arrays)
        out, lse = self.plan.forward(q, k, v, check=self.check, **given)
        if self.verify:
            self.plan.verify(q, k, v, out, lse, **given)
        return out, lse

    def backward(self, wanted: Sequence[str], arrays: dict[str, Any]) -> dict[str, Any]:
        """Gradients by the names of their arguments, of NumPy arrays by name.

        wanted: the biases whose gradients are returned.
        """
        q, k, v, given = arrays["q"], arrays["k"], arrays.get("v"), self.keywords(arrays)
        out, lse, dout, dlse = arrays["out"], arrays["lse"], arrays["dout"], arrays.get("dlse")
        more: dict[str, Any] = {}
        if any(name in arrays for name in WITH_GRADIENTS):
            more = {"bias_gradients": wanted, "bias_shared": self.bias_shared if "bias" in wanted else None}
        grads = self.plan.backward(dout, q, k, v, out, lse, dlse=dlse, check=self.check, **given, **more)
        if self.verify:
            self.plan.verify(q, k, v, out, lse, dout=dout, dlse=dlse, grads=grads, **given, **more)
        names = ["q", "k", "v", *["sinks"] * ("sinks" in arrays), *wanted]
        of = {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}
        divide(self.plan, of, arrays["bias"].shape if "bias" in arrays else None, self.bias_shared)
        return {name: grad.astype(arrays[name].dtype, copy=False) for name, grad in of.items()}


def _traced(arrays: dict[str, Any]) -> bool:
    """Whether JAX traces what happens here, by the arrays or as all inside jax.jit."""
    return any(isinstance(array, jax.core.Tracer) for array in (*arrays.values(), jax.numpy.zeros(())))


@cache
def _differentiable() -> Callable[..., Any]:
    """Function of a `_Call` and its arrays: (out, lse)."""
    _allow_callbacks()
    attend = jax.custom_vjp(_forward, nondiff_argnums=(0,))
    attend.defvjp(_forward_kept, _backward, symbolic_zeros=True)
    return attend


def _forward(call: _Call, arrays: dict[str, Any]) -> Any:
    of_rank = forms(call.plan.problem, (len(call.plan.positions), len(call.plan.positions_k)))
    results = tuple(jax.ShapeDtypeStruct(of_rank[name].shape, of_rank[name].dtype) for name in ("out", "lse"))
    return _run(call.forward, results, arrays)


def _forward_kept(call: _Call, arrays: dict[str, Any]) -> Any:
    wanted = {name: () for name in WITH_GRADIENTS if name in arrays and arrays[name].perturbed}  # names, without leaves
    arrays = {name: array.value for name, array in arrays.items()}
    out, lse = _forward(call, arrays)
    return (out, lse), ({**arrays, "out": out, "lse": lse}, wanted)


def _backward(call: _Call, kept: Any, cotangents: Any) -> Any:
    arrays, wanted = kept
    dout, dlse = cotangents
    given = {} if isinstance(dlse, SymbolicZero) else {"dlse": dlse}
    given["dout"] = jax.numpy.zeros(dout.shape, dout.dtype) if isinstance(dout, SymbolicZero) else dout
    names = [name for name in DIFFERENTIABLE if name in arrays and (name in wanted or name not in WITH_GRADIENTS)]
    results = {name: jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in names}
    wanted = [name for name in names if name in wanted]
    grads = _run(partial(call.backward, wanted), results, arrays | given)
    # zeros, where None is as good, because JAX 0.6 wants the same of every call, whichever biases it differentiates
    zeros = {name: jax.numpy.zeros_like(arrays[name]) for name in WITH_GRADIENTS if name in arrays}
    return ({name: (zeros | grads).get(name) for name in arrays if name not in ("out", "lse")},)


def _run(call: Callable[[dict[str, Any]], Any], results: Any, arrays: dict[str, Any]) -> Any:
    """Results of a collective call on NumPy arrays by name.  results: their shapes and dtypes."""
    forms, tree = jax.tree.flatten(results)
    forms = tuple(jax.core.ShapedArray(form.shape, form.dtype) for form in forms)
    of_call = _host_call()[0].bind(*arrays.values(), call=call, names=tuple(arrays), results=forms)
    return jax.tree.unflatten(tree, of_call)


@cache
def _host_call() -> tuple[Primitive, Any]:
    """JAX's primitive of a call on the host in the order of the program, and the effect by which JAX orders it.

    In compiled code it is an ordered `io_callback`, with which it shares the effect.  But io_callback makes JAX arrays
    of its arguments, by a copy in a thread of JAX.  Where a rank has one core, there is one thread, and it may be
    waiting for the callback.  Here they are NumPy arrays of the memory in which compiled code has them.
    """
    (effect,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects
    primitive = Primitive("mpiattn_call")
    primitive.multiple_results = True

    def on_host(call: Any, names: Any, *arrays: Any) -> tuple[Any, ...]:
        results = call({name: np.asarray(array) for name, array in zip(names, arrays, strict=True)})
        return tuple(jax.tree.leaves(results))

    def at_once(*arrays: Any, call: Any, names: Any, results: Any) -> list[Any]:
        jax.effects_barrier()  # as in `attention`, for a backward pass
        return [*map(jax.numpy.asarray, on_host(call, names, *arrays))]

    def lowered(context: Any, *operands: Any, call: Any, names: Any, results: Any) -> Any:
        if getattr(context.module_context.axis_context, "num_devices", 1) not in (None, 1):
            raise ArgumentError("q is spread over several devices of JAX; each rank's arrays must be on one")
        values, token, _ = mlir.emit_python_callback(
            context,
            partial(on_host, call, names),
            context.tokens_in.get(effect),
            [*operands],
            context.avals_in,
            context.avals_out,
            has_side_effect=True,
        )
        context.set_tokens_out(mlir.TokenSet({effect: token}))
        return values

    def refuse_vmap(arrays: Any, axes: Any, *, names: Any, **how: Any) -> Any:
        name = next(name for name, axis in zip(names, axes) if axis is not None)
        raise ArgumentError(f"{name} is used inside jax.vmap, which cannot batch a collective call; use lax.map")

    def refuse_twice(*args: Any, **how: Any) -> Any:
        raise ArgumentError("the gradients of mpiattn.jax.attention cannot be differentiated again")

    primitive.def_effectful_abstract_eval(lambda *arrays, results, **how: (results, {effect}))
    primitive.def_impl(at_once)
    mlir.register_lowering(primitive, lowered)
    batching.primitive_batchers[primitive] = refuse_vmap
    ad.primitive_jvps[primitive] = refuse_twice
    return primitive, effect


def _allow_callbacks() -> None:
    """Let JAX have ordered callbacks in jax.checkpoint and, where it checks that, in jax.custom_vjp.

    It refuses effects that are not on its lists, and has no public function that adds one.  Callbacks may be there: JAX
    runs each once and keeps its results.
    """
    _, effect = _host_call()
    try:
        from jax._src import effects

        for allowed in (effects.remat_allowed_effects, effects.custom_derivatives_allowed_effects):
            allowed.add_type(type(effect))
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"JAX {jax.__version__} may refuse mpiattn.jax.attention in jax.checkpoint: its lists of effects that are "
            f"allowed are not where they were ({error})",
            RuntimeWarning,
            stacklevel=2,
        )
