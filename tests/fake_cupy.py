"""What `backends.cuda.backend` uses of CuPy, on a machine without a GPU, as late and as unordered as a GPU may be.

The memory of the "device" is NumPy's.  What is given to a stream waits there until the host waits for an event, asks
for one, or reads an array; then streams go on in turns drawn at random, ordered by nothing but their events.  Memory
begins as NaN, and becomes NaN again before the last that its stream had to do when it was allocated, which may be the
work of those who had it before; what is freed becomes NaN in its turn on that stream, as CuPy's pool may give it to the
next who asks there.  Kernels are the emulation's.  So a missing event shows as a wrong result.

CUDA IPC is `fake_ipc`'s.

`install` puts it in CuPy's place; test_fake_cupy.py compares its names and arguments with CuPy's.
"""

import collections
import itertools
import random
import re
import sys
import types
import weakref
from contextlib import contextmanager
from functools import cached_property, partial

import fake_ipc
import numpy as np

DEVICES = 2
FREE = [2**50]  # bytes that each GPU has left
_devices = [0]  # the current one last
random_turns = random.Random(0)
_streams, _serials = weakref.WeakValueDictionary(), itertools.count()  # by pointer
_busy = {}  # streams with work by serial number: work goes on when nobody has its stream any more


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.mark, self.ptr, self.device = types.SimpleNamespace(done=True), id(self), runtime.getDevice()
        assert disable_timing or not interprocess, "CUDA shares no event that takes the time"
        self.shared_event = fake_ipc.SharedEvent() if interprocess else None
        _events[self.ptr] = self

    @property
    def done(self):
        return runtime.eventQuery(self.ptr) == 0

    def synchronize(self):
        _run_until(lambda: self.mark.done)


_events = weakref.WeakValueDictionary()


class Stream:
    null = None

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        assert null or non_blocking, "a stream that waits for the null stream orders more than it should"
        self.queue, self.ptr = collections.deque(), 0 if null else id(self)
        self.serial, self.device_id = next(_serials), _devices[-1]
        _streams[self.ptr] = self

    @classmethod
    def from_external(cls, obj):
        return _streams[obj.__cuda_stream__()[1]]

    def put(self, work):
        self.queue.append(work)
        _busy[self.serial] = self

    def record(self, event=None):
        event = event or Event()
        assert event.device == self.device_id or not self.ptr, "CUDA does not record an event of another GPU's"
        if event.shared_event:
            event.mark, work = event.shared_event.record()
        else:
            mark = event.mark = types.SimpleNamespace(done=False)
            work = partial(setattr, mark, "done", True)
        self.put(lambda: work())
        return event

    def wait_event(self, event):
        self.put(event.mark)

    def synchronize(self):
        _run_until(lambda: not self.queue)

    def spoil(self, memory):
        """What is allocated now may be in the hands of what the stream has still to do, until it has done that."""
        for i, work in reversed([*enumerate(self.queue)]):
            if callable(work) and not isinstance(work, partial):  # which only tells that memory was freed
                self.queue[i] = lambda work=work: (memory.fill(0xFF), work())
                return

    def __enter__(self):
        _current.append(self)
        return self

    def __exit__(self, *exception):
        _current.pop()

    def step(self):
        """Do the next thing; whether that was possible."""
        head = self.queue[0]
        if not callable(head) and not head.done:
            return False
        self.queue.popleft()
        if not self.queue:
            del _busy[self.serial]
        if callable(head):
            head()
        return True


_current = [Stream(null=True)]
Stream.null = _current[0]


def get_current_stream(device_id=-1):
    return _current[-1]


def _some_steps(count):
    for _ in range(count):
        for stream in random_turns.sample([*_busy.values()], len(_busy)):
            if stream.step():
                break
        else:
            return False
    return True


def _waits_for_others():
    return any(isinstance(stream.queue[0], fake_ipc.Mark) for stream in _busy.values())


def _run_until(done):
    patience = fake_ipc.patience(_some_steps)
    while not done():
        if not _some_steps(1):
            assert _waits_for_others(), "streams wait for each other"
            patience()


fake_ipc.idle_with(_some_steps)


