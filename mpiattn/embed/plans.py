"""The functions of mpiattn.h about plans."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments.biases import WITH_GRADIENTS
from ..errors import ArgumentError, VerificationError
from ..plan.mesh_attention import MeshAttention
from ..problem.problem import dtype_name
from ..system.choices import one_of
from . import arrays, options
from .handles import Handles
from .making import Maker, shared_errors

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ..verify.result import Verification
    from .arrays import Described

    Given = Described | None

CALLS = (
    "plan_create",
    "plan_create_text",
    "plan_like",
    "plan_free",
    "plan_integer",
    "plan_text",
    "plan_positions",
    "plan_bias_positions",
    "forward",
    "backward",
    "verify",
    "scatter",
    "gather",
    "scatter_bias",
    "gather_bias",
)
PLANS = Handles("plan")
_maker = Maker(MeshAttention, PLANS)


def plan_create(comm: int, number: int, handle: memoryview | None) -> None:
    """A plan with options."""
    _maker.make(comm, lambda: options.OPTIONS[number] if number else {}, handle)


def plan_create_text(comm: int, text: str | None, handle: memoryview | None) -> None:
    """A plan with the options of a text."""
    _maker.make(comm, lambda: options.of_text(text), handle)


def plan_like(number: int, seqlen: int, seqlen_k: int, handle: memoryview | None) -> None:
    """A plan for other lengths."""
    plan = PLANS[number]
    with shared_errors(plan, "like"):
        word = arrays.numbers("plan", handle)
    word[0] = _maker.add(plan.like(seqlen=seqlen, seqlen_k=seqlen_k))


def plan_free(number: int) -> None:
    """Close a plan."""
    _maker.free(number)


OF_PROBLEM = "seqlen", "seqlen_k", "batch", "heads", "kv_heads", "head_dim", "value_dim"
INTEGERS: dict[str, Callable[[Any], int]] = {
    **{name: attrgetter(f"problem.{name}") for name in OF_PROBLEM},
    "tokens": lambda plan: plan.q_layout.length(plan.chunk),
    "tokens_k": lambda plan: plan.k_layout.length(plan.chunk),
    "chunk": attrgetter("chunk"),
    "bias_rows": lambda plan: len(plan.bias_positions[0]),
    "bias_columns": lambda plan: len(plan.bias_positions[1]),
    "bias_first_sequence": lambda plan: plan.bias_sequences.start or 0,
    "bias_sequences": lambda plan: len(range(plan.problem.batch)[plan.bias_sequences]),
    "bias_first_head": lambda plan: plan.bias_heads.start or 0,
    "bias_heads": lambda plan: len(range(plan.problem.heads)[plan.bias_heads]),
    "nbytes": attrgetter("nbytes"),
    "sent_bytes": lambda plan: plan.sent[0],
    "sent_messages": lambda plan: plan.sent[1],
}
TEXTS: dict[str, Callable[[Any], str]] = {
    "tile": lambda plan: str(plan.tile),
    "layout": attrgetter("q_layout.kind"),
    "layout_k": attrgetter("k_layout.kind"),
    "mesh_layout": attrgetter("mesh_layout"),
    "schedule": attrgetter("schedule.name"),
    "route": attrgetter("route"),
    "backend": attrgetter("backend"),
    "dtype": lambda plan: dtype_name(plan.problem.dtype),
    "description": repr,
}


def plan_integer(number: int, name: str, value: memoryview | None) -> None:
    """Write a number of a plan."""
    one_of("name", name, tuple(INTEGERS))
    arrays.numbers("value", value)[0] = INTEGERS[name](PLANS[number])


def plan_text(number: int, name: str, memory: memoryview | None) -> None:
    """Write a text of a plan."""
    one_of("name", name, tuple(TEXTS))
    arrays.write_text(TEXTS[name](PLANS[number]), memory)


def write_numbers(name: str, values: Any, memory: memoryview | None) -> None:
    """Write as many int64 numbers as there are.  Raises ArgumentError if the memory is for more or fewer."""
    np.asarray(arrays.numbers(name, memory, len(values)))[:] = values


def plan_positions(number: int, keys: int, memory: memoryview | None) -> None:
    """Write the positions of this rank's queries or keys."""
    plan = PLANS[number]
    write_numbers("positions", plan.positions_k if keys else plan.positions, memory)


def plan_bias_positions(number: int, columns: int, memory: memoryview | None) -> None:
    """Write the positions of the rows or columns of this rank's tile of a bias."""
    write_numbers("positions", PLANS[number].bias_positions[bool(columns)], memory)


class _Call:
    """The arguments of a call of a plan; an ArgumentError about them on a rank is raised on all.

    method: as the plan names the call.  number: of the plan.  of: number of the options.
    inputs, memory: descriptions of arrays by name; those of memory may be NULL, and v with shared_kv.
    """

    def __init__(self, method: str, number: int, of: int, inputs: dict[str, Given], memory: dict[str, Given]) -> None:
        self.plan, self._method = PLANS[number], method
        self._check, self._on_gpu = options.get(of, "check", True), number in PLANS.on_gpu
        with self.sharing():
            self.arrays: dict[str, Any] = {}
            for name, described in inputs.items():
                if described is None and name == "v" and self.plan.problem.shared_kv:
                    self.arrays[name] = None
                else:
                    self.arrays[name] = arrays.needed(name, described, self._on_gpu)
            for name, described in memory.items():
                if described is not None:
                    self.arrays[name] = arrays.array_of(name, described, self._on_gpu)
            self.options = options.of_call(of, self._on_gpu)
            if self.options:
                options.refuse_twice(self.arrays, self.options)

    def sharing(self) -> AbstractContextManager[None]:
        """A block before the collective call, whose ArgumentError is raised on all ranks."""
        return shared_errors(self.plan, self._method, self._check)

    def run(self) -> Any:
        """What the plan returns; with back ends of GPUs the results are complete."""
        results = getattr(self.plan, self._method)(**self.arrays, **self.options)
        if self._on_gpu:
            self.plan.drain()
        return results


