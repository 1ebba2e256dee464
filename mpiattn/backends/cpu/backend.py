"""The back end `cpu`: compiled kernels (kernels/cpu) on NumPy arrays; a launch is complete when it returns.

It accumulates in float32, or in float64 for float64.  Launches that only move or add numbers are NumPy's, except those
that make halves of them.
"""

import ctypes
import math
import operator
from functools import cache

import numpy as np

from ...errors import ArgumentError
from ..numpy.backend import NumpyBackend
from ..pages import Tables
from . import choice, library
from .library import Launch, Poll
from .speeds import assumed

LINE = 64  # bytes of a cache line, by which memory is aligned: a vector that lies in two lines is read twice
ALIGNED = 4096  # bytes of an array whose memory is
MOST_THREADS = 256  # of kernels/cpu/work.h
HALVES = ("float16", "bfloat16")
SCATTERED = 12288  # bytes from which on a copy to pages takes less time than NumPy's
MANY = 2**20  # tokens of a launch whose scratch memory does not grow with more
TAKES = "q", "k", "v", "begin", "end", "scale", "softcap", "pages", "page_size", "bias", "dropout"  # fields of a block
_taken = operator.attrgetter(*TAKES)
_addressof, _from_buffer = ctypes.addressof, ctypes.c_char.from_buffer  # each launch asks for many addresses


