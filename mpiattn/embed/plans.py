"""The functions of mpiattn.h about plans."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments.arrays import on_host
from ..arguments.biases import WITH_GRADIENTS
from ..arguments.results import check_own_memory
from ..errors import ArgumentError, VerificationError
from ..plan.mesh_attention import MeshAttention
from ..problem.problem import dtype_name
from ..system.choices import one_of
from . import arrays, options
from .handles import Handles
from .making import Maker, shared_errors

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from typing_extensions import Self

    from ..verify.result import Verification
    from .arrays import Described

    Given = Described | None
    Named = tuple[str, Given]

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
    _maker.make(comm, lambda: options.given(number), handle)


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
    "tokens": lambda plan: plan.q_layout.length(plan.rank),
    "tokens_k": lambda plan: plan.k_layout.length(plan.rank),
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


def plan_positions(number: int, keys: int, memory: memoryview | None) -> None:
    """Write the positions of this rank's queries or keys."""
    plan = PLANS[number]
    arrays.write_numbers("positions", plan.positions_k if keys else plan.positions, memory)


def plan_bias_positions(number: int, columns: int, memory: memoryview | None) -> None:
    """Write the positions of the rows or columns of this rank's tile of a bias."""
    arrays.write_numbers("positions", PLANS[number].bias_positions[bool(columns)], memory)


class _Call:
    """The arguments of a call of a plan; every rank raises the error that one has about them.

    method: as the plan names the call.  number: of the plan.  of: number of the options.
    inputs, memory: descriptions of arrays by name; those of memory may be NULL, and v with shared_kv.
    """

    def __init__(self, method: str, number: int, of: int, inputs: dict[str, Given], memory: dict[str, Given]) -> None:
        self.plan, self._method, self._on_gpu = PLANS[number], method, number in PLANS.on_gpu
        self._check = options.check(of)
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
            self.options = options.of_call(of, self._on_gpu, self.arrays) if of else {}

    def without(self, names: Iterable[str]) -> Self:
        """The call without these options."""
        for name in names if self.options else ():
            self.options.pop(name, None)
        return self

    def sharing(self) -> AbstractContextManager[None]:
        """A block before the collective call, of which every rank raises the error of any."""
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
    call.without(OF_BACKWARD).run()


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
        memory, names = _memory_of_gradients(call.options, call.arrays)
    _, _, _, *more = call.run()
    for name, gradient in zip(names, more):
        if name in memory:
            memory[name][...] = gradient


def _memory_of_gradients(options: dict[str, Any], others: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Take the memory for gradients that Python returns out of a call's options, and ask for those that have some.

    others: the other arrays of the call.  Returns the memory by name, and the names of what Python will return.
    Raises ArgumentError.
    """
    memory = {name: options.pop(name) for name in RETURNED if name in options}
    given = [name for name in WITH_GRADIENTS if name in options]
    with_memory = [name for name in given if f"d{name}" in memory or f"d{name}" in options]
    wanted = options.setdefault("bias_gradients", with_memory)
    names = given if wanted is True else [name for name in given if name in (wanted or ())]
    names = [*["dsinks"] * ("sinks" in options), *(f"d{name}" for name in names)]
    others = others | {name: array for name, array in options.items() if hasattr(array, "dtype")}
    for name, array in memory.items():
        of = options.get(RETURNED[name])
        if of is None:
            raise ArgumentError(f"{name} is given without {RETURNED[name]}, whose gradient it would be")
        if name not in names:
            raise ArgumentError(f"{name} is given, and bias_gradients, {wanted!r}, is without {RETURNED[name]}")
        if _shape(array) != _shape(of):
            raise ArgumentError(f"{name} has shape and dtype {_shape(array)}; they must be {_shape(of)}")
        check_own_memory(name, array, others)
        others[name] = array
    return memory, names


def _shape(array: Any) -> tuple[Any, str]:
    return tuple(array.shape), str(array.dtype)


def verify(
    number: int, q: Given, k: Given, v: Given, out: Given, lse: Given, of: int, worst: memoryview | None
) -> None:
    """`MeshAttention.verify`."""
    verification: Verification | None = None
    call = _Call("verify", number, of, {"q": q, "k": k, "v": v, "out": out, "lse": lse}, {}).without(OF_BACKWARD)
    try:
        verification = call.run()
    except VerificationError as error:
        verification = error.verification
        raise
    finally:
        if worst is not None and verification is not None:
            worst.cast("d")[0] = max(each.error / each.tolerance for each in verification.arrays)


def _moved(
    method: str, number: int, root: int, given: Named, memory: Named, everywhere: bool, of: int = 0, **how: Any
) -> None:
    """Call a method of a plan that moves an array between its ranks, and copy what it returns into memory.

    given, memory: (name, description) of what it takes and of what it returns.  everywhere: whether every rank gets a
        result, and rank `root` alone has what is given; else it is the other way round.  -1 for root: all ranks.
    of: number of options.  how: other arguments.
    """
    plan, on_gpu, on_root = PLANS[number], number in PLANS.on_gpu, root in (-1, PLANS[number].rank)
    with shared_errors(plan, method):
        array = (arrays.needed if on_root or not everywhere else arrays.optional)(*given, on_gpu)
        into = arrays.needed(*memory, on_gpu) if on_root or everywhere else None
        if into is not None:
            check_own_memory(memory[0], into, {given[0]: array})
        how |= options.of_call(of, on_gpu, (given[0], "root"))
    result = getattr(plan, method)(array, root=None if root == -1 else root, **how)
    with plan.call(f"{method} into memory") as call, call.agreement():  # only now is it known what the whole is like
        if into is not None:
            name, fits = memory[0], _shape(result)
            if _shape(into) != fits:
                raise ArgumentError(f"{name} has shape and dtype {_shape(into)}; on this rank they must be {fits}")
            if isinstance(into, np.ndarray):
                into[...] = on_host(result)
            else:
                into[...] = plan.give(result) if isinstance(result, np.ndarray) else result
    if on_gpu:
        plan.drain()


def scatter(number: int, whole: Given, chunk: Given, root: int, axis: int, keys: int) -> None:
    """`MeshAttention.scatter`."""
    _moved("scatter", number, root, ("whole", whole), ("chunk", chunk), True, axis=axis, keys=bool(keys))


def gather(number: int, chunk: Given, whole: Given, root: int, axis: int, keys: int) -> None:
    """`MeshAttention.gather`."""
    _moved("gather", number, root, ("chunk", chunk), ("whole", whole), False, axis=axis, keys=bool(keys))


def scatter_bias(number: int, whole: Given, tile: Given, root: int) -> None:
    """`MeshAttention.scatter_bias`."""
    _moved("scatter_bias", number, root, ("whole", whole), ("tile", tile), True)


def gather_bias(number: int, tile: Given, whole: Given, root: int, of: int) -> None:
    """`MeshAttention.gather_bias`."""
    _moved("gather_bias", number, root, ("tile", tile), ("whole", whole), False, of=of)
