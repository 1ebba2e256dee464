"""The CUDA back end: it launches the kernels on a GPU through CuPy.

Launches go to one stream, copies to the wire to a second and copies from the wire to a third; only events order the
three.  A library call starts after the work queued on its callers' streams, and these continue after it.

Memory: CuPy's pool reuses freed memory at once for the next allocation on the same stream.  So work arrays are
allocated on the stream of the launches, and an array being copied is held until launches are ordered after the copy.
Results are memory of the caller's library, see `callers`.
"""

import os
from contextlib import contextmanager, suppress
from functools import wraps

import numpy as np

from ...errors import ArgumentError, MpiattnError
from ...model.machine import H100, H100_STAGED
from ...problem.tensors import is_tensor
from . import kernel_source
from .arrays import as_cupy, check_bfloat16, missing
from .callers import Callers
from .devices import choose_device, stay_on
from .kernels import KernelLaunches
from .slots import opened, slots_of
from .uploads import Uploads
from .wires import Wires

CAPABILITY = 80  # the minimum compute capability that the kernels are compiled for
STATIC_SHARED = 48 * 1024  # bytes of shared memory that a kernel may use without an explicit request
ALIGNMENT = 16  # bytes; of arrays that kernels read by asynchronous copies
NOT_READY = 600  # cudaErrorNotReady
_STUCK: list[object] = []  # back ends that wait for a killed process's GPU, and may still copy from and to their memory


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

    def accumulate(self, dst, src):
        if src.dtype != dst.dtype:  # CuPy does not add all of them
            src, narrow = self.cupy.empty(src.shape, dst.dtype), src
            _CupyLaunches.copy(self, src, narrow)
        shared = tuple(axis for axis in range(4) if dst.shape[axis] == 1 < src.shape[axis])
        dst += src.sum(axis=shared, keepdims=True) if shared else src

    def scatter(self, pool, slots, src, entries, tokens):
        for slot, entry, token in zip(slots.tolist(), entries.tolist(), np.broadcast_to(tokens, slots.shape).tolist()):
            _CupyLaunches.copy(self, pool[:, slot : slot + 1], src[entry, token : token + 1].swapaxes(0, 1))


