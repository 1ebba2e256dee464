"""`MeshAttention.verify`, by the base class `Verified`: results of a plan's calls compared with float64 attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..arguments.arrays import on_host
from ..arguments.biases import BiasArguments
from ..arguments.documents import DocumentArguments
from ..comm.agreement import everywhere
from ..comm.refusal import of_call, refusing
from ..errors import ArgumentError, VerificationError
from ..problem.tensors import as_array, detached, is_tensor
from ..system.values import whole_number
from ..verify.spread import SAMPLES, verify
from .arguments import compared
from .description import Described
from .tiles import Tiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..arguments.arguments import Arguments
    from ..backends.base import Array
    from ..problem.documents import PerDocument
    from ..schedule.needed import Activity
    from ..verify.result import Verification
    from .call_biases import CallBiases

GRADIENTS = ("dq", "dk", "dv", "dsinks")


class Verified(Described, Tiled):
    """A plan whose results can be verified."""

    _arguments: Arguments

    def _biases(self, given: BiasArguments, activity: Activity) -> CallBiases | None:
        raise NotImplementedError

    @refusing("verify", of_call("verify"))
    def verify(
        self,
        q: Array,
        k: Array,
        v: Array | None,
        out: Array,
        lse: Array,
        *,
        dout: Array | None = None,
        dlse: Array | None = None,
        grads: Sequence[Array | None] | None = None,
        cu_seqlens: PerDocument = None,
        cu_seqlens_k: PerDocument = None,
        lengths: PerDocument = None,
        lengths_k: PerDocument = None,
        prefixes: PerDocument = None,
        causal_documents: PerDocument = None,
        padding: bool = False,
        sinks: Array | None = None,
        bias: Array | None = None,
        key_bias: Array | None = None,
        alibi_slopes: Array | None = None,
        relative_bias: Array | None = None,
        relative_grid: Sequence[int] | None = None,
        relative_cyclic: Sequence[bool] | None = None,
        dropout: float = 0.0,
        seed: int | None = None,
        bias_gradients: bool | Sequence[str] = True,
        bias_shared: Sequence[str] | None = None,
        samples: int | None = SAMPLES,
        sample_seed: int = 0,
    ) -> Verification:
        """Compare results with float64 attention of the same inputs, at some tokens of every rank; collective.

        It checks out and lse of a call of `forward` and, given grads, the results of `backward`.  The reference shares
        no code with what computed them.  A sample finds a wrong mask, tile, schedule or kernel, not each wrong number.

        Time: each rank does 2 * batch * samples * seqlen_k * heads * (head_dim + value_dim) operations in float64 on
        its CPU, with grads 4.5 times as many, fewer under a mask.  2e11 of them take tens of seconds on one core.
        Bytes: each rank sends about 10 * batch * ranks * samples * heads * (head_dim + value_dim), with grads 4 times
        as many.  Memory: some tens of MB and, with grads, 16 bytes an element of lse; arrays on a GPU are copied to
        host memory.  No array is changed.  A dense bias adds an allreduce of 8 * batch * heads * ranks * samples *
        (seqlen_k or, with grads, 2 * seqlen_k + seqlen) bytes, less where batch or heads share it, some MB at a time.

        Parameters
        ----------
        q, k, v, out, lse : array
            Arguments and results of `forward`, v None with shared_kv.  Tensors may require gradients.
        dout, dlse : array, default None
            Arguments of `backward`, for grads alone.
        grads : sequence of array, default None
            Results of `backward`, all or the first ones of them, at least (dq, dk, dv).  They need dout.
        cu_seqlens, cu_seqlens_k, lengths, lengths_k, prefixes, causal_documents, padding, sinks
            As in the call of `forward`.
        bias, key_bias, alibi_slopes, relative_bias, relative_grid, relative_cyclic, dropout, seed
            As in the call of `forward`.
        bias_gradients, bias_shared
            As in the call of `backward`.
        samples : int or None, default 8
            Queries and keys of every rank that are compared, besides the first and last of each range of consecutive
            or evenly spaced tokens.  None for all.  Unless they are all, dk and dv are compared with gradients by this
            run's own out and lse of the other queries, and dsinks always is.  dbias is compared for the queries of the
            sample and all their keys, dkey_bias as dk; dalibi_slopes and drelative_bias, sums over all pairs, only
            where the sample has all queries.
        sample_seed : int, default 0
            Which tokens are drawn; another number at every step draws others.

        Returns
        -------
        mpiattn.verify.result.Verification
            The same on every rank: what was compared, and how far it is off.  `print` it.

        Raises
        ------
        VerificationError
            The same on every rank: a result is wrong.  The message names it, its error, the rank and the token, and
            `error.verification` holds what this would have returned.  The plan can still be used.
        ArgumentError, CallError, PeerFailure, MpiattnError
            As in `forward`.

        Examples
        --------
        >>> import numpy as np
        >>> from mpi4py import MPI
        >>> import mpiattn
        >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 100, 4, 16), np.float32)
        >>> with mpiattn.MeshAttention(MPI.COMM_WORLD, seqlen=100, heads=4, head_dim=16, causal=True) as plan:
        ...     out, lse = plan.forward(q, k, v)
        ...     grads = plan.backward(dout, q, k, v, out, lse)
        ...     verification = plan.verify(q, k, v, out, lse, dout=dout, grads=grads)
        >>> verification.passed, [array.name for array in verification.arrays]
        (True, ['out', 'lse', 'dq', 'dk', 'dv'])
        """
        documents = DocumentArguments(cu_seqlens, cu_seqlens_k, lengths, lengths_k, prefixes, causal_documents, padding)
        bias, key_bias, alibi_slopes, relative_bias = map(detached, (bias, key_bias, alibi_slopes, relative_bias))
        added = BiasArguments(
            bias, key_bias, alibi_slopes, relative_bias, relative_grid, relative_cyclic, dropout, seed
        )
        with self.call("verify") as call:
            with call.agreement() as same:
                _check_sample(samples, sample_seed)
                activity = self._activity_of(documents)
                biases = self._biases(added, activity)
                names = GRADIENTS[: 3 + (sinks is not None)]
                most = len(names) + (0 if biases is None else len(biases.names(bias_gradients)))
                of_gradients = _of_gradients(dout, dlse, grads, names, most)
                arrays = self._on_host({"q": q, "k": k, "v": v, "out": out, "lse": lse, **of_gradients})
                scores = self._arguments.sinks(detached(sinks))
                same |= compared(activity, scores)
                same |= {"samples": samples, "sample_seed": sample_seed}
                same |= {"number of grads": None if grads is None else len(grads)}
                of_biases = None
                if biases is not None:
                    of_biases = biases.for_reference((grads or ())[len(names) :], bias_gradients, bias_shared)
                    same |= biases.compared() | {
                        "gradients of biases": list(of_biases.grads),
                        "bias_shared": of_biases.shared,
                    }
            layouts = self.q_layout, self.k_layout
            how = documents.for_reference(), scores, samples, sample_seed, of_biases
            result = verify(call.peers, self.problem, layouts, arrays, *how)
            if not result.passed:
                error = VerificationError(result.complaint)
                error.verification = result
                raise everywhere(error, call.peers)
        return result

    def _on_host(self, given: dict[str, Array | None]) -> dict[str, Any]:
        """Arguments by name as NumPy arrays; those that may be missing, and are, are None.  Raises ArgumentError."""
        arrays: dict[str, Any] = dict.fromkeys(given)
        given = {name: detached(array) for name, array in given.items() if name != "dlse" or array is not None}
        for name, array in self._arguments.checked(**given).items():
            # a tensor by torch, whose stream it belongs to
            arrays[name] = on_host(array if not is_tensor(given[name]) else as_array(name, on_host(given[name])))
        return arrays


def _check_sample(samples: Any, seed: Any) -> None:
    for name, value, least, also in (("samples", samples, 1, ", or None for all"), ("sample_seed", seed, 0, "")):
        if value is not None or not also:
            whole_number(name, value, least, also)


def _of_gradients(dout: Array, dlse: Array, grads: Any, names: tuple[str, ...], most: int) -> dict[str, Array | None]:
    """The arrays by name that are given for gradients alone, none without them.  Raises ArgumentError.

    names: of the gradients but those of biases.  most: number of all.
    """
    if grads is None:
        for name, array in (("dout", dout), ("dlse", dlse)):
            if array is not None:
                raise ArgumentError(f"{name} is given without grads, which alone depend on it; give grads too")
        return {}
    if not isinstance(grads, tuple | list) or not 3 <= len(grads) <= most:
        given = f"{len(grads)} of them" if isinstance(grads, tuple | list) else f"a {type(grads).__name__}"
        raise ArgumentError(
            f"grads are {given}; they must be (dq, dk, dv) or, with sinks, (dq, dk, dv, dsinks), and then those of "
            "biases, as of backward"
        )
    if dout is None:
        raise ArgumentError("dout is None; it must be the array that backward was given for these grads")
    return {"dout": dout, "dlse": dlse, **dict(zip(names, grads))}