def _later(work):
    _current[-1].put(work)


class _Memory:
    """Some memory of the device; when nobody has it any more, whoever comes next on its stream has it."""

    def __init__(self, size):
        values = np.empty(size + 256, np.uint8)
        start = -values.ctypes.data % 256
        self.bytes = values[start : start + size]
        self.bytes.fill(0xFF)
        self.device = runtime.getDevice()
        _current[-1].spoil(self.bytes)
        weakref.finalize(self, _current[-1].put, partial(self.bytes.fill, 0xFF))


class ndarray:
    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        self.memory = _Memory(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        self.values = self.memory.bytes.view(dtype).reshape(shape)

    @classmethod
    def of(cls, memory, values):
        array = cls.__new__(cls)
        array.memory, array.values = memory, values
        return array

    shape, dtype, ndim, size, nbytes, itemsize, strides = (
        property(lambda self, name=name: getattr(self.values, name))
        for name in ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides")
    )
    device = property(lambda self: Device(self.memory.device))

    @property
    def flags(self):
        return types.SimpleNamespace(c_contiguous=self.values.flags.c_contiguous)

    @cached_property
    def data(self):
        return types.SimpleNamespace(ptr=self.values.ctypes.data if self.size else 0)

    @property
    def __cuda_array_interface__(self):
        interface = dict(self.values.__array_interface__)
        return {name: interface[name] for name in ("shape", "typestr", "data", "strides")} | {"version": 2}

    def __len__(self):
        return len(self.values)

    def __getitem__(self, at):
        return self.of(self.memory, self.values[at])

    def reshape(self, *shape):
        reshaped = self.values.reshape(*shape)
        assert np.may_share_memory(reshaped, self.values) or not reshaped.size, "CuPy would copy"
        return self.of(self.memory, reshaped)

    def view(self, dtype):
        return self.of(self.memory, self.values.view(dtype))

    def swapaxes(self, axis1, axis2):
        return self.of(self.memory, self.values.swapaxes(axis1, axis2))

    def transpose(self, *axes):
        return self.of(self.memory, self.values.transpose(*axes))

    def fill(self, value):
        values = self.values
        _later(lambda: values.fill(value))

    def sum(self, axis=None, dtype=None, out=None, keepdims=False):
        values = self.values
        result = empty(np.empty(values.shape, bool).sum(axis=axis, keepdims=keepdims).shape, values.dtype)
        _later(lambda: np.sum(values, axis=axis, out=result.values, keepdims=keepdims))
        return result

    def __iadd__(self, other):
        values, added = self.values, other.values
        _later(lambda: np.add(values, added, out=values))
        return self

    def get(self, stream=None, order="C", out=None, blocking=True):
        mark = (stream or _current[-1]).record()
        mark.synchronize()
        return self.values.copy()


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype)


def asarray(a, dtype=None, order=None, *, copy=None, blocking=False):
    if isinstance(a, ndarray):
        return a
    if isinstance(a, np.ndarray):
        array, given = ndarray(a.shape, a.dtype), a.copy()  # CuPy copies it into pinned memory at once
        _later(lambda values=array.values: np.copyto(values, given))
        return array
    held = types.SimpleNamespace(__array_interface__={**a.__cuda_array_interface__, "version": 3})
    memory = types.SimpleNamespace(owner=a, device=runtime.getDevice())
    return ndarray.of(memory, np.asarray(held))


def from_dlpack(array, *, device=None, copy=None):
    return array.__dlpack__(stream=_current[-1].ptr or 1)  # as which CUDA knows the null stream, too


def take(a, indices, axis=None, out=None):
    source, rows, target = a.values, indices.values, out.values
    _later(lambda: np.copyto(target, source[rows]))
    return out


def as_strided(x, shape=None, strides=None):
    return ndarray.of(x.memory, np.lib.stride_tricks.as_strided(x.values, shape, strides))


lib = types.SimpleNamespace(stride_tricks=types.SimpleNamespace(as_strided=as_strided))