class CpuBackend(NumpyBackend):
    """The protocol of `mpiattn.backends.base`, with attention and what is done to its partials compiled."""

    strided = takes_lists = True
    takes = TAKES

    def __init__(self, name="cpu"):
        super().__init__()
        self.name = name
        self._kernels = library.Kernels(choice.chosen())
        self._scratch = np.empty(0, np.uint8)
        self.threads = self.parse(name) if ":" in name else min(library.threads(), MOST_THREADS)
        self.version = self._kernels.version
        self.assumed_machine = assumed(self._kernels.name, self.threads)

    @staticmethod
    def parse(name):
        """The threads of a rank in a name like "cpu:4"."""
        threads = name.split(":", 1)[1]
        if not (threads.isascii() and threads.isdigit() and 1 <= int(threads) <= MOST_THREADS):
            raise ArgumentError(f"backend is {name!r}; write cpu:THREADS, with 1 to {MOST_THREADS} threads")
        return int(threads)

    @classmethod
    def missing(cls):
        return choice.missing()

    def scratch_bytes(self, head_dim, value_dim, dtype, backward=False, shared_kv=False, lists=False):
        launches = [
            Launch(
                element=library.ELEMENTS[str(dtype)],
                lists=count,
                groups=1,
                heads=1,
                kv_heads=1,
                head_dim=head_dim,
                value_dim=value_dim,
                threads=self.threads,
                tokens=MANY,
                keys=MANY,
            )
            for count in ((1, 2) if lists else (1,))  # blocks with one list are launched too
        ]
        return (
            max(self._kernels.scratch_bytes(launch, "backward" if backward else "forward") for launch in launches)
            + LINE
            + super().scratch_bytes(head_dim, value_dim, dtype, backward, shared_kv)
        )

    def empty(self, shape, dtype):
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes < ALIGNED:
            return super().empty(shape, dtype)
        memory = np.empty(nbytes + LINE, np.uint8)
        start = -_address(memory) % LINE
        return memory[start : start + nbytes].view(dtype).reshape(shape)

    def accumulates(self, array):
        return array.flags.aligned and (not array.size or array.strides[-1] == array.itemsize)

    def attend(self, block, out, lse, after=(), meanwhile=None):
        if len(block.q) and len(block.k):
            self._run_block("forward", block, {}, {"out": out, "lse": lse}, meanwhile)

    def attend_backward(self, block, given, grads, after=(), meanwhile=None):
        if len(block.q) and len(block.k):
            (dout, lse, delta), (dq, dk, dv, dbias) = given, grads
            inputs = {"dout": dout, "lse": lse, "delta": delta}
            results = {"dq": dq, "dk": dk, "dv": _values(dv, dk, dout)}
            self._run_block("backward", block, inputs, results, meanwhile, dbias)

    def attend_pages(self, block, out, lse, after=(), meanwhile=None):
        if len(block.q):
            self._run_block("decode", block, {}, {"out": out, "lse": lse}, meanwhile)

    def _run_block(self, operation, block, inputs, results, meanwhile, dbias=None):
        """Run a launch on a block.  inputs, results: what else the operation has, as for `_run`."""
        # All that it takes are named, so that one more is missed here, where they become fields of `Launch`.
        q, k, v, begin, end, scale, softcap, pages, page_size, bias, dropout = _taken(block)
        begin, end = np.ascontiguousarray(begin, np.int32), np.ascontiguousarray(end, np.int32)
        v = _values(v, k, inputs.get("dout", results.get("out")))
        if pages is None:
            lists, groups = begin.shape[-1] if begin.ndim == 3 else 1, len(begin)
            numbers = {"lists": lists, "groups": groups, "kv_heads": _heads(k), "keys": len(k)}
        else:
            k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
            pages, tables = Tables.of(pages).joined
            numbers = {
                "kv_heads": k.shape[1],
                "sequences": len(tables) - 1,
                "page_size": page_size,
                "pages": _address(pages),
                "tables": _address(tables),
            }
        if bias is not None:
            numbers |= _of_pairs(bias, dbias, q) if pages is None else {"bias": _pairs(bias, *bias.strides[:2], 0)}
            numbers["bias_element"] = _element(bias.dtype)
        if dropout is not None:
            # Kept, since the launch has but their addresses.
            positions = [np.ascontiguousarray(each, np.int32) for each in dropout[2:]]
            numbers["dropout"] = library.Dropout(*map(_address, positions), dropout.seed, dropout.threshold)
        self._run(
            operation,
            q,
            v,
            {"q": q, "k": k, "v": v} | inputs,
            results,
            meanwhile,
            scale=scale,
            softcap=softcap or 0,
            begin=_address(begin),
            end=_address(end),
            **numbers,
        )

    def merge(self, out, lse, out_b, lse_b, after=()):
        if not out.dtype == lse.dtype == out_b.dtype == lse_b.dtype:
            super().merge(out, lse, out_b, lse_b)
        else:
            self._run("merge", out, out, {"other": out_b, "other_lse": lse_b}, {"out": out, "lse": lse})

    def sink(self, out, lse, sinks):
        if not out.dtype == lse.dtype == sinks.dtype:
            rows = out.shape[:-1]
            super().sink(out, lse.reshape(rows), sinks.reshape(rows[1:]))
        else:
            self._run("sink", out, out, {"other_lse": np.broadcast_to(sinks, lse.shape)}, {"out": out, "lse": lse})

    def delta(self, delta, dout, out, dlse):
        partial = "float64" if dout.dtype == "float64" else "float32"
        if dout.dtype != out.dtype or any(array.dtype != partial for array in (delta, dlse) if array is not None):
            rows = out.shape[:-1]
            super().delta(delta.reshape(rows), dout, out, dlse if dlse is None else dlse.reshape(rows))
        else:
            self._run(
                "delta",
                dout,
                dout,
                {"dout": dout, "out": out} | ({} if dlse is None else {"other_lse": dlse}),
                {"delta": delta},
            )

    def copy(self, dst, src, after=()):
        halves = dst.itemsize == 2 and str(dst.dtype) in HALVES
        if not halves or src.dtype != np.float32 or src.shape != dst.shape or dst.ndim < 3:
            super().copy(dst, src)
        elif dst.flags.c_contiguous and src.flags.c_contiguous:  # the heads of a token are one long row
            rows = math.prod(dst.shape[:-2]), 1, math.prod(dst.shape[-2:])
            self._narrow(dst.reshape(rows), src.reshape(rows))
        elif dst.ndim == 3:
            self._narrow(dst, src)
        else:
            for entries in zip(dst, src):
                self.copy(*entries)

    def _narrow(self, dst, src):
        self._run("narrow", dst, dst, {"other": src}, {"out": dst})

    def scatter(self, pool, slots, src, entries, tokens):
        entry, token, head, number = src.strides
        pool_head, row, _ = pool.strides
        if len(slots) * len(pool) * row < SCATTERED or number != src.itemsize:
            super().scatter(pool, slots, src, entries, tokens)
            return
        same = isinstance(tokens, int)
        self._kernels.scatter(
            _address(pool),
            pool_head,
            row,
            _address(slots),
            _address(src) + (tokens * token if same else 0),
            entry,
            token,
            head,
            _address(entries),
            None if same else _address(tokens),
            len(slots),
            len(pool),
        )

    def _run(self, operation, q, v, inputs, results, meanwhile=None, **numbers):
        """Run a launch on arrays by their names in `Launch`.

        q: has its inputs' dtype, its tokens, heads and head dim.  v: has its value dim.  numbers: what else it takes.
        An array may also be (tokens, batch, heads, dim) with any strides, see `strided`.
        """
        launch = Launch(
            element=_element(q.dtype),
            tokens=len(q),
            heads=_heads(q),
            head_dim=q.shape[-1],
            value_dim=v.shape[-1],
            threads=self.threads,
            **numbers,
        )
        copies = {}
        for name, array in (inputs | results).items():
            strides = array.strides
            if len(strides) > 2 and strides[-1] != array.itemsize:  # a row's numbers do not lie one after another
                array = copies[name] = np.ascontiguousarray(array)
                strides = array.strides
            place = getattr(launch, name)
            place.data, place.token = _address(array), strides[0]
            if len(strides) == 4:
                launch.sequences = array.shape[1]
                place.head, place.sequence = strides[2], strides[1] - array.shape[2] * strides[2]
            else:
                place.head = strides[1]
        needed = self._kernels.scratch_bytes(launch, operation)
        if needed > len(self._scratch):
            self._scratch = self.empty((max(needed, ALIGNED),), np.uint8)
        launch.scratch = _address(self._scratch)
        failures = []
        if meanwhile:
            meanwhile(0.0)
            launch.poll = Poll(_polled(meanwhile, failures))
        self._kernels.run(launch, operation)
        if failures:
            raise failures.pop()
        for name, copy in copies.items():
            if name in results:
                results[name][...] = copy

    def close(self):
        super().close()
        self._scratch = np.empty(0, np.uint8)  # the next launch makes it again


