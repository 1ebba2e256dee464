"""`MeshAttention`: a plan that is made once and run many times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments.biases import BiasArguments
from ..arguments.documents import DocumentArguments
from ..comm.agreement import agreement
from ..comm.exchange import MAX_MESSAGE
from ..comm.mesh import Home
from ..comm.peers import time_limit
from ..comm.refusal import of_call, of_making, refusing
from ..errors import ArgumentError
from ..problem.tensors import as_given
from ..system.values import check_function
from .arguments import compared
from .call_biases import CallBiases
from .lifetime import Lifetime
from .options import Asked
from .settle import settle

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from ..backends.base import Array
    from ..masks.interval_mask import IntervalMask
    from ..model.machine import Machine
    from ..problem.documents import PerDocument
    from ..problem.layout import AnyLayout
    from ..schedule.needed import Activity
    from ..schedule.tile import Tile


class MeshAttention(Lifetime):
    """Exact attention of a sequence that is spread over the ranks of a communicator (arXiv 2512.20968).

    Every rank holds a chunk of the tokens (`positions`) of q, k and v, and gets the same chunk of the result.  Making a
    plan, `like`, `forward`, `backward`, `verify`, `scatter`, `gather` and `close` are collective: all ranks call them
    in the same order.  The same mesh, layout, schedule, route and back end give the same bits (not backward with
    `cuda+cudnn`).  `q_layout`, `k_layout` and `schedule` hold what was chosen, `problem` holds the problem as given.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.  It is duplicated once for all plans on it and stays the caller's.
    seqlen, heads, head_dim : int
        Tokens, heads and elements per head of the queries of the whole problem.
    batch, kv_heads : int, default 1 and heads
        Number of sequences, and of heads of keys and values; kv_heads divides heads.
    dtype : str or dtype of NumPy or torch, default "float32"
        Of q, k, v, out and gradients: "float16", "bfloat16" (of ml_dtypes), "float32" or "float64".
    causal : bool, default False
        Whether query i sees only keys j <= i + seqlen_k - seqlen (bottom-right aligned).
    prefix, causal_block : int, default 0 and None
        Causal, but every query also sees the first `prefix` keys (prefix-LM) and the rest of its block of
        `causal_block` keys (block-causal).  In a call with documents both apply to each document.
    window : (int or None, int or None), default None
        Number of keys before and after the diagonal that a query sees; None or -1 for all.
    softcap, scale : float, default None and 1/sqrt(head_dim)
        Scores are multiplied by scale.  Softcap then replaces s by softcap * tanh(s / softcap); None or 0 for none.
    seqlen_k, value_dim : int, default seqlen and head_dim
        Tokens of the keys and elements of a value.
    shared_kv : bool, default False
        Whether a value is the first value_dim elements of its key (absorbed MLA): v is None, dk has both gradients.
        scale must then be given: that of the layer before its absorption.
    mask : mask of `mpiattn.masks`, default None
        Several intervals of keys a query: neighbourhoods on a grid, global tokens, lists of ranges and others.  Its
        positions are those of the whole sequence, also with documents.  A query sees the keys that this and all other
        masks show.
    key_bias : bool, default False
        Whether calls have a key_bias.  It travels with the keys: 4 bytes a key and head, 8 with float64.
    tile : str, tuple of int or Tile, default "auto"
        "AxB" (A query chunks x B KV chunks, A * B = ranks); "HxAxB" (the same on each of H planes, which have 1/H of
        batch and heads, H * A * B = ranks); the numbers; "ring", "qring", "ulysses" (a rank a plane) or "mesh", the
        fastest of these.  "bands": every rank computes pieces of the scores, of any KV heads; for any number of ranks.
        "dealt": as bands, and the documents of each call are dealt to ranks.  "auto": the fastest mesh or bands, or
        dealt if there are expected_cu_seqlens.  Calls with a dense bias need a mesh.
    layout : str, Layout, tuple of int, or pair of the latter two, default "auto"
        "contiguous", "striped", "zigzag", "auto", a `Layout`, or the number of tokens of every rank, of consecutive
        chunks in order of rank; or two: (queries, keys).  "auto" is "contiguous".
    mesh_layout : str, default "auto"
        Kind of layout in which the mesh computes.  An all-to-all before and after makes it of `layout` where it is
        another kind, or where there are planes.  "auto": what is predicted to be faster.  "grid" or "ranges", where
        `layout` is of that kind: without regrouping.
    schedule, route : str, default "auto"
        schedule: "greedy", "collective" or "auto".  route: "direct", "ring" or "auto".
    direction : str, default "forward"
        Passes whose predicted time "auto" minimizes: "forward", "backward" or "both".  The plan can run either pass.
    wire_dtype : str, default float32 (float64 for float64)
        Dtype of partials (out, dq, dk, dv, not lse) in a plane's messages; narrower: route "direct" only, rounded once.
    backend, transport : str, default "auto"
        backend: "cpu" (compiled kernels), "numpy", "auto" ("cpu" where every rank has it, else "numpy") or "cuda"
        (no float64, dims to 256), which takes NumPy arrays and, without a copy, GPU arrays of CuPy, torch and others,
        and returns arrays on the GPU, of q's library where that can have them, else of CuPy.
        transport of "cuda": "device" (MPI gets GPU memory), "ipc" (CUDA IPC inside nodes), "staged"; "auto": by trial.
    max_message, max_memory : int or str, default "1G" and None
        Bytes, also as "512M" or "1.5G".  max_message: of the longest MPI message.  Collectives, scatter and gather
        split down to one token's row.  max_memory: that a rank may need, without scratch; tiles, schedules and
        receiving ahead go by it.  Calls need more if their documents see more than the masks, at most what a plan
        without masks needs.  Without a max_memory, nodes, cgroups, Slurm jobs and GPUs must have room for the plan.
    machine : Machine or str, default None
        For "auto": a `Machine`, a built-in name, a file; None for the `mpiattn tune` of such a launch, else a default.
    overlap : bool, default True
        Whether transfers run while blocks are computed; False measures the gain of it.
    timeout : float, default 600 or ten times the predicted time of the passes, whichever is longer
        Seconds that this rank waits for others in a call or a transfer before it raises PeerFailure; inf for no limit.
    expected_cu_seqlens : as cu_seqlens of `forward`, default None
        For "auto" and predicted times: documents like those of calls, or without padding.  No result depends on it.

    Raises
    ------
    ArgumentError
        Here and in all collective methods, on every rank alike: an argument is invalid on some rank, or differs between
        ranks where it must not.  In any method: the plan is closed.  Also a MemoryError: there is not enough memory.
    CallError
        Here and in all collective methods, on every rank alike: ranks make different calls.  Nothing was sent.
    PeerFailure
        Here and in all collective methods: another rank failed or timed out.  Close all plans and caches on the
        communicator: none can be used again.
    MpiattnError
        On this rank alone: another call on the communicator is running, or one before it did not end.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> import mpiattn
    >>> with mpiattn.MeshAttention(MPI.COMM_WORLD, seqlen=100, heads=4, head_dim=16, causal=True) as plan:
    ...     out, lse = plan.forward(*np.ones((3, 1, len(plan.positions), 4, 16), np.float32))
    >>> out.shape, lse.shape
    ((1, 100, 4, 16), (1, 4, 100))
    """

    KIND = "plan"

    @refusing("MeshAttention", of_making)
    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        seqlen: int,
        heads: int,
        head_dim: int,
        batch: int = 1,
        kv_heads: int | None = None,
        dtype: Any = "float32",
        causal: bool = False,
        prefix: int = 0,
        causal_block: int | None = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        seqlen_k: int | None = None,
        value_dim: int | None = None,
        shared_kv: bool = False,
        mask: IntervalMask | None = None,
        key_bias: bool = False,
        tile: str | tuple[int, int] | Tile = "auto",
        layout: AnyLayout = "auto",
        mesh_layout: str = "auto",
        schedule: str = "auto",
        route: str = "auto",
        direction: str = "forward",
        wire_dtype: Any = None,
        backend: str = "auto",
        transport: str = "auto",
        max_message: int | str = MAX_MESSAGE,
        max_memory: int | str | None = None,
        machine: Machine | str | os.PathLike[str] | None = None,
        overlap: bool = True,
        timeout: float | None = None,
        expected_cu_seqlens: PerDocument = None,
    ) -> None:
        self._asked = Asked.of(locals())  # which are the arguments alone, at this point
        limit = time_limit(timeout)
        home = Home.enter(comm, limit)
        with self.making(home):
            peers = home.peers(limit)
            self._decision, self._backend = settle(home, peers, self._asked)
            self._mesh = home.mesh(peers, self._decision.choice.tile, self._decision.mesh_order)
            self._check_memory(home, peers)
            with agreement(peers):  # out of memory on one rank must not hang the others
                self._prepare(home)
            self._begin(home, self._why)

    @refusing("forward", of_call("forward"))
    def forward(
        self,
        q: Array,
        k: Array,
        v: Array | None = None,
        *,
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
        out: Array | None = None,
        lse: Array | None = None,
        check: bool = True,
        progress: Callable[[float], object] | None = None,
    ) -> tuple[Array, Array]:
        """Attention of this rank's chunks; collective.

        Inputs are never changed, and may be torch tensors.  They are copied, into memory that the plan keeps, unless
        they are contiguous with tokens first, as all contiguous arrays are if batch = 1.

        Parameters
        ----------
        q : array, (batch, tokens, heads, head_dim)
            In the plan's dtype; tokens as in `positions`.
        k, v : array, (batch, tokens_k, kv_heads, head_dim or value_dim)
            In the plan's dtype; tokens as in `positions_k`.  v is None in a plan with shared_kv.
        cu_seqlens, cu_seqlens_k : sequence of int, (documents + 1,), or one for each batch entry, default None
            Where the documents of queries and of keys (default: the same) begin, and the last one's end: from 0 to the
            number of tokens, unless there is padding.  A document sees only itself.
        padding : bool, default False
            Whether tokens before the first document and after the last are padding, whose out is 0 and lse -inf.
        lengths, lengths_k : sequence of int, (batch,), default None
            Without cu_seqlens: tokens of each batch entry that are not padding, which comes last.
        prefixes, causal_documents : sequence of int or of bool, (documents,), or one for each batch entry, default None
            The prefix of each document, and whether it is causal, in place of the plan's.  Without cu_seqlens (batch,).
        sinks : array, (heads,), default None
            Attention sinks in lse's dtype, the same on every rank: one more score per query of a head, with value 0.
        bias : array, (sequences or 1, heads or 1, rows, columns), default None
            Added to the scores after scale and softcap: this rank's tile of a bias of all queries and keys, which
            `scatter_bias` cuts out of a whole one.  `bias_positions` are the positions of its rows and columns.
            Without planes, it has all sequences and heads of the problem; an axis of length 1 is the same for all.
            In the plan's or in lse's dtype.  Copied if not contiguous.  -inf gives a pair no weight, NaN makes its
            row NaN.
        key_bias : array, (tokens_k,), (heads or 1, tokens_k) or (batch or 1, heads or 1, tokens_k), default None
            Added to the scores of each of this rank's keys (`positions_k`), in lse's dtype; in plans with key_bias.
        alibi_slopes : array, (heads,), default None
            -slope * abs(distance) is added to scores (ALiBi), in lse's dtype, the same on every rank.  A distance is
            that of a key from the query's diagonal, which is the query itself where there are as many keys as queries.
        relative_bias : array, (heads or 1, 2 R + 1) or (heads or 1, 2 R + 1 of each axis of a grid), default None
            Number R + d is added to scores at distance d = key - query (Swin's tables have query - key); R's beyond it.
            In lse's dtype, the same on every rank.
        relative_grid, relative_cyclic : sequence of int and of bool, default None
            Points along the axes of a grid that the tokens are in C order; whether each axis has no ends.  Distances
            are then offsets along the axes, on cyclic ones by the shorter way, of two that are equal the negative one.
        dropout : float, default 0.0
            Probability that a weight is dropped; others are divided by 1 - dropout.  lse is that of all weights.
        seed : int, default None
            From 0 to 2^64 - 1, with dropout.  What is dropped depends on it, on the batch entry, the head and both
            positions alone (Philox 4x32-10), on no mesh and no back end.
        out, lse : array, default None
            Memory for either result or both, of its shape and dtype, with any strides, on this rank's GPU with "cuda".
            It must be writable and shared with no other argument, and is undefined if the call raises.
        check : bool, default True
            Verify by an allreduce that ranks make the same valid call; else calls that differ may give wrong numbers.
        progress : callable, default None
            Called with the number of blocks (of a * b), or the part of one, just computed.  It must not call mpiattn.

        Returns
        -------
        out : array, (batch, tokens, heads, value_dim)
            In the plan's dtype; 0 for a query without keys.  Both results are tensors if q is one.
        lse : array, (batch, heads, tokens)
            Natural logarithm of each row's sum of exponentials, float32 or float64; without keys -inf or the sink.

        Raises
        ------
        ArgumentError
            The same on every rank; with check=False on the faulty rank only, and PeerFailure on the others.
        CallError, PeerFailure, MpiattnError
            As in `MeshAttention`; with check=False no CallError.
        """
        documents = DocumentArguments(cu_seqlens, cu_seqlens_k, lengths, lengths_k, prefixes, causal_documents, padding)
        given = BiasArguments(
            bias, key_bias, alibi_slopes, relative_bias, relative_grid, relative_cyclic, dropout, seed
        )
        with self.call("forward") as call:
            with call.agreement(check) as same:
                check_function("progress", progress)
                inputs, sinks = self._arguments.checked(q=q, k=k, v=v), self._arguments.sinks(sinks)
                results = self._arguments.results({"out": out, "lse": lse}, {**inputs, "sinks": sinks})
                activity = self._activity_of(documents)
                same |= compared(activity, sinks)
                biases = self._biases(given, activity)
                if biases is not None:
                    inputs |= biases.arrays()
                    same |= biases.compared()
                prepared = self._passes.prepare("forward", inputs, activity, results.arrays(q), biases)
            self._passes.run(prepared, sinks, progress)
            if check:
                self._returned.remember(prepared.results, activity, same)
            else:
                self._returned.skip()
        return results.returned(q)

    @refusing("backward", of_call("backward"))
    def backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array | None,
        out: Array,
        lse: Array,
        *,
        dlse: Array | None = None,
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
        dq: Array | None = None,
        dk: Array | None = None,
        dv: Array | None = None,
        dbias: Array | None = None,
        bias_gradients: bool | Sequence[str] = True,
        bias_shared: Sequence[str] | None = None,
        check: bool = True,
        progress: Callable[[float], object] | None = None,
    ) -> tuple[Array | None, ...]:
        """Gradients of sum(dout * out) + sum(dlse * lse) with respect to q, k and v; collective.

        Mesh rows exchange q, dout, lse and delta = rowsum(dout * out) - dlse, which its owner computes.  dq is reduced
        along rows, dk and dv along columns (Mesh-Attention, section 3, with delta in place of out).

        Unless check is False, options that differ from those of the forward pass of this plan that returned these
        numbers of lse are an error, and so is an out that was overwritten.  Of another lse some rows are checked: their
        weights may not add up to more than 1, but to less, as with an lse of `merge`.  Arrays on a GPU are not looked
        at.

        Parameters
        ----------
        dout, dlse : array, dlse by default None for 0
            Gradients of out and lse, in their shapes and dtypes.  With `cuda+cudnn`, dlse is for all ranks or none.
        q, k, v, out, lse : array
            Arguments and results of `forward`.
        cu_seqlens, cu_seqlens_k, lengths, lengths_k, prefixes, causal_documents, padding, sinks, check, progress
            As in `forward`, with the same documents and sinks.
        bias, key_bias, alibi_slopes, relative_bias, relative_grid, relative_cyclic, dropout, seed
            As in `forward`, with the same values.
        dq, dk, dv, dbias : array, default None
            Memory for any of the results, as `out` in `forward`.  It is overwritten, not added to.
        bias_gradients : bool or sequence of str, default True
            Names of the biases whose gradients are returned: of "bias", "key_bias", "alibi_slopes" and "relative_bias".
            True for those of all that are given, False for none.
        bias_shared : sequence of str, default None
            Of "batch" and "heads", those along which all of the problem has one bias.  Needed only where a plane of
            several has a single sequence or head, so that the shape of `bias` does not say it.

        Returns
        -------
        dq, dk, dv : array
            In the plan's dtype and the shapes of q, k and v; tensors if q is one.  dv is None in a plan with shared_kv.
        dsinks : array, (heads,)
            With sinks only: the whole gradient on every rank, in lse's dtype, by an allgather not counted in `sent`.
        dbias, dkey_bias, dalibi_slopes, drelative_bias : array
            Of those that are given and wanted, in lse's dtype and the shape of the argument.  Where that has the length
            1 or lacks an axis, sums.  dbias is that of this rank's tile: no byte is sent, but between planes that share
            it.  The last two are whole on every rank, by one allreduce not counted in `sent`.

        Raises
        ------
        ArgumentError, CallError, PeerFailure, MpiattnError
            As in `forward`.
        """
        documents = DocumentArguments(cu_seqlens, cu_seqlens_k, lengths, lengths_k, prefixes, causal_documents, padding)
        given = BiasArguments(
            bias, key_bias, alibi_slopes, relative_bias, relative_grid, relative_cyclic, dropout, seed
        )
        with self.call("backward") as call:
            with call.agreement(check) as same:
                check_function("progress", progress)
                inputs = self._arguments.checked(q=q, k=k, v=v, dout=dout, out=out)
                rows = self._arguments.checked(lse=lse, **({} if dlse is None else {"dlse": dlse}))
                sinks = self._arguments.sinks(sinks)
                results = self._arguments.results({"dq": dq, "dk": dk, "dv": dv}, {**inputs, **rows, "sinks": sinks})
                activity = self._activity_of(documents)
                same |= compared(activity, sinks, self._backend.dlse_on_all and dlse is not None)
                biases, of_keys = self._biases(given, activity), ()
                if biases is not None:
                    of_keys = biases.expect_gradients(bias_gradients, dbias, bias_shared, {**inputs, **rows}, q)
                    inputs |= biases.arrays()
                    same |= biases.compared()
                elif dbias is not None:
                    raise ArgumentError("dbias is given without bias, whose gradient it would be")
                if check:
                    self._returned.check({**inputs, **rows}, activity, same)
                arrays = results.arrays(q) + of_keys
                prepared = self._passes.prepare("backward", {**inputs, **rows}, activity, arrays, biases)
            dsinks = self._passes.run(prepared, sinks, progress)
            grads = *results.returned(q), *[None] * self.problem.shared_kv
            if dsinks is not None:
                of_ranks = self._peers.allgather(dsinks)
                with np.errstate(all="ignore"):  # infinite gradients of two ranks may have no sum
                    dsinks = np.sum(of_ranks, axis=0)  # in order of rank: the same bits on all ranks
                grads += as_given(q, self._backend.give(dsinks, q))
            if biases is not None:
                grads += tuple(biases.gradients(self._peers, q))
        return grads

    def _biases(self, given: BiasArguments, activity: Activity) -> CallBiases | None:
        """Those of a call, checked; None if it has none.  Raises ArgumentError."""
        if given.none and not self.problem.key_bias:
            return None
        if given.bias is not None:
            self._check_tiles("bias is given")
        return CallBiases(given, self.problem, self._backend, self._share, self._passes.tokens[1], activity)
