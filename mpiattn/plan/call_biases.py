"""The biases of one call of a plan on this rank: checked, made into those of a pass, and their gradients returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from ..arguments.arrays import Axes, Required, checked_array, on_host
from ..arguments.biases import WITH_GRADIENTS
from ..arguments.results import Results
from ..engine.bias_parts import DistanceBias, KeyBias, TileBias
from ..engine.biases import Biases
from ..errors import ArgumentError
from ..problem.documents import check_diagonals
from ..problem.layout import Layout
from ..problem.tensors import as_array, as_given, detached, is_tensor
from ..verify.spread_biases import GivenBiases

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..arguments.biases import BiasArguments
    from ..backends.base import Array, Backend
    from ..comm.peers import Peers
    from ..engine.bias_parts import Part
    from ..problem.distances import ByDistance
    from ..problem.problem import Problem
    from ..schedule.division import Need
    from ..schedule.needed import Activity
    from .share import Share

TILE = Axes(("batch", "heads", "rows", "columns"), "bias_positions")
KEYS = Axes(("batch", "heads", "tokens_k"), "positions_k")


def _on_host(name: str, argument: Array) -> Any:
    """An argument that was checked, as a NumPy array."""
    argument = detached(argument)
    if is_tensor(argument):  # by its library, whose stream it belongs to
        return np.asarray(as_array(name, on_host(argument)))
    return np.asarray(on_host(as_array(name, argument)))


class CallBiases:
    """The biases and the dropout of a call.

    given: the caller's arguments.  share: of this rank.  own_keys: number of the caller's keys on this rank.
    activity: of the call.
    Raises ArgumentError on this rank.
    """

    def __init__(
        self, given: BiasArguments, problem: Problem, backend: Backend, share: Share, own_keys: int, activity: Activity
    ) -> None:
        self.given, self._problem, self._backend, self._share = given, problem, backend, share
        self._own_keys = own_keys
        if problem.key_bias != (given.key_bias is not None):
            raise ArgumentError(
                "key_bias is None; this plan was made with key_bias=True, so every call must have it"
                if problem.key_bias
                else "key_bias is given; only a plan made with key_bias=True takes it"
            )
        if not {"bias", "dropout"} <= set(backend.takes):
            name = (given.given or ["dropout"])[0]
            raise ArgumentError(f"{name} is given; the back end {backend.name} computes without biases and dropout")
        self._threshold, self._functions = given.threshold(), given.functions(problem, share.heads)
        if self._functions and activity.documents:
            check_diagonals(activity.documents, problem, self._functions[0].name)
        self._tile: Array = None if given.bias is None else self._checked_tile(given.bias)
        self._keys: Array = None if given.key_bias is None else self._checked_keys(given.key_bias)
        self._wanted: list[str] = []
        self._shared: tuple[int, ...] = ()
        self._results: Any = None  # those that have memory here
        self._dtile = self._dkeys = None  # the caller's results
        self._key_sums: Array | None = None  # dkey_bias of every sequence and head

    def _checked_tile(self, bias: Array) -> Array:
        p, (sequences, heads, *tokens) = self._problem, self._share.shape
        dtypes = tuple(dict.fromkeys((np.dtype(p.partial_dtype), np.dtype(p.dtype))))
        wanted = Required(((1, sequences), (1, heads), *tokens), dtypes, TILE)
        return self._own(checked_array(self._backend, "bias", bias, wanted))

    def _checked_keys(self, key_bias: Array) -> Array:
        """As (batch or 1, heads or 1, tokens_k)."""
        p, tokens = self._problem, self._own_keys
        axes = min(max(getattr(key_bias, "ndim", 3), 1), 3)
        shape = ((1, p.batch), (1, p.heads), tokens)[-axes:]
        wanted = Required(shape, np.dtype(p.partial_dtype), Axes(KEYS.names[-axes:], KEYS.tokens))
        array = self._own(checked_array(self._backend, "key_bias", key_bias, wanted))
        self._key_axes = 3 - len(shape)  # that the argument lacks
        return array.reshape(*(1,) * self._key_axes, *array.shape)

    def _own(self, array: Array) -> Array:
        return self._backend.contiguous(array, array.itemsize)

    def expect_gradients(
        self,
        wanted: bool | Sequence[str],
        dbias: Array | None,
        shared: Sequence[str] | None,
        inputs: dict[str, Array | None],
        like: Array,
    ) -> tuple[Array, ...]:
        """Make memory for the gradients of a backward pass; returns what the pass takes beside dq, dk and dv.

        wanted: names of the arguments whose gradients are returned, True for all.  dbias: the caller's memory or None.
        shared: bias_shared of `MeshAttention.backward`.
        inputs: {name: array that the call reads}.  like: an argument of the call, of whose library results are.
        Raises ArgumentError.
        """
        self._wanted = self.names(wanted)
        if dbias is not None and "bias" not in self._wanted:
            raise ArgumentError("dbias is given, but there is no such result: bias is None, or not in bias_gradients")
        if "bias" in self._wanted:
            self._shared = self._share.shared_axes(self._tile.shape, shared)
        elif shared is not None:
            raise ArgumentError("bias_shared is given, but there is no gradient of bias, which alone depends on it")
        of_rows, asked = np.dtype(self._problem.partial_dtype), {}
        if "bias" in self._wanted:
            asked["dbias"] = dbias, Required(self._tile.shape, of_rows, TILE)
        if "key_bias" in self._wanted:
            asked["dkey_bias"] = None, Required(self._keys.shape, of_rows)
        self._results = Results(self._backend, asked, inputs | {"bias": self._tile, "key_bias": self._keys})
        arrays = dict(zip(asked, self._results.arrays(like)))
        self._dtile, self._dkeys = arrays.get("dbias"), arrays.get("dkey_bias")
        if not self._problem.key_bias:
            return ()
        self._key_sums = self._backend.empty(self._all_keys, of_rows)
        return (self._key_sums,)

    def names(self, wanted: bool | Sequence[str]) -> list[str]:
        """The arguments whose gradients a call with this bias_gradients returns.  Raises ArgumentError."""
        given = self.given.given
        if isinstance(wanted, bool):
            return given if wanted else []
        if isinstance(wanted, str) or not all(name in WITH_GRADIENTS for name in wanted):
            raise ArgumentError(
                f"bias_gradients is {wanted!r}; it must be True, False or names of {', '.join(WITH_GRADIENTS)}"
            )
        return [name for name in given if name in wanted]

    def for_reference(
        self, grads: Sequence[Array | None], wanted: bool | Sequence[str], shared: Sequence[str] | None
    ) -> GivenBiases:
        """What a verification needs.  Raises ArgumentError.

        grads: the first of the gradients of `gradients`.  wanted, shared: as of `expect_gradients`.
        """
        names, of_rows = self.names(wanted)[: len(grads)], np.dtype(self._problem.partial_dtype)
        axes, arrays = self._share.shared_axes(self._tile.shape, shared) if "bias" in names else (), {}
        for name, gradient in zip(names, grads):
            shape = tuple(getattr(self.given, name).shape)
            checked_array(self._backend, f"d{name}", detached(gradient), Required(shape, of_rows))
            arrays[f"d{name}"] = _on_host(f"d{name}", gradient)
        given = {name: _on_host(name, getattr(self.given, name)) for name in self.given.given}
        keys = given.get("key_bias")
        if keys is not None:
            keys = keys.reshape(self._keys.shape)
        if "dkey_bias" in arrays:
            arrays["dkey_bias"] = arrays["dkey_bias"].reshape(self._keys.shape)
        share = self._share
        of_tile = given.get("bias"), keys, share.sequences, share.heads, share.positions()
        return GivenBiases(self.given._replace(**given), *of_tile, arrays, axes)

    @property
    def _all_keys(self) -> tuple[int, int, int]:
        p = self._problem
        return p.batch, p.heads, self._own_keys

    def compared(self) -> dict[str, Any]:
        """What must be the same on every rank."""
        of_gradients = {"bias_gradients": self._wanted, "bias_shared": self._shared}
        return self.given.compared() | {name: value for name, value in of_gradients.items() if value}

    def arrays(self) -> dict[str, Array]:
        """The arrays that the pass takes beside q, k and v."""
        if self._keys is None:
            return {}
        self._backend.begin()
        array = self._backend.empty(self._all_keys, self._problem.partial_dtype)
        self._backend.zero([array])
        self._backend.accumulate(array[None], self._keys[None])
        self._backend.drain()  # it is an argument of the pass, and these are ready
        return {"key_bias": array}

    def of_pass(self) -> Biases:
        """The biases of a pass.  The gradients that it adds to are zeroed."""
        self._zero_gradients()
        share, tile = self._share, []
        if self._tile is not None:
            tile = [TileBias(self._backend, "bias", self._tile, self._dtile, share.layouts, share.chunks)]
        return self._biases(share.sequences, share.heads, self._functions, share.layouts, tile)

    def of_needs(self) -> Callable[[Need], Biases]:
        """A function that returns the biases of a need of a divided plan.  As `of_pass` it zeroes gradients."""
        self._zero_gradients()
        p, sharing = self._problem, self._problem.heads // self._problem.kv_heads
        # A need knows its tokens by position
        whole = Layout("contiguous", p.seqlen, 1), Layout("contiguous", p.seqlen_k, 1)

        def of_need(need: Need) -> Biases:
            heads = slice(need.head * sharing, (need.head + 1) * sharing)
            functions = [function.of_heads(heads) for function in self._functions]
            return self._biases(slice(need.sequence, need.sequence + 1), heads, functions, whole)

        return of_need

    def _zero_gradients(self) -> None:
        self._backend.zero([array for array in (self._dtile, self._dkeys) if array is not None])

    def _biases(
        self,
        sequences: slice,
        heads: slice,
        functions: Sequence[ByDistance],
        layouts: tuple[Layout, Layout],
        tile: Sequence[Part] = (),
    ) -> Biases:
        """The biases of some sequences and heads.

        functions: of distances, for these heads.  layouts: by which launches name their tokens.
        tile: the part of a dense bias, if there is one.
        """
        p, backend, dtype = self._problem, self._backend, self._problem.partial_dtype
        entries, own_heads = np.arange(p.batch)[sequences], np.arange(p.heads)[heads]
        parts = [*tile]
        if self._keys is not None:
            wanted = "key_bias" in self._wanted
            parts.append(KeyBias(backend, "key_bias", len(entries), len(own_heads), dtype, wanted))
        parts += [DistanceBias(backend, each, dtype, each.name in self._wanted) for each in functions]
        dropout = None
        if self._threshold:
            of_heads = (entries[:, None] * p.heads + own_heads).ravel()
            dropout = self._threshold, self.given.seed, of_heads
        return Biases(backend, parts, dropout, layouts, len(entries), len(own_heads), dtype)

    def collect(self, sum_over_planes: Callable[[Array, tuple[int, ...]], None]) -> None:
        """Make the results of what a pass has added up; collective.

        sum_over_planes: replaces the gradient of a tile by its sum over the planes that share it along some axes.
        """
        if self._dtile is not None:
            sum_over_planes(self._dtile, self._shared)
        if self._dkeys is not None:
            self._backend.accumulate(self._dkeys[None], self._key_sums[None])

    def gradients(self, peers: Peers, like: Array) -> list[Array]:
        """The gradients that the call returns, after the pass; collective."""
        if not self._wanted:
            return []
        made = dict(zip(self._results.names, self._results.returned(like)))
        functions = [each for each in self._functions if each.name in self._wanted]
        if functions:
            sums = np.concatenate([each.gradient.ravel() for each in functions])
            peers.reduce(sums, MPI.SUM)
            for each in functions:
                own, sums = sums[: each.gradient.size], sums[each.gradient.size :]
                with np.errstate(all="ignore"):  # in float32 it may be infinite
                    gradient = own.reshape(each.gradient.shape).astype(self._problem.partial_dtype)
                (made[f"d{each.name}"],) = as_given(like, self._backend.give(gradient, like))
        if "dkey_bias" in made:
            shape = made["dkey_bias"].shape
            made["dkey_bias"] = made["dkey_bias"].reshape(*shape[self._key_axes :])
        return [made[f"d{name}"] for name in self._wanted]
