"""KV caches as HDF5 files, which any number of ranks can load.

A file holds k and v (1, tokens, kv_heads, dim), with the sequences one after another in natural token order, and
cu_seqlens, the boundaries of the sequences.  Where keys hold the values it has no v, and an attribute value_dim.
`mpiattn run` reads such a file as packed documents.  In a file without cu_seqlens every batch entry is a sequence.
"""

from functools import partial
from itertools import pairwise

import h5py
import numpy as np

from ..arguments.arrays import on_host
from ..arguments.keywords import names_of_arguments, unknown
from ..comm.agreement import agreement
from ..errors import ArgumentError, FileError
from ..files.attributes import dim_of
from ..files.hdf5 import AXES, check_is_file, dataset_of, file_errors, natural
from ..files.hdf5 import write as write_at
from ..files.input import Input, Wanted
from ..files.numbers import Numbers
from ..files.output import Contents, Output, Written
from ..files.shapes import check_order, order_of
from ..problem.documents import left_out
from ..problem.problem import ITEMSIZE, dtype_name
from ..system.values import path_text, truth

# Bytes of a run of keys that a rank gets at a time, or of values if they are longer.  Longer runs are not read faster
# from a file.  A window of keys may have a run more on some ranks; decoding reads that in microseconds.
RUN_BYTES = 2**16


def read_cache_shapes(path, axes=None, argument="path", padding=False):
    """What a file fixes, and the order of its dimensions.

    That is a dict of kv_heads, head_dim, value_dim, shared_kv, dtype, spans and padding.  spans has (batch entry, first
    token, number of tokens) of every sequence; padding is the number of tokens in none.
    axes: as of `mpiattn.files.shapes.read_shapes`.  padding: whether there may be any.
    Raises FileError if the file is not a valid cache.
    """
    truth("padding", padding)
    if axes not in (None, *AXES):
        raise ArgumentError(f"axes is {axes!r}; it may be {', '.join(AXES)}")

    def no(why):
        return FileError(f"{argument} is {str(path)!r}; {why}")

    check_is_file(argument, path)
    with file_errors(argument, path, "read"), h5py.File(path, "r") as file:
        shared = "value_dim" in file.attrs and dataset_of(file, "v") is None
        order = order_of(file, argument, axes)
        datasets = [Numbers.of(file, name) for name in ("k", "k" if shared else "v")]
        for name, dataset in zip("kv", datasets):
            if dataset is None:
                raise no(f"it has no dataset {name!r}, it must have k and v, or k and an attribute value_dim")
        k, v = (natural(dataset.shape, order or AXES[0]) for dataset in datasets)
        if not (len(k) == len(v) == 4 and k[:3] == v[:3]):
            sizes = ", ".join(natural(("batch", "tokens", "kv_heads", "dim"), order or AXES[0]))
            shapes = "k {}, v {}".format(*(dataset.shape for dataset in datasets))
            raise no(f"its shapes do not fit: {shapes}; they must be ({sizes})")
        names = [dataset.dtype for dataset in datasets]
        if len(set(names)) > 1 or names[0] not in ITEMSIZE:
            raise no(
                f"its k and v have dtypes {', '.join(names)}; they must have one and the same of {', '.join(ITEMSIZE)}"
            )
        dtype_name(names[0])  # registers bfloat16 with NumPy
        if order is None:
            check_order(argument, path, None, k)
        batch, tokens = k[:2]
        spans = [(entry, 0, tokens) for entry in range(batch)]
        cu_seqlens = Numbers.of(file, "cu_seqlens")
        if cu_seqlens is not None:
            cuts = np.atleast_2d(cu_seqlens.whole())
            if (
                cuts.ndim != 2
                or cuts.dtype.kind not in "iu"
                or len(cuts) not in (1, batch)
                or cuts.shape[1] < 2
                or (cuts[:, 1:] < cuts[:, :-1]).any()  # differences of unsigned numbers are never negative
                or cuts.min() < 0
                or cuts.max() > tokens
            ):
                raise no(
                    f"its cu_seqlens is {np.array2string(cuts, threshold=9)}; it must be two or more "
                    f"positions from 0 to {tokens} that never decrease, one row for all {batch} batch entries or "
                    "one for each"
                )
            wrong = "" if padding else next(filter(None, (left_out("cu_seqlens", row, tokens) for row in cuts)), "")
            if wrong:
                raise no(f"its {wrong}")
            spans = [
                (entry, start, stop - start)
                for entry in range(batch)
                for start, stop in pairwise(cuts[entry % len(cuts)].tolist())
            ]
        fixed = {
            "kv_heads": k[2],
            "head_dim": k[3],
            "value_dim": dim_of(file, "value_dim", argument, path, k[3]) if shared else v[3],
            "shared_kv": shared,
            "dtype": names[0],
            "spans": spans,
            "padding": batch * tokens - sum(length for *_, length in spans),
        }
        return fixed, order or AXES[0]