# Gradients that Python returns and a program has memory for among its options, in their order.
RETURNED = {"dsinks": "sinks"} | {f"d{name}": name for name in WITH_GRADIENTS if name != "bias"}
OF_BACKWARD = ("dlse", "dbias", "bias_gradients", "bias_shared", *RETURNED)


def forward(number: int, q: Given, k: Given, v: Given, out: Given, lse: Given, of: int) -> None:
    """`MeshAttention.forward`.  Options of the backward pass alone are left aside: one set serves both passes."""
    call = _Call("forward", number, of, {"q": q, "k": k, "v": v}, {"out": out, "lse": lse})
    for name in OF_BACKWARD if call.options else ():
        call.options.pop(name, None)
    call.run()


def backward(
    number: int,
    dout: Given,
    q: Given,
    k: Given,
    v: Given,
    out: Given,
    lse: Given,
    dq: Given,
    dk: Given,
    dv: Given,
    of: int,
) -> None:
    """`MeshAttention.backward`."""
    inputs = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    call = _Call("backward", number, of, inputs, {"dq": dq, "dk": dk, "dv": dv})
    if not call.options:
        call.run()
        return
    with call.sharing():
        memory = _memory_of_gradients(call.options)
    _, _, _, *more = call.run()
    wanted = call.options["bias_gradients"]
    of_biases = [name for name in WITH_GRADIENTS if name in call.options and (wanted is True or name in (wanted or ()))]
    for name, gradient in zip([*["dsinks"] * ("sinks" in call.options), *[f"d{name}" for name in of_biases]], more):
        if name in memory:
            memory[name][...] = gradient


def _memory_of_gradients(options: dict[str, Any]) -> dict[str, Any]:
    """Take the memory for gradients that Python returns out of a call's options, and ask for those that have some.

    Raises ArgumentError.
    """
    memory = {name: options.pop(name) for name in RETURNED if name in options}
    for name, array in memory.items():
        of = options.get(RETURNED[name])
        if of is None:
            raise ArgumentError(f"{name} is given without {RETURNED[name]}, whose gradient it would be")
        if _shape(array) != _shape(of):
            raise ArgumentError(f"{name} has shape and dtype {_shape(array)}; they must be {_shape(of)}")
    wanted = [name for name in WITH_GRADIENTS if f"d{name}" in options or f"d{name}" in memory]
    options.setdefault("bias_gradients", wanted)
    return memory


def _shape(array: Any) -> tuple[Any, str]:
    return tuple(array.shape), str(array.dtype)


def verify(
    number: int, q: Given, k: Given, v: Given, out: Given, lse: Given, of: int, worst: memoryview | None
) -> None:
    """`MeshAttention.verify`."""
    verification: Verification | None = None
    call = _Call("verify", number, of, {"q": q, "k": k, "v": v, "out": out, "lse": lse}, {})
    try:
        verification = call.run()
    except VerificationError as error:
        verification = error.verification
        raise
    finally:
        if worst is not None and verification is not None:
            worst.cast("d")[0] = max(each.error / each.tolerance for each in verification.arrays)


def _root(root: int) -> int | None:
    return None if root == -1 else root


def _copy(name: str, result: Any, memory: Any) -> None:
    """Copy a result of Python into the program's memory.  Raises ArgumentError where it does not fit."""
    if _shape(memory) != _shape(result):
        raise ArgumentError(f"{name} has shape and dtype {_shape(memory)}; on this rank they must be {_shape(result)}")
    memory[...] = result


def scatter(number: int, whole: Given, chunk: Given, root: int, axis: int, keys: int) -> None:
    """`MeshAttention.scatter`."""
    plan = PLANS[number]
    with shared_errors(plan, "scatter"):
        given, memory = arrays.optional("whole", whole), arrays.needed("chunk", chunk)
    _copy("chunk", plan.scatter(given, root=_root(root), axis=axis, keys=bool(keys)), memory)


def gather(number: int, chunk: Given, whole: Given, root: int, axis: int, keys: int) -> None:
    """`MeshAttention.gather`."""
    plan = PLANS[number]
    with shared_errors(plan, "gather"):
        given, memory = arrays.needed("chunk", chunk), _memory_of_whole(plan, whole, root)
    result = plan.gather(given, root=_root(root), axis=axis, keys=bool(keys))
    if result is not None:
        _copy("whole", result, memory)


def _memory_of_whole(plan: Any, whole: Given, root: int) -> Any:
    """The memory of a whole array, which ranks need that get it; None on others."""
    return arrays.needed("whole", whole) if root in (-1, plan.rank) else None


def scatter_bias(number: int, whole: Given, tile: Given, root: int) -> None:
    """`MeshAttention.scatter_bias`."""
    plan = PLANS[number]
    with shared_errors(plan, "scatter_bias"):
        given, memory = arrays.optional("whole", whole), arrays.needed("tile", tile)
    _copy("tile", plan.scatter_bias(given, root=_root(root)), memory)


def gather_bias(number: int, tile: Given, whole: Given, root: int, of: int) -> None:
    """`MeshAttention.gather_bias`."""
    plan = PLANS[number]
    with shared_errors(plan, "gather_bias"):
        given, memory = arrays.needed("tile", tile), _memory_of_whole(plan, whole, root)
        named = options.of_call(of, False)
    result = plan.gather_bias(given, root=_root(root), **named)
    if result is not None:
        _copy("whole", result, memory)
