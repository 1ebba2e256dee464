"""Compares a sample of a call's results with float64 attention of inputs that are spread over the ranks.

No rank needs more than its own chunks.  The queries of the sample go to all ranks; each attends to its own keys, and
the ranks merge what they have.  The keys of the sample go to all ranks too; each adds up what its own queries give to
dk and dv.  For this it needs lse and delta = rowsum(dout * out) - dlse of all its queries.  They are float64 if the
sample has every query, else those of the run itself.
"""

import numpy as np
from mpi4py import MPI

from . import reference
from .compare import (
    ACCUMULATION,
    STATE_BYTES,
    Errors,
    choose_rows,
    largest,
    masks_of,
    out_tolerance,
    rounding_error,
    steps,
)
from .gradients import gradient_tolerance
from .result import Compared, Verification
from .spread_biases import SpreadBiases
from .sweep import row_bytes

SAMPLES = 8  # tokens of a rank, besides the ends of its ranges
OF_TERMS = 0.02  # part of the size of the terms of a sum that counts where these cancel
FAINT = -5e4  # an lse that no scores have; float16's lowest number, as a bias, makes one


def verify(peers, problem, layouts, arrays, documents=None, sinks=None, samples=SAMPLES, seed=0, biases=None):
    """Compare this rank's results with float64 attention; collective.  Returns a Verification, the same on every rank.

    layouts: of the queries and of the keys, by rank.
    arrays: NumPy arrays by name, shapes as in `MeshAttention.backward`: q, k, v, out and lse; for gradients also dout,
    dlse (or None), dq, dk and dv, and dsinks if it is to be compared.  v and dv are None where keys hold the values.
    documents: their arguments of `mpiattn.verify.reference.attention`, or None.  sinks: (heads,) or None.
    samples: tokens of each rank, besides the ends of its ranges; None for all.
    biases: `GivenBiases` or None.
    """
    most = np.inf if samples is None else samples
    rows, keys = (choose_rows(layout, peers.rank, np.ones(layout.length(peers.rank)), most, seed) for layout in layouts)
    check = _Check(peers, problem, layouts, arrays, documents, sinks, biases)
    check.queries(rows)
    if "dout" in arrays:
        check.keys(keys)
        if arrays.get("dsinks") is not None:
            check.sinks()
    return check.concluded()


class _Worst(Errors):
    """`Errors` that know where the largest is, and how many of how many tokens were compared."""

    def __init__(self, of):
        super().__init__()
        self.at, self.checked, self.of = -1, 0, of

    def compare(self, positions, got, expected):
        """Compare more tokens, at these positions, (batch, tokens, ...)."""
        self.checked += len(positions)
        for number, position in enumerate(positions.tolist()):
            error, differing = self.error, self.differing
            self.add(got[:, number : number + 1], expected[:, number : number + 1])
            if (self.differing and not differing) or (self.error > error and not self.differing):
                self.at = position


class _Turn:
    """Tokens of all ranks at a time, in the order of their positions.  arrays: of this rank's, (batch, tokens, ...)."""

    def __init__(self, peers, positions, arrays):
        parts = peers.allgather((positions, arrays))
        at = np.concatenate([part[0] for part in parts])
        order = np.argsort(at)
        self.at, self.own = at[order], np.searchsorted(at[order], positions)
        self.arrays = [np.concatenate(each, axis=1)[:, order] for each in zip(*(part[1] for part in parts))]


def _delta(dout, out, dlse):
    """rowsum(dout * out) - dlse, float64 (batch, heads, tokens).  A row of zeros in out ignores dout, even NaN."""
    counted = np.where(out.any(axis=3, keepdims=True), dout, 0).astype(np.float64)
    return np.einsum("bqhd,bqhd->bhq", counted, out.astype(np.float64)) - dlse


