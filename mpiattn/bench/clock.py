"""Times launches of a back end: with events on its stream if it has one, else with the host's clock."""

import ctypes
import time
from functools import partial

import numpy as np

from ..arguments.arrays import on_host
from ..system import host

SIDE = 1536  # rows and columns of the matrices of `HostClock.product`


def host_array(backend, array, event=None):
    """An array of a back end as a NumPy array, after an event."""
    backend.wait(event)
    return on_host(array)


class HostClock:
    """Times launches that the host waits for."""

    on_gpu = False

    def __init__(self, backend):
        self.backend = backend

    @property
    def device(self):
        """Name of the processor that computes."""
        return host.processor()

    def seconds(self, launch, before=None, times=1):
        """Seconds per call of launch(), which returns an event, over `times` calls.

        before: called before each, and not timed.
        """
        total = 0.0
        for _ in range(times):
            if before:
                self.backend.wait(before())
            start = time.perf_counter()
            self.backend.wait(launch())
            total += time.perf_counter() - start
        return total / times

    def memory_bandwidth(self, nbytes, dtype):
        """A read of memory by one thread, as (its name, a function that does it once, the bytes that it moves)."""
        return "C's memchr", reading(nbytes), nbytes

    def product(self):
        """A float32 matrix product by NumPy's BLAS, as (its name, a function that does it once, its operations)."""
        a, b, c = np.ones((3, SIDE, SIDE), np.float32)

        def multiply():
            np.matmul(a, b, out=c)

        return f"float32 product by {host.blas()[0] or 'BLAS'}", multiply, 2 * SIDE**3


class StreamClock(HostClock):
    """Times launches on a GPU's stream with CuPy's events."""

    on_gpu = True

    def __init__(self, backend):
        import cupy

        super().__init__(backend)
        self.cupy, self.stream = cupy, backend.stream

    @property
    def device(self):
        """The GPU and its driver."""
        runtime = self.cupy.cuda.runtime
        name = runtime.getDeviceProperties(self.backend.device)["name"]
        return f"{name.decode()}, CUDA {runtime.runtimeGetVersion()}, driver's CUDA {runtime.driverGetVersion()}"

    def seconds(self, launch, before=None, times=1):
        """As in HostClock; without `before`, launches follow each other, and the gaps between them count."""
        pairs, each = [], times if before else 1
        for _ in range(each):
            if before:
                before()
            start, stop = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            self.stream.record(start)
            for _ in range(times // each):
                launch()
            self.stream.record(stop)
            pairs.append((start, stop))
        stop.synchronize()
        return sum(self.cupy.cuda.get_elapsed_time(*pair) for pair in pairs) / times / 1e3

    def memory_bandwidth(self, nbytes, dtype):
        """As in HostClock, with a copy of half as many bytes, which reads and writes each."""
        of, to = (self.backend.empty((max(1, nbytes // 8),), "float32") for _ in range(2))
        self.backend.zero((of, to))
        runtime = self.cupy.cuda.runtime

        def copy():
            runtime.memcpyAsync(to.data.ptr, of.data.ptr, of.nbytes, runtime.memcpyDeviceToDevice, self.stream.ptr)

        return "a copy", copy, of.nbytes + to.nbytes

    def product(self):
        """None: the host's BLAS is no limit of a GPU."""
        return None


def clock_of(backend):
    """The clock for a back end."""
    return StreamClock(backend) if hasattr(backend, "stream") else HostClock(backend)


def reading(nbytes):
    """A function that reads so many bytes once, as fast as C reads memory: it looks for a byte that is not there."""
    data = np.full(nbytes, 2, np.uint8)
    find = ctypes.CDLL(None).memchr
    find.argtypes, find.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    return partial(find, data.ctypes.data_as(ctypes.c_void_p), 1, nbytes)


def plain_sum(arrays):
    """A function that sums arrays, which is limited by memory bandwidth; 16-bit types are read as float32."""
    parts = [array.reshape(-1).view(np.uint8) for array in arrays]
    kind = np.float64 if arrays[0].dtype == np.float64 else np.float32
    parts = [part[: part.size // 8 * 8].view(kind) for part in parts]

    def run():
        for part in parts:
            on_host(part.sum())

    return run