class RawModule:
    def __init__(
        self,
        *,
        code=None,
        path=None,
        options=(),
        backend="nvrtc",
        translate_cucomplex=False,
        enable_cooperative_groups=False,
        name_expressions=None,
        jitify=None,
    ):
        assert isinstance(code, str) and isinstance(options, tuple) and options[0] == "-std=c++17"
        self.code, self.options = code, options[1:]

    def get_function(self, name):
        return RawKernel(self.code, name, self.options)


class RawKernel:
    max_dynamic_shared_size_bytes = 48 * 1024

    def __init__(self, code, name, options=()):
        from mpiattn.backends.cuda import kernel_source

        defines = tuple(tuple(re.fullmatch(r"-D(\w+)=(.*)", option).groups()) for option in options)
        file = next(
            path.name for path in kernel_source.path("").glob("*.cu") if kernel_source.expanded(path.name) == code
        )
        self.kernel = kernel_source.Kernel(name, file, defines, 0)

    def __call__(self, grid, block, args, *, shared_mem=0):
        from mpiattn.backends.testing.emulated import EmulatedBackend

        assert shared_mem <= self.max_dynamic_shared_size_bytes, "more shared memory than the function may have"
        assert all(isinstance(each, ndarray | np.generic) for each in args), "the GPU cannot reach it"
        given = [each.values if isinstance(each, ndarray) else each for each in args]
        kernel = self.kernel._replace(threads=block[0], shared_bytes=shared_mem)
        _later(lambda: EmulatedBackend()._run(kernel, grid, *given))


class Device:
    def __init__(self, device=None):
        self.id = device

    def use(self):
        _devices[-1] = self.id

    def __enter__(self):
        _devices.append(self.id)
        return self

    def __exit__(self, *exception):
        _devices.pop()

    compute_capability = "90"
    attributes = {"MultiProcessorCount": 3}


class PinnedMemory:
    def __init__(self, size, flags=0):
        self.values = np.full(size, 0xFF, np.uint8)


class PinnedMemoryPointer(np.ndarray):
    """As CuPy's, a buffer with an address."""

    def __new__(cls, mem, offset):
        held = types.SimpleNamespace(__array_interface__=mem.values[offset:].__array_interface__, mem=mem)
        return np.asarray(held).view(cls)

    @property
    def ptr(self):
        return self.ctypes.data


class runtime:
    CUDARuntimeError = CUDARuntimeError
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3
    is_hip = False

    @staticmethod
    def getDeviceCount():
        return DEVICES

    @staticmethod
    def getDevice():
        return _devices[-1]

    @staticmethod
    def getDeviceProperties(device):
        return {"name": b"no GPU, but NumPy"}

    @staticmethod
    def memGetInfo():
        return FREE[0], 2**50

    @staticmethod
    def deviceGetPCIBusId(device):
        return f"0000:0{device}:00.0"

    @staticmethod
    def eventQuery(event):
        _some_steps(random_turns.randrange(3))
        return 0 if _events[event].mark.done else 600

    @staticmethod
    def memcpyAsync(dst, src, size, kind, stream):
        target, source = (_at(pointer, size) for pointer in (dst, src))
        _streams[stream].put(lambda: np.copyto(target, source))


for _name, _function in vars(
    fake_ipc.runtime_of(CUDARuntimeError, _streams, lambda event: _events[event], runtime.getDevice)
).items():
    setattr(runtime, _name, staticmethod(_function))


def _at(pointer, size):
    interface = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}
    return np.asarray(types.SimpleNamespace(__array_interface__=interface))


def get_default_memory_pool():
    return types.SimpleNamespace(free_bytes=lambda: 2**20)


@contextmanager
def install():
    """Have `import cupy` find this."""
    before = sys.modules.get("cupy")
    sys.modules["cupy"] = sys.modules[__name__]
    try:
        yield
    finally:
        del sys.modules["cupy"]
        if before is not None:
            sys.modules["cupy"] = before


cuda = types.SimpleNamespace(
    Stream=Stream,
    Event=Event,
    Device=Device,
    get_current_stream=get_current_stream,
    Memory=fake_ipc.Memory,
    PinnedMemory=PinnedMemory,
    PinnedMemoryPointer=PinnedMemoryPointer,
    runtime=runtime,
)
