"""The CUDA back end: it launches the kernels on a GPU through CuPy.

Launches go to one stream, copies to the wire to a second and copies from the wire to a third; only events order the
three.  A library call starts after the work queued on the caller's current stream, and that stream continues after it.

Memory: CuPy's pool reuses freed memory at once for the next allocation on the same stream.  So work arrays are
allocated on the stream of the launches, and an array being copied is held until launches are ordered after the copy.
Results are allocated on the caller's stream, where the caller uses and frees them.
"""

import os
from contextlib import contextmanager, suppress
from functools import wraps

import numpy as np

from ...errors import ArgumentError, MpiattnError
from ...model.machine import H100
from ..wire import WireBytes
from . import kernel_source
from .arrays import as_cupy, missing
from .kernels import KernelLaunches
from .pinned import PinnedBlocks

PIECE = 4 * 2**20  # maximum bytes of a staged message
CAPABILITY = 80  # the minimum compute capability that the kernels are compiled for
STATIC_SHARED = 48 * 1024  # bytes of shared memory that a kernel may use without an explicit request
ALIGNMENT = 16  # bytes; of arrays that kernels read by asynchronous copies
NOT_READY = 600  # cudaErrorNotReady


_dealt: list[int] = []  # the GPUs that were chosen for this process; empty before the first choice


def choose_device(cupy, local_rank):
    """The number of this rank's GPU, among those in CUDA_VISIBLE_DEVICES; it becomes the current one.

    The current GPU is kept if it is not GPU 0, or if this process has chosen a GPU before.  Else the choice is
    local_rank, the rank's number on its node, modulo the number of GPUs.
    """
    runtime = cupy.cuda.runtime
    device = runtime.getDevice()
    if not device and not _dealt:
        device = local_rank % runtime.getDeviceCount()
    stay_on(cupy, device)
    return device


def stay_on(cupy, device):
    """Make a GPU the current one, and the GPU of all back ends that this process creates later."""
    cupy.cuda.Device(device).use()
    _dealt.append(device)


class _CupyLaunches(KernelLaunches):
    """Launches on CuPy's current stream."""

    def _run(self, kernel, grid, *arguments):
        if 0 not in grid:
            function, threads = self._function(kernel)
            function(grid, threads, arguments, shared_mem=kernel.shared_bytes)

    def _function(self, kernel):
        """(function, block) of a kernel on this device.  CuPy caches by the source text, which includes all headers."""
        held = self._functions.get(id(kernel))  # by id: hashing all of a kernel takes longer than its launch
        if held is None:
            module = self.cupy.RawModule(
                code=kernel_source.expanded(kernel.file), options=("-std=c++17", *kernel.options())
            )
            function = module.get_function(kernel.name)
            if kernel.shared_bytes > STATIC_SHARED:
                function.max_dynamic_shared_size_bytes = kernel.shared_bytes
            held = self._functions[id(kernel)] = function, (kernel.threads,), kernel
        return held[:2]

    def clear(self, out, lse):
        out.fill(0)
        lse.fill(-np.inf)

    def zero(self, arrays):
        for array in arrays:
            array.fill(0)

    def take(self, dst, src, rows):
        as_bits = f"uint{8 * dst.itemsize}"  # elements are copied as bits, for any dtype
        self.cupy.take(src.view(as_bits), self.contiguous(rows), axis=0, out=dst.view(as_bits))

    def copy(self, dst, src):
        super().copy(dst, self.contiguous(src) if isinstance(src, np.ndarray) else src)

    def scatter(self, pool, slots, src, entries, tokens):
        for slot, entry, token in zip(slots.tolist(), entries.tolist(), np.broadcast_to(tokens, slots.shape).tolist()):
            _CupyLaunches.copy(self, pool[:, slot : slot + 1], src[entry, token : token + 1].swapaxes(0, 1))


def _launched(method):
    """Order a launch as the protocol requires: on the stream of the launches, after the events; returns its event."""

    @wraps(method)
    def launch(self, *args, after=(), **options):
        with self.cupy.cuda.Device(self.device), self.stream:  # as `_on` and `_event`, at half their cost
            _wait_for(self.stream, after)
            method(self, *args, **options)
            return self.stream.record(self.cupy.cuda.Event(disable_timing=True))

    return launch


def _wait_for(stream, events):
    for event in events:
        if event is not None:
            stream.wait_event(event)