def _launched(method):
    """Order a launch as the protocol requires: on the stream of the launches, after the events; returns its event."""

    @wraps(method)
    def launch(self, *args, after=(), **options):
        with self.cupy.cuda.Device(self.device), self.stream:  # as `_on` and `event`, at half their cost
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

    transport: "device" or "staged", see `wires.Wires`.  "auto" means "staged" here, where there is no MPI to ask.
    local_rank: see `devices.choose_device`.

    stream: the stream of the launches.  begun: the event of the start of the library call.  device: the number of the
    GPU.  Raises ArgumentError if the GPU is too old.
    """

    name = "cuda"
    emulated_flops = None
    transport_why = ""
    strided = False
    takes_lists = False
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
        self._callers = Callers(self.cupy, self.device)
        self._wires = Wires(self, "staged" if transport == "auto" else transport, self._out, self._in)
        self._uploads = Uploads(self)
        self.begun = self.event(self.stream)

    @property
    def assumed_machine(self):
        return H100_STAGED if self.transport == "staged" else H100

    @contextmanager
    def _on(self, stream):
        with self.cupy.cuda.Device(self.device), stream:
            yield

    def event(self, stream):
        """A new event: all that has been given to a stream so far."""
        with self.cupy.cuda.Device(self.device):  # another thread of the caller may have another current GPU
            return stream.record(self.cupy.cuda.Event(disable_timing=True))

    def wait_on(self, stream, events):
        """Let a stream wait for events; None stands for finished work."""
        _wait_for(stream, events)

    def _wait_for_callers(self):
        _wait_for(self.stream, map(self.event, self._callers.streams()))

    def idle(self):
        os.sched_yield()

    # Arrays

    def device_memory(self):
        with self.cupy.cuda.Device(self.device):
            free = self.cupy.cuda.runtime.memGetInfo()[0] + self.cupy.get_default_memory_pool().free_bytes()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        part = visible if "MIG" in visible else ""  # parts of a GPU have its address, and memory of their own
        return free, f"{self.cupy.cuda.runtime.deviceGetPCIBusId(self.device)}{part}"

    @property
    def staged_bytes(self):
        """Bytes of pinned host memory that are allocated."""
        return self._wires.staging.nbytes

    def empty(self, shape, dtype):
        with self._on(self.stream):
            return self.cupy.empty(shape, np.dtype(dtype))

    def array(self, name, argument):
        with self.cupy.cuda.Device(self.device):
            array = self._callers.array(name, argument)
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
        if not is_tensor(argument) and getattr(argument, "__cuda_array_interface__", {"data": (0, False)})["data"][1]:
            raise ArgumentError(f"{name} is read-only; it must be an array that can be written to")
        return array

    def result(self, shape, dtype, like=None):
        with self.cupy.cuda.Device(self.device):
            return self._callers.empty(shape, dtype, like)

    def give(self, array, like=None):
        with self.cupy.cuda.Device(self.device):
            return self._callers.copied(array, like)

    def _address(self, array):
        return array.data.ptr

    def contiguous(self, array, alignment=ALIGNMENT, empty=None):
        if isinstance(array, np.ndarray):
            with self._on(self.stream):
                return self.cupy.asarray(np.ascontiguousarray(array))
        if self._fits(array, alignment):
            return array
        self._wait_for_callers()
        copy = (empty or self.empty)(array.shape, array.dtype)
        self.copy(copy, array)
        return copy

    def sheared(self, array, tokens):
        *_, rows, width = array.shape
        of_row = (array.strides[2] if rows > 1 else 0) - array.itemsize
        shape = *array.shape[:2], tokens, width - tokens + 1
        strides = *array.strides[:2], of_row, array.itemsize
        with self.cupy.cuda.Device(self.device):
            return self.cupy.lib.stride_tricks.as_strided(array[..., tokens - 1 :], shape, strides)

    def _upload(self, array):
        memory = self._uploads(array)
        return super()._upload(array) if memory is None else memory

    def _fits(self, array, alignment=ALIGNMENT):
        return array.flags.c_contiguous and array.data.ptr % alignment == 0

    def accumulates(self, array):
        return self._fits(array)

    def scratch_bytes(self, head_dim, value_dim, dtype, backward=False, shared_kv=False, lists=False):
        check_bfloat16("dtype is", dtype)
        return super().scratch_bytes(head_dim, value_dim, dtype, backward, shared_kv)

    # Begin and end of a library call

    def new_call(self):
        self._callers.new_call()

    def begin(self):
        self._wait_for_callers()
        self.begun = self.event(self.stream)
        for stream in (self._out, self._in):
            _wait_for(stream, [self.begun])

    def finish(self):
        _wait_for(self.stream, [self.event(self._in)])
        end = self.event(self.stream)
        for stream in self._callers.streams():
            _wait_for(stream, [end])

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
    accumulate = _launched(_CupyLaunches.accumulate)
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

    def slots(self):
        """The memory of this process on this GPU that other processes of the node may read."""
        return slots_of(self.cupy, self.device)

    def opened(self, handles):
        """That of another process, opened here; raises whatever CUDA does if it cannot be."""
        return opened(self.cupy, self.device, handles)

    @property
    def transport(self):
        return self._wires.transport

    @property
    def by_mpi(self):
        """ "device" or "staged": the transport of what MPI carries."""
        return self._wires.by_mpi

    def connect(self, near):
        """Take the transport "ipc" with these ranks, a `mpiattn.comm.near.Near`.  Raises ArgumentError."""
        self._wires.connect(near)

    @property
    def near(self):
        """What `connect` was given; None before."""
        return self._wires.near

    def _done(self, event):
        """Whether an event is done; raises if the GPU has failed, because the event would then never be done."""
        status = self.cupy.cuda.runtime.eventQuery(event.ptr)
        if status not in (0, NOT_READY):
            self.wait(event)
        return status == 0

    def all_done(self, events):
        """Whether events are done; raises as `wait`."""
        return all(event is None or self._done(event) for event in events)

    def outgoing(self, array, after=(), collective=False):
        return self._wires.outgoing(array, after, collective)

    def sent(self, array):
        self._wires.staging.sent(array)

    def incoming(self, array, after=(), collective=False):
        return self._wires.incoming(array, after, collective)

    def arrived(self, array):
        return self._wires.staging.arrived(array)

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
            if not self._wires.quiet():
                _STUCK.append(self)
                return
            self.drain()
        self._wires.staging.clear()
        self._work_array.clear()
        self._works.clear()
        self._functions.clear()