def _values(v, k, out):
    """v, or where it is None the first columns of k, as many as out has.

    Kernels read them like any values, and add dv to them like to any dv: it is added to a row after its dk.
    """
    return k[..., : out.shape[-1]] if v is None else v


def _pairs(array, token, head, sequence):
    """A bias or its gradient as a launch has it, by the strides of its tokens, heads and sequences."""
    return library.Array(_address(array), token, head, sequence)


def _of_pairs(bias, dbias, q):
    """The fields of a launch that describe a bias and its gradient, or None, and the sequences of the batch."""
    heads, given = _heads(q), [array for array in (bias, dbias) if array is not None]
    # where one has a single head or sequence for all, the other may have more
    sequences = max(heads // array.shape[1] if array.shape[1] > 1 else array.shape[0] for array in given)
    fields = {"sequences": sequences}
    for name, array in (("bias", bias), ("dbias", dbias)):
        if array is not None:
            strides = (0 if length == 1 else stride for length, stride in zip(array.shape, array.strides[:3]))
            sequence, head, token = strides
            fields[name] = _pairs(array, token, head, sequence - heads // sequences * head)
    return fields


def _heads(array):
    """Heads of (tokens, heads, dim), or of all sequences of (tokens, batch, heads, dim)."""
    return math.prod(array.shape[1:-1])


def _address(array):
    """Where an array lies in memory."""
    try:
        return _addressof(_from_buffer(array))
    except (TypeError, ValueError):  # read-only, strided, empty, or of a dtype that buffers do not know: takes longer
        return array.ctypes.data


@cache
def _element(dtype):
    """The element of launches whose inputs have a dtype."""
    return library.ELEMENTS[dtype.name]


def _polled(meanwhile, failures):
    """`meanwhile` as kernels call it.  What it raises cannot pass through them: it stops them, and is in `failures`.

    So is what a signal's handler raises, Ctrl-C's above all.  Python runs handlers where a function begins, outside
    any `try` of the function; where a generator goes on, it is inside one.
    """

    def polled():
        while True:
            try:
                while True:
                    share = yield bool(failures)
                    if not failures:
                        meanwhile(share)
            except GeneratorExit:  # no more calls
                return
            except BaseException as failure:
                failures.append(failure)

    started = polled()
    next(started)
    return started.send