class CudaBackend(_CupyLaunches):
    """The protocol of `mpiattn.backends.base` on one GPU.

    transport: "device" passes device arrays to MPI, except in collectives, because no MPI's nonblocking collectives
    reliably take device memory.  "staged" passes pinned host memory.  "auto" means "staged" here, where there is no
    MPI to ask.
    local_rank: see `choose_device`.

    stream: the stream of the launches.  device: the number of the GPU.  Raises ArgumentError if the GPU is too old.
    """

    name = "cuda"
    assumed_machine = H100
    emulated_flops = None
    strided = False
    sends_blocks = False
    dlse_on_all = False

    @classmethod
    def missing(cls):
        return missing()

    @classmethod
    def adopt(cls, arrays):
        import cupy

        arrays = {name: as_cupy(cupy, name, array) for name, array in arrays.items()}
        given = next((array for array in arrays.values() if isinstance(array, cupy.ndarray)), None)
        if given is not None:
            stay_on(cupy, given.device.id)
        return arrays

    def __init__(self, transport="auto", local_rank=0):
        super().__init__()
        import cupy

        self.cupy = cupy
        self.transport = "staged" if transport == "auto" else transport
        self.device = choose_device(self.cupy, local_rank)
        cuda, self._functions = self.cupy.cuda, {}
        device = cuda.Device(self.device)
        name = cuda.runtime.getDeviceProperties(self.device)["name"]
        self.version = name.decode() if isinstance(name, bytes) else name
        self.architecture = int(device.compute_capability)
        if self.architecture < CAPABILITY:
            raise ArgumentError(
                f"backend is {self.name!r}, but {self.version} has compute capability "
                f"{device.compute_capability}; the kernels need {CAPABILITY}"
            )
        self.processors = device.attributes["MultiProcessorCount"]
        with device:
            self.stream, self._out, self._in = (cuda.Stream(non_blocking=True) for _ in range(3))
        self._pinned = PinnedBlocks(self.cupy)
        self._leaving, self._arriving = {}, {}  # staging state by the array's id; it holds the array
        self._begun = self._event(self.stream)  # the start of the library call

    @contextmanager
    def _on(self, stream):
        with self.cupy.cuda.Device(self.device), stream:
            yield

    def _event(self, stream):
        with self.cupy.cuda.Device(self.device):  # another thread of the caller may have another current GPU
            return stream.record(self.cupy.cuda.Event(disable_timing=True))

    def _caller(self):
        """The current stream of the library's caller."""
        return self.cupy.cuda.get_current_stream(self.device)

    def idle(self):
        os.sched_yield()

    # Arrays

    @property
    def staged_bytes(self):
        """Bytes of pinned host memory that are allocated."""
        return self._pinned.nbytes

    def empty(self, shape, dtype):
        with self._on(self.stream):
            return self.cupy.empty(shape, np.dtype(dtype))

    def array(self, name, argument):
        with self.cupy.cuda.Device(self.device):
            array = as_cupy(self.cupy, name, argument)
        if not isinstance(array, np.ndarray) and array.size and array.device.id != self.device:
            raise ArgumentError(
                f"{name} is on GPU {array.device.id}; it must be on GPU {self.device}, the GPU of this rank (the one "
                "that was current when the plan was made, else the next of the node's)"
            )
        return array

    def writable(self, name, argument):
        array = self.array(name, argument)
        if isinstance(array, np.ndarray):
            raise ArgumentError(f"{name} is a NumPy array; it must be a CuPy array or another library's on the GPU")
        if getattr(argument, "__cuda_array_interface__", {"data": (0, False)})["data"][1]:
            raise ArgumentError(f"{name} is read-only; it must be an array that can be written to")
        return array

    def result(self, shape, dtype):
        with self._on(self._caller()):
            return self.cupy.empty(shape, np.dtype(dtype))

    def give(self, array):
        with self._on(self._caller()):
            return self.cupy.asarray(array)

    def _address(self, array):
        return array.data.ptr

    def contiguous(self, array, alignment=ALIGNMENT, empty=None):
        if isinstance(array, np.ndarray):
            with self._on(self.stream):
                return self.cupy.asarray(np.ascontiguousarray(array))
        if self._fits(array, alignment):
            return array
        _wait_for(self.stream, [self._event(self._caller())])
        copy = (empty or self.empty)(array.shape, array.dtype)
        self.copy(copy, array)
        return copy

    def _fits(self, array, alignment=ALIGNMENT):
        return array.flags.c_contiguous and array.data.ptr % alignment == 0

    def accumulates(self, array):
        return self._fits(array)

    # Begin and end of a library call

    def begin(self):
        _wait_for(self.stream, [self._event(self._caller())])
        self._begun = self._event(self.stream)
        for stream in (self._out, self._in):
            _wait_for(stream, [self._begun])

    def finish(self):
        _wait_for(self.stream, [self._event(self._in)])
        _wait_for(self._caller(), [self._event(self.stream)])

    def drain(self):
        try:
            for stream in (self.stream, self._out, self._in):
                stream.synchronize()
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            self._failed(error)

    # Launches return at once, so they ignore `meanwhile`

    clear = _launched(_CupyLaunches.clear)
    zero = _launched(_CupyLaunches.zero)
    take = _launched(_CupyLaunches.take)
    copy = _launched(_CupyLaunches.copy)
    scatter = _launched(_CupyLaunches.scatter)
    attend = _launched(_CupyLaunches.attend)
    attend_pages = _launched(_CupyLaunches.attend_pages)
    unnormalize = _launched(_CupyLaunches.unnormalize)
    normalize = _launched(_CupyLaunches.normalize)
    attend_backward = _launched(_CupyLaunches.attend_backward)
    delta = _launched(_CupyLaunches.delta)
    add = _launched(_CupyLaunches.add)
    merge = _launched(_CupyLaunches.merge)
    sink = _launched(_CupyLaunches.sink)
    sink_gradient = _launched(_CupyLaunches.sink_gradient)

    # Wire

    def _done(self, event):
        """Whether an event is done; raises if the GPU has failed, because the event would then never be done."""
        status = self.cupy.cuda.runtime.eventQuery(event.ptr)
        if status not in (0, NOT_READY):
            self.wait(event)
        return status == 0

    def _all_done(self, events):
        return all(event is None or self._done(event) for event in events)

    def _as_it_is(self, array, after):
        """`WireBytes` of a device array.  MPI does not know streams, so `ready` lets the host wait for the events."""
        events = after or (self._begun,)
        return WireBytes(array.reshape(-1).view(np.uint8), lambda stop: self._all_done(events))

    def outgoing(self, array, after=(), collective=False):
        if self.transport == "device" and not collective:
            return self._as_it_is(array, after)
        if not array.nbytes:
            return WireBytes(np.empty(0, np.uint8))
        if id(array) in self._leaving:  # already staged for another rank, and unchanged since
            held = self._leaving[id(array)]
        else:
            held = self._leaving[id(array)] = _Leaving(array, self._pinned.take(array.nbytes))
            _wait_for(self._out, after)
            for start in range(0, array.nbytes, PIECE):
                self._copy_out(held, start, min(PIECE, array.nbytes - start))
        held.users += 1
        return WireBytes(
            held.block.bytes[: array.nbytes], lambda stop: self._all_done(held.copied[: -(-stop // PIECE)]), piece=PIECE
        )

    def _copy_out(self, held, start, count):
        runtime = self.cupy.cuda.runtime
        runtime.memcpyAsync(
            held.block.pointer + start, held.array.data.ptr + start, count, runtime.memcpyDeviceToHost, self._out.ptr
        )
        held.copied.append(self._event(self._out))

    def sent(self, array):
        held = self._leaving.get(id(array))
        if held is None:
            return
        held.users -= 1
        if not held.users:
            self._pinned.give(self._leaving.pop(id(array)).block)

    def incoming(self, array, after=(), collective=False):
        if self.transport == "device" and not collective:
            return self._as_it_is(array, after)
        if not array.nbytes:
            return WireBytes(np.empty(0, np.uint8))
        held = self._arriving[id(array)] = _Arriving(array, self._pinned.take(array.nbytes), after, collective)
        return WireBytes(
            held.block.bytes[: array.nbytes], taken=lambda start, stop: self._copy_in(held, start, stop), piece=PIECE
        )

    def _copy_in(self, held, start, stop):
        runtime = self.cupy.cuda.runtime
        _wait_for(self._in, held.after)  # only now, so that earlier copies need not wait for them
        held.after = ()
        runtime.memcpyAsync(
            held.array.data.ptr + start,
            held.block.pointer + start,
            stop - start,
            runtime.memcpyHostToDevice,
            self._in.ptr,
        )

    def arrived(self, array):
        held = self._arriving.pop(id(array), None)
        if held is None:
            return None  # MPI has written the array itself
        if held.collective:
            self._copy_in(held, 0, array.nbytes)
        event = self._event(self._in)
        self._pinned.give(held.block, event)
        return event

    def forget(self, array):
        pass

    def wait(self, event):
        try:
            if event is not None:
                event.synchronize()
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            self._failed(error)

    def _failed(self, error):
        raise MpiattnError(f"the GPU {self.version} has failed: {error}") from error

    def close(self):
        with suppress(MpiattnError):  # calls that waited have already raised it
            self.drain()
        self._pinned.clear()
        self._work_array.clear()
        self._functions.clear()


class _Leaving:
    """An array being sent.  block: its pinned memory.  copied: events of its pieces' copies.  users: pending sends."""

    def __init__(self, array, block):
        self.array, self.block, self.copied, self.users = array, block, [], 0


class _Arriving:
    """An array being received into a pinned block.  after: the events of its last uses."""

    def __init__(self, array, block, after, collective):
        self.array, self.block, self.after, self.collective = array, block, after, collective