def save(cache, path, call):
    """Write a cache to a file, which appears whole or not at all; collective.

    call: this collective call, a `mpiattn.comm.collective_calls.Call`.
    """
    with call.agreement() as same:
        same["path"] = path_text("path", path)
    peers, total = cache.combiner.peers, sum(cache.lengths)
    starts = np.cumsum([0, *cache.lengths])
    shapes = {name: ((1, total, cache.kv_heads, dim), cache.dtype) for name, dim in zip("kv", cache.dims)}
    attributes = {"page_size": cache.page_size, "axes": AXES[0]}
    if cache.shared_kv:
        attributes["value_dim"] = cache.value_dim
    output = Output(
        peers,
        path,
        {"": Contents({**shapes, "cu_seqlens": ((len(starts),), "int64")}, attributes)},
        max_message=cache.combiner.exchange.max_message,
        argument="path",
    )
    try:
        output.write_each(_chunks(cache, starts))
        with agreement(peers), file_errors("path", path, "written"):
            if output.file is not None:
                write_at(output.file["cu_seqlens"], (0,), starts.astype(np.int64))
        output.commit()
    finally:
        output.abandon()  # no effect after commit


def _chunks(cache, starts):
    """This rank's tokens of every sequence, for a file in which sequences begin at `starts`."""
    for sequence, (start, ledger) in enumerate(zip(starts.tolist(), cache.storage.ledgers)):
        chunks = cache.storage.places(sequence) or cache.local(sequence)
        for name, chunk in zip("kv"[: len(cache.dims)], map(on_host, chunks)):
            yield Written(name, chunk[None], ledger, first=start)


def load(make, comm, path, options, argument="path", progress=None, axes=None, padding=False, missing="error"):
    """A cache with a file's sequences, constructed by make(comm, **options); collective.  See `mpiattn.KVCache.load`.

    progress: called with the number of tokens that this rank has just read.  axes, padding: as of
    `read_cache_shapes`.  missing: as of `mpiattn.files.input.Input`.
    """
    from ..comm.mesh import Home
    from ..comm.peers import time_limit

    home = Home.enter(comm, time_limit(options.get("timeout")))
    try:
        peers = home.peers(time_limit(options.get("timeout")))
        with home.call("loading a cache"):
            source = Input(
                peers,
                path,
                look=partial(read_cache_shapes, argument=argument, padding=padding),
                argument=argument,
                axes=axes,
                call="loading a cache",
                missing=missing,
            )
        try:
            return _fill(make, comm, home, source, options, progress)
        finally:
            source.close()
    finally:
        home.leave()


def _fill(make, comm, home, source, options, progress):
    spans = source.shapes["spans"]
    fixed = {name: value for name, value in source.shapes.items() if name not in ("spans", "padding")}
    given = sorted(set(options) & {*fixed, "sequences"})
    with home.call("loading a cache"), agreement(source.peers):
        wrong = unknown("KVCache.load", set(options) - set(given), names_of_arguments("KVCache"))
        if wrong:
            raise wrong
        if given:
            raise ArgumentError(f"{', '.join(given)} is given; the file fixes it")
        if not spans:
            raise ArgumentError("the file holds no sequence; it must hold one at least")
    total = sum(length for _, _, length in spans)
    cache = make(comm, **{"capacity": max(total, 1), "sequences": len(spans), **fixed, **options})
    try:
        with cache.call("load"):
            every, storage = slice(None), cache.storage
            run = max(1, RUN_BYTES // (cache.kv_heads * max(cache.dims) * ITEMSIZE[cache.dtype]))
            storage.ledgers.deal_runs(np.array([length for _, _, length in spans]), run)
            storage.take_pages(every, storage.ledgers.counts, spread=True)
            names = "kv"[: len(storage.pools)]
            wanted = [
                [
                    Wanted(name, ledger, entry, first, place if place is None else place[None])
                    for name, place in zip(names, storage.places(sequence) or (None, None))
                ]
                for sequence, (ledger, (entry, first, _)) in enumerate(zip(storage.ledgers, spans))
            ]
            if all(some.into is not None for of_sequence in wanted for some in of_sequence):
                source.chunks([some for of_sequence in wanted for some in of_sequence], progress)
                return cache
            for sequence, of_sequence in enumerate(wanted):  # on a GPU: a copy in host memory of one at a time
                chunks = source.chunks(of_sequence, progress)
                before = np.zeros(1, np.int64), np.zeros((1, cache.ranks), np.int64)
                storage.store(np.array([sequence]), before, chunks, local=True)
        return cache
    except BaseException:
        cache.close()
        raise
