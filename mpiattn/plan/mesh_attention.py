"""What a program calls: `MeshAttention`, a plan that is made once and run many times."""

from contextlib import contextmanager

import numpy as np

from ..comm.agreement import agreement
from ..comm.collective_calls import Collective
from ..comm.exchange import MAX_MESSAGE, Exchange
from ..comm.mesh import Home
from ..comm.peers import time_limit
from ..comm.redistribute import gather, scatter
from ..comm.transport import local_backend
from ..engine.executor import Executor
from ..engine.folding import Folding, checked, on_host
from ..engine.passes import Backward, Forward
from ..engine.results import Results
from ..model import memory
from ..problem.tensors import as_given, is_tensor
from ..schedule.needed import Activity
from .description import Described
from .settle import resized, settle


class MeshAttention(Described, Collective):
    """Exact attention of a sequence that is spread over the ranks of a communicator (arXiv 2512.20968).

    Every rank holds a chunk of the tokens of q (batch, tokens, heads, head_dim), k (batch, tokens, kv_heads,
    head_dim) and v (batch, tokens, kv_heads, value_dim), and gets its chunk of the result.  Making a plan,
    `forward`, `scatter`, `gather` and `close` are collective: every rank calls them in the same order.

    Results are deterministic: the same mesh, layout, schedule, route and back end give the same bits.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.  It is duplicated once for all plans on it and stays the caller's.
    seqlen, heads, head_dim : int
        Of the queries of the whole problem.
    batch : int, default 1
        Sequences.
    kv_heads : int, default heads
        Heads of keys and values; it divides heads.
    dtype : str or dtype of NumPy or torch, default "float32"
        Of q, k, v, out and gradients: "float16", "bfloat16" (of ml_dtypes), "float32" or "float64".
    causal : bool, default False
        Whether query i sees only keys j <= i + seqlen_k - seqlen (bottom-right aligned).
    prefix, causal_block : int, default 0 and None
        Causal, but all queries see the first `prefix` keys (prefix-LM), and each sees to the end of the block of
        `causal_block` keys in which it stands (block-causal); of every document, where a call has some.
    window : (int or None, int or None), default None
        How many keys before and after that diagonal a query sees; None or -1 for all.
    softcap : float, default None
        Scores s become softcap * tanh(s / softcap); None or 0 for none.
    scale : float, default 1/sqrt(head_dim)
        Factor of the scores.
    seqlen_k, value_dim : int, default seqlen and head_dim
        Tokens of the keys and elements of a value.
    tile : str or (int, int), default "auto"
        "AxB" (A query chunks x B KV chunks, A * B = ranks), a pair, "ring", "qring", or "auto".
    layout : str or Layout or pair of Layout, default "auto"
        "contiguous", "striped", "zigzag" or "auto"; `positions` tells which tokens a rank then holds.  Or a `Layout` of
        uneven contiguous chunks, or a pair, of queries and of keys.
    schedule, route : str, default "auto"
        schedule: "greedy", "collective" or "auto".  route: "direct", "ring" or "auto".
    direction : str, default "forward"
        For the predicted time of which passes "auto" chooses, among all that is left to it: "forward", "backward" or
        "both".  The plan runs either.
    wire_dtype : str, default float32 (float64 for float64)
        In which partials (out, dq, dk, dv, not lse) travel.  A narrower one takes fewer bytes and rounds each partial
        once, which only the direct route can promise.
    backend : str, default "auto", which is "numpy"
        "numpy" or "cuda" (CuPy and a GPU).  "cuda" takes CuPy arrays, other libraries' on the GPU, without a copy, and
        NumPy's; its results are CuPy's.  It takes no float64, and dims up to 256.
    transport : str, default "auto"
        Of "cuda": "staged", through pinned host memory; "device", where MPI takes device memory itself; "auto",
        "device" where that has been seen to work.
    max_message : int
        Bytes of the longest MPI message; longer ones are split, those of collectives and of scatter and gather down to
        one token's row.
    max_memory : int, default None
        Bytes that a rank may need at most (`Choice.nbytes`, without the back end's scratch): tiles and schedules that
        need more are not taken, and chunks are received less far ahead.
    machine : Machine or str, default None
        Whose predicted times "auto" goes by: a `Machine`, the name of a built-in one or a file; None for what `mpiattn
        tune` has stored for such a launch, else a default.
    overlap : bool, default True
        Let transfers go on while blocks are computed; without it, to measure what it is worth.
    timeout : float, default 600 or ten times the predicted time of the passes, whichever is longer
        Seconds that this rank waits for others, in a call or a transfer, before it raises PeerFailure.  inf: for ever.

    Attributes
    ----------
    q_layout, k_layout, schedule, problem
        What was chosen and asked.

    Raises
    ------
    ArgumentError
        The same on every rank.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> import mpiattn
    >>> with mpiattn.MeshAttention(MPI.COMM_WORLD, seqlen=100, heads=4, head_dim=16, causal=True) as plan:
    ...     q, k, v = np.ones((3, 1, len(plan.positions), 4, 16), np.float32)
    ...     out, lse = plan.forward(q, k, v)
    >>> out.shape, lse.shape
    ((1, 100, 4, 16), (1, 4, 100))
    """

    KIND = "plan"

    def __init__(self, comm, *, seqlen, heads, head_dim, batch=1, kv_heads=None, dtype="float32", causal=False,
                 prefix=0, causal_block=None, window=None, softcap=None, scale=None, seqlen_k=None, value_dim=None,
                 tile="auto", layout="auto", schedule="auto", route="auto", direction="forward", wire_dtype=None,
                 backend="auto", transport="auto", max_message=MAX_MESSAGE, max_memory=None, machine=None, overlap=True,
                 timeout=None):
        limit = time_limit(timeout)
        home = Home.enter(comm, limit)
        with self._making(home):
            peers = home.peers(limit)
            shape = {"seqlen": seqlen, "heads": heads, "head_dim": head_dim, "batch": batch, "kv_heads": kv_heads,
                     "value_dim": value_dim, "seqlen_k": seqlen_k, "dtype": dtype, "causal": causal, "scale": scale,
                     "window": window, "softcap": softcap, "wire_dtype": wire_dtype, "prefix": prefix,
                     "causal_block": causal_block}
            self._asked = shape, {
                "tile": tile, "layout": layout, "schedule": schedule, "route": route, "direction": direction,
                "backend": backend, "transport": transport, "max_message": max_message, "max_memory": max_memory,
                "machine": machine, "overlap": overlap, "timeout": timeout}
            self._plan, self._backend = settle(home, peers, *self._asked)
            self._mesh = home.mesh(peers, self._plan.choice.a, self._plan.choice.b, self._plan.order)
            with agreement(peers):                    # a rank that lacks the memory must not leave the others waiting
                self._prepare(home)
            self._join(home, self._exchange.peers)

    def _prepare(self, home):
        """Make what the plan needs to run, on its mesh and back end; not collective."""
        chosen, (_, options) = self._plan.choice, self._asked
        p = self.problem = self._plan.problem
        self.schedule, self._layouts = self._plan.schedule(), chosen.layouts            # these by rank of the mesh
        self.q_layout, self.k_layout = self._plan.layouts_by_rank()
        peers = home.peers(time_limit(options["timeout"], chosen.seconds))
        peers.idle = self._backend.idle
        self._exchange = Exchange(peers, options["max_message"])
        self._executor = Executor(self._mesh, self.schedule, Forward(p, self._backend), self._exchange, *self._layouts)
        self._activity = self._latest = Activity(p.mask, *self._layouts, chosen.a, chosen.b)
        self._tokens = tuple(layout.length(self.chunk) for layout in self._layouts)
        self._nbytes = (memory.chunk_bytes(p, *self._tokens)
                        + self._executor.nbytes + self._backend.scratch_bytes(p.head_dim, p.value_dim, p.dtype))
        self._folding, self._backward = Folding(self._backend, p.batch), None

    def like(self, *, seqlen=None, seqlen_k=None):
        """A plan for other lengths with this one's choice: tile, schedule, route, kind of layout; collective.

        All else is as this plan was asked, and either may be closed first.  Nothing is searched, so it takes a few
        milliseconds and one small allreduce: for training on batches of changing length.  Where lengths differ much,
        another choice may be faster.

        seqlen: default this plan's.  seqlen_k: default seqlen if they are the same in this plan, else this plan's.

        Raises ArgumentError, the same on every rank: also where this plan's layout has sizes that do not add up to the
        length, or the length needs more than max_memory.
        """
        p, other = self.problem, object.__new__(type(self))
        seqlen = p.seqlen if seqlen is None else seqlen
        if seqlen_k is None:
            seqlen_k = seqlen if p.seqlen_k == p.seqlen else p.seqlen_k
        with self.call("like") as call, call.agreement() as same:
            same |= {"seqlen": seqlen, "seqlen_k": seqlen_k}
            shape, options = self._asked
            other._asked = {**shape, "seqlen": seqlen, "seqlen_k": seqlen_k}, options
            other._plan, other._mesh = resized(self._plan, *other._asked), self._mesh
            other._backend = local_backend(self._peers.rank, self._home.nodes, self.backend, self._backend.transport)
            other._prepare(self._home)
            same["schedule"] = other.schedule            # every rank has made its own
        self._home.share(self._mesh)
        other._join(self._home, other._exchange.peers)
        return other

    # Running

    def forward(self, q, k, v, *, cu_seqlens=None, cu_seqlens_k=None, lengths=None, lengths_k=None, prefixes=None,
                causal_documents=None, sinks=None, out=None, lse=None, check=True, progress=None):
        """Attention of this rank's chunks; collective.

        q (batch, tokens, heads, head_dim), k and v (batch, tokens_k, kv_heads, head_dim or value_dim), in the
        plan's dtype, tokens as in `positions` and `positions_k`.  They are never changed.  Arrays that are not
        contiguous with tokens first, (tokens, batch, heads, dim), are copied, into memory that the plan keeps; with
        batch = 1 every contiguous array is so.  Torch tensors on the CPU serve as well, here and in all other calls;
        results are tensors if q is.

        Returns out (batch, tokens, heads, value_dim) in the plan's dtype and lse (batch, heads, tokens), the
        natural logarithm of each row's sum of exponentials, float32 (float64 for float64).  A query that sees
        no key has out 0 and lse -inf.

        cu_seqlens, cu_seqlens_k, lengths, lengths_k, prefixes, causal_documents: packed documents and padding of this
            call, and what each document sees, the same on every rank (see `mpiattn.problem.documents.documents`).
        sinks: attention sinks, (heads,) in lse's dtype, the same on every rank: a score that every query of a head
            sees besides its keys, with value 0.  A query that sees no key then has lse = its head's sink.
        out, lse: the caller's memory for the results, either or both: arrays of these shapes and dtypes, of any
            strides, that are written into and returned; None for new ones.  With "cuda" they are on this rank's GPU.
            They must be writable and share no memory with q, k, v, sinks or each other.  If the call raises, what they
            hold is undefined.
        check: let ranks agree, by a small allreduce, that they make the same call of the same plan, that their
            arguments are right and their documents the same.  Without it a wrong argument raises on its own rank only,
            and PeerFailure on the others, and ranks that call different plans get wrong numbers.
        progress: called with the number of blocks (of a * b in all), or the part of one, that were
            just done.  It must not call mpiattn.

        If anything raises on one rank once the transfers have begun, the others raise PeerFailure as soon as they wait
        for it.  No plan or cache on the communicator can then be used again; close them and make new ones.
        """
        p, tokens = self.problem, self._tokens[0]
        with self.call("forward") as call:
            with call.agreement(check) as same:
                inputs, sinks = self._inputs(q, k, v), self._sinks(sinks)
                results = Results(self._backend, {
                    "out": (out, (p.batch, tokens, p.heads, p.value_dim), p.dtype),
                    "lse": (lse, (p.batch, p.heads, tokens), p.partial_dtype)}, {**inputs, "sinks": sinks})
                activity = self.activity_of(cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, lengths=lengths,
                                            lengths_k=lengths_k, prefixes=prefixes, causal_documents=causal_documents)
                same |= self._alike(activity, sinks)
                whole_out, whole_lse = results.arrays()
                chunks = [self._folding.fold(*argument) for argument in inputs.items()]
            with self._pass(self._executor):
                partial_out, partial_lse = self._executor.run(chunks[:1], chunks[1:], activity, progress)["O"]
                if sinks is not None:
                    self._backend.sink(partial_out, partial_lse, self._folded_sinks(sinks))
                self._folding.unfold(whole_out, partial_out)
                self._backend.copy(whole_lse, self._folding.by_batch(partial_lse).transpose(1, 2, 0))
        return results.returned(q)

    def backward(self, dout, q, k, v, out, lse, *, dlse=None, cu_seqlens=None, cu_seqlens_k=None, lengths=None,
                 lengths_k=None, prefixes=None, causal_documents=None, sinks=None, dq=None, dk=None, dv=None,
                 check=True, progress=None):
        """Gradients of sum(dout * out) + sum(dlse * lse) by q, k and v; collective.

        q, k, v, out, lse, the documents and sinks: as given to and returned by `forward`.  dout: as out, in the plan's
        dtype.  dlse: as lse, or None for 0.  Rows exchange q, dout, lse and delta = rowsum(dout * out) - dlse, which
        only the owner computes; dq is reduced along rows, dk and dv along columns (Mesh-Attention, section 3, with
        delta in place of out).  The first call makes the buffers of the backward pass.
        dq, dk, dv: the caller's memory for the results, any of them, as `forward` takes it for its own: in the shapes
        of q, k and v and the plan's dtype.  They are overwritten, not added to.

        Returns dq, dk and dv in the plan's dtype and the shapes of q, k and v; with sinks also dsinks, (heads,), the
        whole gradient on every rank (from an allgather of heads numbers, which `sent` does not count).
        """
        p, tokens, given = self.problem, self._tokens[0], q
        with self.call("backward") as call:
            with call.agreement(check) as same:
                inputs = self._inputs(q, k, v)
                asked = {f"d{name}": (grad, inputs[name].shape, p.dtype)
                         for name, grad in (("q", dq), ("k", dk), ("v", dv))}
                for name, array in (("dout", dout), ("out", out)):
                    inputs[name] = self._checked(name, array, (p.batch, tokens, p.heads, p.value_dim))
                rows = {name: self._checked(name, array, (p.batch, p.heads, tokens), p.partial_dtype)
                        for name, array in (("lse", lse), ("dlse", dlse)) if name == "lse" or array is not None}
                sinks = self._sinks(sinks)
                results = Results(self._backend, asked, {**inputs, **rows, "sinks": sinks})
                activity = self.activity_of(cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, lengths=lengths,
                                            lengths_k=lengths_k, prefixes=prefixes, causal_documents=causal_documents)
                same |= self._alike(activity, sinks)
                executor, fold = self._backward_executor(), self._folding.fold
                grads = results.arrays()
                q, k, v, dout, out = (fold(*argument) for argument in inputs.items())
                lse, dlse = (None if name not in rows else fold(name, rows[name].transpose(0, 2, 1))
                             for name in ("lse", "dlse"))
                delta = self._folding.kept("delta", lse.shape, p.partial_dtype)
            with self._pass(executor):
                ready = (self._backend.delta(delta, dout, out, dlse),)
                partials = executor.run([q, dout, lse, delta], [k, v], activity, progress, ready)
                for grad, partial in zip(grads, (*partials["dQ"], *partials["dKV"])):
                    self._folding.unfold(grad, partial)
                if sinks is not None:
                    dsinks = self._backend.result((p.batch * p.heads,), p.partial_dtype)
                    self._backend.sink_gradient(dsinks, self._folded_sinks(sinks), lse, delta)
            grads = results.returned(given)
            if sinks is not None:
                local = on_host(dsinks).reshape(p.batch, p.heads).sum(axis=0)
                grads += as_given(given, self._backend.give(self._sum_over_ranks(local)))
        return grads

    @contextmanager
    def _pass(self, executor):
        self._backend.begin()
        yield
        self._backend.finish()
        executor.forget()
        for array in self._folding.kept.arrays():
            self._backend.forget(array)

    def _backward_executor(self):
        if self._backward is None:
            p = self.problem
            self._backward = Executor(self._mesh, self._plan.schedule("backward"), Backward(p, self._backend),
                                      self._exchange, *self._layouts)
            self._nbytes += (self._backward.nbytes
                             + memory.gradient_bytes(p, *self._tokens)
                             + self._backend.scratch_bytes(p.head_dim, p.value_dim, p.dtype, backward=True))
        return self._backward

    @staticmethod
    def _alike(activity, sinks):
        """Both ends of a transfer judge by the documents whether it is made, so they must be the same everywhere."""
        groups = activity.documents
        return {"documents (cu_seqlens, lengths, prefixes or causal_documents)":
                groups and tuple(group.as_lists() for group in groups),
                "sinks": None if sinks is None else sinks.tolist()}

    def _sinks(self, sinks):
        """Sinks as a NumPy array, or None."""
        if sinks is None:
            return None
        return on_host(self._checked("sinks", sinks, (self.problem.heads,), self.problem.partial_dtype))

    def _folded_sinks(self, sinks):
        return self._backend.contiguous(np.tile(sinks, self.problem.batch))

    def _sum_over_ranks(self, local):
        """The sum of a small array over the ranks, in order of rank, so that it is the same on all."""
        return np.sum(self._peers.allgather(local), axis=0)

    def _inputs(self, q, k, v):
        """q, k and v by name."""
        p, (tokens, tokens_k) = self.problem, self._tokens
        return {"q": self._checked("q", q, (p.batch, tokens, p.heads, p.head_dim)),
                "k": self._checked("k", k, (p.batch, tokens_k, p.kv_heads, p.head_dim)),
                "v": self._checked("v", v, (p.batch, tokens_k, p.kv_heads, p.value_dim))}

    def _checked(self, name, array, shape, dtype=None):
        return checked(self._backend, name, array, shape, dtype or self.problem.dtype)

    def scatter(self, array, *, root=0, axis=1, keys=False):
        """This rank's chunk of a whole array whose tokens lie along `axis`, in natural order; collective.

        array: the whole, of numbers of any dtype, needed on `root` only; with root=None every rank gives it and nothing
            is sent.  The chunk has its dtype, in this machine's byte order.
        axis: negative ones count from the last.
        keys: the tokens are those of keys and values (they differ only where seqlen_k does from seqlen).
        On the back end "cuda" it is a CuPy array.  Of a torch tensor, which only `root` need have, it is a tensor.
        """
        with self.call("scatter") as call:
            chunk = scatter(call, self._layout(keys), on_host(array), root, axis, self._exchange.max_message)
        return chunk if is_tensor(chunk) else self._backend.give(chunk)

    def gather(self, chunk, *, root=0, axis=1, keys=False):
        """The whole array of the ranks' chunks, in natural order; None except on `root`; collective.

        chunk: this rank's tokens along `axis` (1 for out, 2 for lse).  With root=None every rank gets the whole, which
        is a NumPy array: one device may not have the memory for it; or a torch tensor, where this rank's chunk is one.
        """
        with self.call("gather") as call:
            return gather(call, self._layout(keys), on_host(chunk), root, axis, self._exchange.max_message)

    def give(self, array):
        """A NumPy array as the back end's own, for `forward` and `backward`: with "cuda" a CuPy array."""
        self._check_open()
        return self._backend.give(array)

    def drain(self):
        """Return when results are there: with "cuda" calls return when all is launched."""
        self._check_open()
        self._backend.drain()

    def _layout(self, keys):
        return self.k_layout if keys else self.q_layout

    # End

    def close(self):
        """Give up the buffers and, with the communicator's last plan, what mpiattn holds of it; collective."""
        if self._home is not None:
            with self._leaving(self._mesh):
                self._backend.close()
                self._exchange.close()
            self._executor = self._backward = None
            self._folding = Folding(self._backend, self.problem.batch)      # what was kept may still be MPI's
