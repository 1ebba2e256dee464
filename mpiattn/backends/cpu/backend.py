"""The back end `cpu`: blocks by compiled kernels (kernels/cpu), on NumPy arrays; a launch is complete when it returns.

It accumulates in float32, or in float64 for float64.  Decoding and what is done to partials is NumPy's.
"""

import numpy as np

from ..kept import Kept
from ..numpy.backend import NumpyBackend
from . import library
from .library import Array, Launch, Poll

LINE = 64  # bytes of a cache line, by which scratch memory is aligned
MOST_THREADS = 256  # of kernels/cpu/work.h
MANY = 2**20  # tokens of a launch whose scratch memory does not grow with more


class CpuBackend(NumpyBackend):
    """The protocol of `mpiattn.backends.base`, with `attend` and `attend_backward` compiled."""

    name = "cpu"

    def __init__(self):
        super().__init__()
        self._kernels = library.Kernels()
        self._scratch = Kept(np.empty)
        self.threads = min(library.threads(), MOST_THREADS)
        self.version = self._kernels.version

    @classmethod
    def missing(cls):
        return library.missing()

    def scratch_bytes(self, head_dim, value_dim, dtype, backward=False):
        launch = Launch(
            element=library.ELEMENTS[str(dtype)],
            groups=1,
            heads=1,
            kv_heads=1,
            head_dim=head_dim,
            value_dim=value_dim,
            threads=self.threads,
            tokens=MANY,
            keys=MANY,
        )
        return (
            self._kernels.scratch_bytes(launch, backward)
            + LINE
            + super().scratch_bytes(head_dim, value_dim, dtype, backward)
        )

    def attend(self, q, k, v, begin, end, out, lse, scale, softcap=None, after=(), meanwhile=None):
        self._run({"q": q, "k": k, "v": v}, {"out": out, "lse": lse}, begin, end, scale, softcap, False, meanwhile)

    def attend_backward(
        self, q, dout, lse, delta, k, v, begin, end, dq, dk, dv, scale, softcap=None, after=(), meanwhile=None
    ):
        self._run(
            {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta},
            {"dq": dq, "dk": dk, "dv": dv},
            begin,
            end,
            scale,
            softcap,
            True,
            meanwhile,
        )

    def _run(self, inputs, results, begin, end, scale, softcap, backward, meanwhile):
        """Run a block: inputs and results by their names in `Launch`."""
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        if not (len(q) and len(k)):
            return
        inputs = {name: _rows(array) for name, array in inputs.items()}
        into = {name: _rows(array) for name, array in results.items()}
        begin, end = (np.ascontiguousarray(bound, np.int32) for bound in (begin, end))
        launch = Launch(
            element=library.ELEMENTS[q.dtype.name],
            groups=len(begin),
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[2],
            value_dim=v.shape[2],
            threads=self.threads,
            tokens=len(q),
            keys=len(k),
            scale=scale,
            softcap=softcap or 0,
            begin=begin.ctypes.data,
            end=end.ctypes.data,
            **{name: Array(array.ctypes.data, *array.strides[:2]) for name, array in {**inputs, **into}.items()},
        )
        needed = self._kernels.scratch_bytes(launch, backward) + LINE
        scratch = self._scratch("scratch", (needed,), "uint8")
        launch.scratch = -(-scratch.ctypes.data // LINE) * LINE
        if meanwhile:
            meanwhile(0.0)
        polled = _Polled(meanwhile)
        launch.poll = Poll(polled) if meanwhile else Poll()
        self._kernels.run(launch, backward)
        polled.raise_failure()
        for name, array in results.items():
            if into[name] is not array:
                array[...] = into[name]

    def close(self):
        super().close()
        self._scratch.clear()


class _Polled:
    """`meanwhile` as kernels call it.  What it raises cannot pass through them: it stops them, and is raised after."""

    def __init__(self, meanwhile):
        self._meanwhile, self._failure = meanwhile, None

    def __call__(self, share):
        try:
            self._meanwhile(share)
        except BaseException as failure:
            self._failure = failure
        return self._failure is not None

    def raise_failure(self):
        if self._failure is not None:
            raise self._failure


def _rows(array):
    """The array, or a contiguous copy if the numbers of a row do not lie one after another in memory."""
    return array if array.ndim < 3 or array.strides[2] == array.itemsize else np.ascontiguousarray(array)