class _Check:
    """A verification: the inputs, and the errors so far."""

    def __init__(self, peers, problem, layouts, arrays, documents, sinks, biases):
        p, self.peers, self.problem, self.sink_scores = problem, peers, problem, sinks
        self.positions, self.key_positions = (layout.positions(peers.rank) for layout in layouts)
        self.q, self.k, self.v = (arrays[name] for name in "qkv")
        if p.shared_kv:
            self.v = self.k[..., : p.value_dim]
        self.results, self.dout, self.dlse = arrays, arrays.get("dout"), arrays.get("dlse")
        if self.dout is not None and self.dlse is None:
            self.dlse = np.zeros(arrays["lse"].shape, p.partial_dtype)
        self.masks = masks_of(p, documents)
        self.options = {"scale": p.scale, "softcap": p.softcap, **self.masks}
        lengths = {"out": p.seqlen, "lse": p.seqlen, "dq": p.seqlen, "dk": p.seqlen_k, "dv": p.seqlen_k}
        lengths["dsinks"] = p.heads
        self.errors = {name: _Worst(of) for name, of in lengths.items() if arrays.get(name) is not None}
        self.biases = None if biases is None else SpreadBiases(peers, p, biases, self.key_positions)
        lengths |= {"dbias": p.seqlen, "dkey_bias": p.seqlen_k}
        self.errors |= {name: _Worst(lengths.get(name, len(of))) for name, of in biases.grads.items()} if biases else {}
        self.change = self.terms = 0.0  # the largest |dout * out| of a query; the largest sum of the terms of dsinks
        self.exact = None  # lse and delta in float64 of all of this rank's queries, once they are known

    def _turns(self, tokens, bytes_each):
        """Some of this rank's tokens in as many turns as every rank has: few enough of all ranks together."""
        (most,) = self.peers.largest([len(tokens)]).tolist()
        each = max(1, STATE_BYTES // (bytes_each * self.peers.size))
        return [tokens[start : start + each] for start in range(0, most, each)]

    def queries(self, rows):
        """Compare out, lse and dq of these of this rank's queries."""
        p, results = self.problem, self.results
        whole = all(self.peers.allgather(len(rows) == len(self.positions)))
        exact = np.zeros((2, *results["lse"].shape)) if whole and self.dout is not None else None
        parameters = self._parameters(whole)
        for own in self._turns(rows, 8 * p.batch * p.heads * (2 * p.head_dim + 4 * p.value_dim)):
            at, given = self.positions[own], [self.q[:, own]]
            if self.dout is not None:
                given += self.dout[:, own], self.dlse[..., own].swapaxes(1, 2)
            turn = _Turn(self.peers, at, given)
            q, *of_results = turn.arrays
            out, lse = self._attention(turn.at, q)
            # Rounding alone decides what such rows have, and their lse would hide errors of all others.
            counted = ~self._faint(lse[..., turn.own]).swapaxes(1, 2)
            by_row = results["lse"][..., own].swapaxes(1, 2)
            self._compare("out", at, results["out"][:, own], out[:, turn.own], counted)
            self._compare("lse", at, by_row, lse[..., turn.own].swapaxes(1, 2), counted)
            if self.dout is not None:
                dout, dlse = of_results
                delta = _delta(dout, out, dlse.swapaxes(1, 2))
                dq = self._gradient(turn.at, q, dout, lse, delta, parameters.values())
                self._compare("dq", at, results["dq"][:, own], dq[:, turn.own], counted)
                if exact is not None:
                    exact[..., own] = lse[..., turn.own], delta[..., turn.own]
        self.exact = exact
        if parameters:
            self.biases.compare_parameters(self.errors, parameters)
            for name in parameters:
                self._count(name, self.errors[name].of)
        if "dbias" in self.errors:
            self._count("dbias", sum(self.peers.allgather(len(rows))))

    def _compare(self, name, at, got, expected, counted):
        """Compare queries at some positions, (batch, queries, heads, ...), where `counted`."""
        if not counted.all():
            counted = counted.reshape(*counted.shape, *(1,) * (got.ndim - 3))
            got, expected = (np.where(counted, array, 0) for array in (got, expected))
        self.errors[name].compare(at, got, expected)

    def _count(self, name, checked):
        """Say how many tokens or heads were compared of what several ranks have: one of them counts."""
        self.errors[name].checked = checked if self.peers.rank == 0 else 0

    def _parameters(self, whole):
        """What adds up gradients that all pairs give to; nothing where the sample has not all of them."""
        if self.biases is None or self.dout is None:
            return {}
        sums = self.biases.parameter_sums()
        if not whole:
            for name in sums:
                del self.errors[name]
        return sums if whole else {}

    def _of_keys(self, at):
        """Pieces of this rank's keys, each with the numbers of those queries, of those at `at`, that see any of it.

        Also the options of the reference.  With biases there may be no such queries, and it is collective.
        """
        p, length = self.problem, len(self.key_positions)
        begin, end = reference.bounds(at, p.batch, **self.masks)
        turns = self.biases and self.biases.turns(len(at), length)
        for piece in turns or steps(length, p.batch * p.kv_heads * (p.head_dim + p.value_dim) * p.itemsize):
            keys, options = self.key_positions[piece], self.options
            if self.biases is not None:
                options = options | {"biases": self.biases.of_queries(at, keys)}
            rows = np.zeros(0, np.int64)
            if len(keys):
                rows = np.flatnonzero(((begin <= keys[-1]) & (end > keys[0]) & (begin < end)).any(axis=0))
            if len(rows) or self.biases is not None:
                yield keys, self.k[:, piece], self.v[:, piece], rows, options

    def _attention(self, at, q):
        """float64 out and lse of queries of all ranks over all keys."""
        p = self.problem
        out = np.zeros((p.batch, len(at), p.heads, p.value_dim))
        lse = np.full((p.batch, p.heads, len(at)), -np.inf)
        for keys, k, v, rows, options in self._of_keys(at):
            if len(rows):
                part = reference.attention(q[:, rows], k, v, positions=at[rows], keys=keys, **options)
                out[:, rows], lse[..., rows] = reference.merge(out[:, rows], lse[..., rows], *part)
        out, lse = self._merged(out, lse)
        if self.sink_scores is None:
            return out, lse
        scores = np.broadcast_to(self.sink_scores.astype(np.float64)[:, None], lse.shape)
        return reference.merge(out, lse, np.zeros(out.shape), scores)

    def _merged(self, out, lse):
        """The ranks' partial results merged."""
        top = np.where(np.isnan(lse), -np.inf, lse)  # MPI.MAX does not say what it makes of NaN
        self.peers.reduce(top, MPI.MAX)
        with np.errstate(all="ignore"):
            weight = np.where(lse == -np.inf, 0, np.exp(lse - top))
            out *= weight.swapaxes(1, 2)[..., None]
            self.peers.reduce(weight, MPI.SUM)
            self.peers.reduce(out, MPI.SUM)
            total = weight.swapaxes(1, 2)[..., None]
            return out / np.where(total == 0, 1, total), np.where(weight == 0, -np.inf, top + np.log(weight))

    def _gradient(self, at, q, dout, lse, delta, parameters):
        """float64 dq of queries of all ranks over all keys; compares what these pairs give to dbias.

        parameters: other `Sums` of these pairs.
        """
        dq = np.zeros(q.shape)
        for keys, k, v, rows, options in self._of_keys(at):
            statistics = lse[..., rows], delta[..., rows]
            given = dout[:, rows], q[:, rows], k, v, *statistics
            sums = [] if self.biases is None else self.biases.tile_sums(at, keys)
            where = {"positions": at[rows], "keys": keys, "sums": [*sums, *parameters]}
            if len(rows):
                dq[:, rows] += reference.gradients(*given, of="q", **where, **options)[0]
            if sums:
                self.biases.compare_tile(self.errors["dbias"], sums)
        self.peers.reduce(dq, MPI.SUM)
        return dq

    def keys(self, keys):
        """Compare dk and dv of these of this rank's keys."""
        p, results = self.problem, self.results
        statistics = self._statistics()
        for own in self._turns(keys, row_bytes(p, p.kv_heads)):
            at = self.key_positions[own]
            given, numbers = [self.k[:, own]] + [self.v[:, own]] * (not p.shared_kv), self.biases and self.biases.keys
            turn = _Turn(self.peers, at, given + ([] if numbers is None else [numbers[..., own].swapaxes(1, 2)]))
            k, *rest = turn.arrays
            numbers = None if numbers is None else rest.pop().swapaxes(1, 2)
            (v,) = rest or (k[..., : p.value_dim],)
            sums = [] if self.biases is None else self.biases.key_sums(turn.at)
            dk, dv = self._gradients(turn.at, k, v, statistics, numbers, sums)
            if sums:
                self.biases.compare_keys(self.errors["dkey_bias"], sums, own, turn.own)
            if p.shared_kv:
                dk[..., : p.value_dim] += dv
            for name, expected in (("dk", dk), ("dv", dv)):
                if name in self.errors:
                    self.errors[name].compare(at, results[name][:, own], expected[:, turn.own])

    def _statistics(self):
        """lse and delta of all of this rank's queries, float64 (2, batch, heads, tokens)."""
        out, lse = self.results["out"], self.results["lse"]
        statistics = np.empty((2, *lse.shape)) if self.exact is None else self.exact
        for rows in self._row_steps():
            if self.exact is None:
                delta = _delta(self.dout[:, rows], out[:, rows], self.dlse[..., rows])
                statistics[..., rows] = lse[..., rows], delta
            with np.errstate(all="ignore"):
                sizes = np.square(self.dout[:, rows].astype(np.float64) * out[:, rows]).sum(axis=3)
            self.change = max(self.change, largest(np.sqrt(sizes)))
        return statistics

    def _row_steps(self):
        return steps(len(self.positions), row_bytes(self.problem, self.problem.heads))

    def _gradients(self, at, k, v, statistics, numbers, sums):
        """float64 dk and dv, over all queries, of keys of all ranks.

        numbers: these keys' biases, or None.  sums: `Sums` of these pairs.
        """
        dk, dv = np.zeros(k.shape), np.zeros(v.shape)
        turns = self.biases and self.biases.turns(len(at), len(self.positions))
        for step in (turns or self._row_steps()) if len(at) else []:
            options = self.options
            if self.biases is not None:
                options = options | {"biases": self.biases.of_keys(self.positions[step], at, numbers)}
            begin, end = reference.bounds(self.positions[step], self.problem.batch, **self.masks)
            seeing = ((begin <= at[-1]) & (end > at[0]) & (begin < end)).any(axis=0)
            rows = np.arange(step.start, step.stop)[seeing]
            if len(rows):
                given = self.dout[:, rows], self.q[:, rows], k, v, *statistics[..., rows]
                where = {"positions": self.positions[rows], "keys": at, "sums": sums}
                _, of_k, of_v = reference.gradients(*given, **where, of="kv", **options)
                dk += of_k
                dv += of_v
        self.peers.reduce(dk, MPI.SUM)
        self.peers.reduce(dv, MPI.SUM)
        return dk, dv

    def sinks(self):
        """Compare dsinks: a sum over all queries, with lse and out of the run itself."""
        sums, scores = np.zeros((2, self.problem.heads)), self.sink_scores.astype(np.float64)[:, None]
        out, lse = self.results["out"], self.results["lse"]
        for rows in self._row_steps():
            with np.errstate(all="ignore"):
                row = lse[..., rows].astype(np.float64)
                weight = np.where(scores == -np.inf, 0, np.exp(scores - np.where(row == -np.inf, 0, row)))
                delta = _delta(self.dout[:, rows], out[:, rows], self.dlse[..., rows])
                terms = _delta(np.abs(self.dout[:, rows]), np.abs(out[:, rows]), -np.abs(self.dlse[..., rows]))
                sums += -(weight * delta).sum(axis=(0, 2)), (weight * terms).sum(axis=(0, 2))
        self.peers.reduce(sums, MPI.SUM)
        self.terms = largest(sums[1])
        heads = np.arange(self.problem.heads)
        self.errors["dsinks"].compare(heads, self.results["dsinks"][None], sums[:1])
        self._count("dsinks", self.problem.heads)

    def concluded(self):
        """The ranks' errors as a Verification."""
        p, names = self.problem, list(self.errors)
        sizes = np.array([error.magnitude for error in self.errors.values()])
        dout = np.zeros(0) if self.dout is None else self.dout
        of_inputs = np.array([self.change, *map(largest, (self.q, self.k, self.v, dout))])
        self.peers.reduce(sizes, MPI.MAX)
        self.peers.reduce(of_inputs, MPI.MAX)
        size = dict(zip(names, sizes.tolist()))
        change, q_size, k_size, v_size, dout_size = of_inputs.tolist()
        lse_size = size["lse"]
        # Where the terms of a sum cancel, their rounding remains: a part of their size is what counts.  Of dq, dk and
        # dsinks so does, through delta, the error of out.
        change = max(change, OF_TERMS * dout_size * v_size * p.value_dim**0.5)
        least = {
            "out": OF_TERMS * v_size,
            "lse": 1.0,
            "dq": abs(p.scale) * k_size * change,
            "dk": abs(p.scale) * q_size * change,
            "dv": OF_TERMS * dout_size * max(1, p.seqlen / max(p.seqlen_k, 1)),
            "dsinks": self.terms,
        }
        if p.shared_kv:
            least["dk"] += least["dv"]
        if self.biases is not None:
            for name, of_name in self.biases.floors.items():
                self.peers.reduce(of_name, MPI.MAX)
                terms, weights = of_name.tolist()
                least[name] = max(terms, change * weights)
        of_gradients = gradient_tolerance(p, lse_size)
        tolerances = {"out": out_tolerance(p, lse_size), "lse": ACCUMULATION[p.dtype]}
        compared = []
        of_ranks = self.peers.allgather([(e.error, e.differing, e.at, e.checked) for e in self.errors.values()])
        for number, name in enumerate(names):
            errors, differing, places, checked = zip(*(rank[number] for rank in of_ranks))
            rank = max(range(len(errors)), key=lambda rank: (differing[rank] > 0, errors[rank]))
            absolute = rounding_error(p, 1)[1] if name in ("out", "dq", "dk", "dv") else 0
            off = max(0.0, max(errors) - absolute) / (max(size[name], least.get(name, 0.0)) or 1)
            where = (rank, places[rank]) if places[rank] >= 0 else (-1, -1)
            tolerance = tolerances.get(name, of_gradients)
            compared.append(Compared(name, sum(checked), self.errors[name].of, off, tolerance, sum(differing), *where))
        faint = self._faint(self.results["lse"]).any(axis=1).sum()
        return Verification(tuple(compared), sum(self.peers.allgather(int(faint))))

    def _faint(self, lse):
        """Which rows of an lse have only keys that biases hide, but finite ones."""
        hides = self.biases is not None and self.biases.hides
        return np.isfinite(lse) & (lse < FAINT) & hides
