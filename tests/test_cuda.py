"""The CUDA back end without a GPU: its own code on a made-up CuPy that runs late, alone and on several ranks."""

import importlib
import os
import sys
from types import SimpleNamespace

import fake_cupy
import numpy as np
import pytest
from blocks import causal, chunks, dense, partial
from files import write_input
from launch import ROOT, TESTS, mpirun
from mpi4py import MPI

from mpiattn import KVCache, MeshAttention, backends, query_ring_decode, ring_decode, tree_decode
from mpiattn.arguments.arrays import Axes, Required, on_host
from mpiattn.arguments.results import Results
from mpiattn.backends.block import BackwardInputs, BlockInputs, Gradients
from mpiattn.backends.cuda import backend, devices
from mpiattn.backends.cuda.kernels import KernelLaunches
from mpiattn.backends.testing import emulated
from mpiattn.cli import tune
from mpiattn.comm.transport import check_transport
from mpiattn.console.launch import Job
from mpiattn.errors import ArgumentError, MpiattnError
from mpiattn.model.tuned import key_of

needs_compiler = pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler")


@pytest.mark.draw(2)
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "file"),
    [
        ("staged", "test_kernels.py"),
        ("ipc", "test_kernels.py"),
        ("ipc", "test_cases.py"),
        ("ipc", "test_decode.py"),
        ("device", "test_kernels.py"),
        ("staged", "test_cases.py"),
        ("device", "test_decode.py"),
    ],
)
def test_ranks(monkeypatch, transport, file):
    """What four ranks are to run on a GPU, every row against float64: forward and backward, decoding."""
    monkeypatch.syspath_prepend(TESTS / "gpu")
    outcome = mpirun(
        4,
        [
            sys.executable,
            *"-m pytest -q --color=no -p no:cacheprovider --most 2".split(),
            TESTS / "mpi" / file,
            "-k",
            importlib.import_module("rank_cases").CASES[file],
        ],
        timeout=200,
        cwd=ROOT,
        env={"MPIATTN_BACKENDS": "cuda", "MPIATTN_CUPY": "fake", "MPIATTN_TRANSPORT": transport},
    )
    assert " passed" in outcome.stdout, outcome.stdout
    assert file != "test_kernels.py" or " skipped" not in outcome.stdout, outcome.stdout


@needs_compiler
def test_commands_and_one_call(tmp_path):
    """From file to file, verified; decoding, measured; and `attention`, which goes by the arrays that it is given."""
    source = write_input(tmp_path / "in.h5", seqlen=43, kv_heads=2, heads=4, head_dim=16, backward=True)
    begin = "import sys, fake_cupy; sys.modules['cupy'] = fake_cupy; "
    env = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, TESTS)))}
    code = begin + "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    outcome = mpirun(
        2,
        [
            sys.executable,
            "-c",
            code,
            "run",
            source,
            tmp_path / "out.h5",
            "--backend",
            "cuda",
            "--backward",
            "--causal",
            "--verify",
        ],
        env=env,
    )
    assert "cuda back end" in outcome.stdout and outcome.stdout.count("passed") == 2
    outcome = mpirun(
        2,
        [
            sys.executable,
            "-c",
            code,
            *"bench --decode --backend cuda --transport staged --seqlen 21 --heads 2 --head-dim 16 --runs 1".split(),
        ],
        env=env,
    )
    assert "2 on 1 node, cuda back end" in outcome.stdout and "combining butterfly" in outcome.stdout
    code = (
        begin + "import numpy as np, mpiattn; from mpi4py import MPI; ones = np.ones((1, 7, 2, 16), np.float32); "
        "out, _ = mpiattn.attention(*[fake_cupy.asarray(ones)] * 3, comm=MPI.COMM_WORLD); "
        "assert type(out).__module__ == 'fake_cupy' and (abs(out.get() - 1) < 1e-6).all(); print('right')"
    )
    assert mpirun(2, [sys.executable, "-c", code], env=env).stdout.count("right") == 2


class Foreign:
    """Another library's array on the device."""

    def __init__(self, array):
        self.array, self.__cuda_array_interface__ = array, array.__cuda_array_interface__


def test_memory_for_results(gpu):
    """On the GPU, writable, and of nothing else of the call."""
    array, half = fake_cupy.empty((4, 6), "float32"), Required((4, 3), "float32", Axes(("tokens", "heads")))
    halves = {"left": array[:, ::2], "right": array[:, 1::2]}
    into = Results(gpu, {name: (array, half) for name, array in halves.items()}, {"q": None})
    assert into.returned(None) == tuple(halves.values())  # they share bounds, but no byte
    with pytest.raises(ArgumentError, match=r"^out shares memory with q;"):
        Results(gpu, {"out": (halves["left"], half)}, {"q": array[1:]})
    with pytest.raises(ArgumentError, match=r"^out is a NumPy array; it must be a CuPy array"):
        Results(gpu, {"out": (np.empty((4, 3), np.float32), half)}, {})
    locked = Foreign(array)
    locked.__cuda_array_interface__["data"] = (array.data.ptr, True)
    with pytest.raises(ArgumentError, match=r"^out is read-only"):
        gpu.writable("out", locked)
    assert gpu.writable("out", Foreign(array)).data.ptr == array.data.ptr


@needs_compiler
def test_a_block(gpu):
    """Whatever memory the inputs are in, and in which order."""
    q, k, v = chunks(33, 40, 4, 2, 16, 16, "float32")
    begin, end = causal(33, 40)
    ref = dense(q, k, v, begin, end, 0.3)
    on_gpu = [fake_cupy.asarray(array) for array in (q, k, v)]
    backward = [fake_cupy.asarray(array[::-1].copy())[::-1] for array in (q, k, v)]
    for inputs in (on_gpu, [Foreign(array) for array in on_gpu], backward, (q, k, v)):
        taken = [gpu.array("q", array) for array in inputs]
        gpu.begin()  # after the stream that makes them
        given = [gpu.contiguous(array) for array in taken]
        if inputs is not backward and inputs[0] is not q:
            assert given[0].data.ptr == on_gpu[0].data.ptr, "it was copied"
        out, lse = partial(gpu, 33, 4, 16, "float32")
        gpu.attend(BlockInputs(*given, begin, end, 0.3), out, lse)
        gpu.finish()
        for array, expected in zip((out, lse), ref):
            assert np.allclose(on_host(array), expected, atol=1e-5)


def test_pieces_are_ready_one_after_another(gpu):
    """Of what leaves and what comes, and the memory in between is used again."""
    sent = np.arange(777, dtype=np.float32)
    array, arrived = gpu.contiguous(sent), gpu.empty((777,), "float32")
    gpu.begin()
    for _ in range(3):
        leaving, coming = gpu.outgoing(array), gpu.incoming(arrived, (gpu.zero((arrived,)),))
        pieces = [(start, min(start + 1000, 3108)) for start in range(0, 3108, 1000)]
        for (start, stop), ready in zip(pieces, [leaving.ready(*piece) for piece in pieces]):
            while not ready():
                pass
            assert (leaving.array[:stop] == sent.view(np.uint8)[:stop]).all()
            coming.array[start:stop] = leaving.array[start:stop]
            coming.taken(start, stop)
        gpu.sent(array)
        gpu.wait(gpu.arrived(arrived))
        assert (on_host(arrived) == sent).all()
    assert gpu.staged_bytes == 2 * 2**16


def test_what_is_on_its_way_is_copied_once(gpu):
    array = gpu.contiguous(np.arange(9.0))
    gpu.begin()
    first, second = gpu.outgoing(array), gpu.outgoing(array)
    assert first.array.ctypes.data == second.array.ctypes.data
    gpu.sent(array)
    other = gpu.outgoing(gpu.contiguous(np.ones(9)))
    assert other.array.ctypes.data != first.array.ctypes.data, "it is still being sent"


@needs_compiler
def test_what_begins_anywhere_is_not_copied(gpu, monkeypatch):
    """lse and delta of some rows begin at any number; only q, k, v and dout have to begin at a multiple of 16 bytes."""
    q, k, v = (gpu.contiguous(array) for array in chunks(5, 7, 1, 1, 16, 16, "float32"))
    copied = []
    monkeypatch.setattr(gpu, "copy", lambda dst, src: copied.append(src.shape))
    begin, end = (gpu.contiguous(bound) for bound in causal(5, 7))
    lse, delta = (gpu.contiguous(np.zeros((6, 1), np.float32))[1:] for _ in range(2))
    grads = Gradients(*(gpu.empty(array.shape, "float32") for array in (q, k, v)))
    inputs = BlockInputs(q, k, v, begin, end, 0.3), BackwardInputs(v[:5], lse, delta)
    gpu.attend_backward(*inputs, grads)
    assert not copied
    memory = gpu.empty((8 * 16,), "float32")
    with pytest.raises(ArgumentError, match=r"dk begins at address .* multiple of 16 bytes"):
        gpu.attend_backward(*inputs, grads._replace(dk=memory[1:113].reshape(7, 1, 16)))


@needs_compiler
def test_a_copy_comes_after_what_the_caller_does(gpu):
    for _ in range(10):
        with fake_cupy.Stream(non_blocking=True):
            given = fake_cupy.asarray(np.arange(12, dtype=np.float32))[::2]
            assert (on_host_late(gpu, gpu.contiguous(given)) == np.arange(0, 12, 2)).all()


def on_host_late(gpu, array):
    gpu.drain()
    return on_host(array)


@needs_compiler
def test_every_launch_is_between_begin_and_finish(gpu, monkeypatch, tmp_path):
    """Of every call, where no argument has to be copied: before `begin` it would not wait for the caller's stream."""
    made, inside = [], []

    def recorded(name, method):
        def record(self, *arguments, **options):
            made.append((name, bool(inside)))
            return method(self, *arguments, **options)

        return record

    def edge(method, change):
        def pass_it(self):
            method(self)
            change()

        return pass_it

    launches = [
        name
        for kind in (KernelLaunches, backend._CupyLaunches)
        for name in vars(kind)
        if not name.startswith("_") and callable(getattr(kind, name)) and name != "scratch_bytes"
    ]
    for name in launches:
        assert name in vars(backend.CudaBackend), f"{name} is launched on no stream"
        monkeypatch.setattr(backend.CudaBackend, name, recorded(name, getattr(backend.CudaBackend, name)))
    for name, change in (("begin", lambda: inside.append(1)), ("finish", inside.clear)):
        monkeypatch.setattr(backend.CudaBackend, name, edge(getattr(backend.CudaBackend, name), change))

    def call(method, *arguments, **options):
        made.clear()
        result = method(*arguments, **options)
        assert made and not inside and all(within for _, within in made), (method.__name__, made)
        return result

    give = [fake_cupy.asarray(np.ones((1, 5, 1, 16), np.float32)) for _ in range(4)]
    sinks = fake_cupy.asarray(np.zeros(1, np.float32))
    with MeshAttention(MPI.COMM_SELF, seqlen=5, heads=1, head_dim=16, backend="cuda") as plan:
        out, lse = call(plan.forward, *give[:3], sinks=sinks)
        dlse = fake_cupy.asarray(np.ones((1, 1, 5), np.float32))
        call(plan.backward, give[3], *give[:3], out, lse, dlse=dlse, sinks=sinks)
    with KVCache(MPI.COMM_SELF, capacity=9, kv_heads=1, head_dim=16, backend="cuda") as cache:
        call(cache.append, *give[:2])
        for decode in (tree_decode, ring_decode, query_ring_decode):
            call(decode, give[0], cache, sinks=sinks)
        call(cache.local, 0)
        call(cache.save, tmp_path / "cache.h5")
    call(KVCache.load, MPI.COMM_SELF, tmp_path / "cache.h5", backend="cuda").close()


@needs_compiler
def test_memory_goes_back_to_those_whose_it_is(gpu):
    """A result's is the caller's to free while his work still reads it; what copies write is theirs until they have."""
    for _ in range(10):
        with fake_cupy.Stream(non_blocking=True):
            out, seen = gpu.result((5,), "float32"), fake_cupy.empty((5,), np.float32)
            gpu.copy(out, np.arange(5, dtype=np.float32))
            gpu.finish()
            fake_cupy.take(out, fake_cupy.asarray(np.arange(5)), axis=0, out=seen)
            del out
            gpu.drain()
            assert (on_host(seen) == np.arange(5)).all()
        unused = gpu.empty((5,), "float32")
        coming, memory = gpu.incoming(unused), unused.values
        coming.array[:] = 0
        coming.taken(0, 20)
        gpu.arrived(unused)
        gpu.finish()
        del unused, coming
        gpu.drain()
        assert np.isnan(memory).all(), "somebody else has it by now"


def test_devices(gpu):
    """Ranks of a node take turns; the caller's own choice is respected, and arrays on another GPU are refused."""
    fake_cupy._devices[:], gpu.device = [0], 0
    devices._dealt.clear()
    assert [devices.choose_device(fake_cupy, 3), devices.choose_device(fake_cupy, 0)] == [1, 1]
    fake_cupy.Device(0).use()
    assert devices.choose_device(fake_cupy, 1) == 0
    with fake_cupy.Device(1), pytest.raises(ArgumentError, match=r"q is on GPU 1; it must be on GPU 0"):
        gpu.array("q", fake_cupy.empty((3,)))
    with fake_cupy.Device(1):  # as in a thread of the caller's, where no GPU has been chosen
        gpu.begin()
        gpu.wait(gpu.zero((gpu.empty((3,), "float32"),)))
        gpu.finish()
    for wrong, described in (([1.0], "a list"), (np.ma.array([1.0]), "a MaskedArray")):
        with pytest.raises(ArgumentError, match=f"q is {described}; it must be a CuPy array"):
            gpu.array("q", wrong)


def test_tune_goes_by_the_back_end(gpu, monkeypatch):
    """It measures the dtypes that kernels take, and its figures are those of one transport."""
    asked = []

    def measured(job, nodes, backend, dtypes, *rest):
        asked.append(dtypes)
        raise ArgumentError("enough")

    monkeypatch.setattr("mpiattn.tuning.measure.measure", measured)
    args = SimpleNamespace(
        backend="cuda", transport="auto", dtype=None, head_dim=16, seconds=1.0, json=None, out=None, no_store=True
    )
    with pytest.raises(ArgumentError, match="enough"):
        tune._run(Job(MPI.COMM_SELF), args)
    assert set(asked[0]) == {"float32", "float16", "bfloat16"}
    keys = {key_of(backends.get("cuda", transport), [0], 16) for transport in ("staged", "device")}
    assert len(keys) == 2


def test_a_gpu_that_fails_is_told(gpu, monkeypatch):
    event = gpu.zero((gpu.empty((3,), "float32"),))
    leaving = gpu.outgoing(gpu.contiguous(np.ones(3)))

    def fail(self):
        raise fake_cupy.CUDARuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(fake_cupy.Event, "synchronize", fail)
    monkeypatch.setattr(fake_cupy.runtime, "eventQuery", lambda pointer: 700)
    for ask in (lambda: gpu.wait(event), leaving.ready(0, 1)):
        with pytest.raises(MpiattnError, match=r"the GPU .* has failed: an illegal memory access"):
            ask()


def test_without_cupy_or_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ArgumentError, match=r"needs CuPy .* pip install 'mpiattn\[cuda12\]'"):
        backends.get("cuda")
    with fake_cupy.install():
        monkeypatch.setattr(fake_cupy.runtime, "getDeviceCount", lambda: 0)
        with pytest.raises(ArgumentError, match="CuPy counts 0 GPUs"):
            backends.get("cuda")
        monkeypatch.setattr(fake_cupy.runtime, "is_hip", True)
        with pytest.raises(
            ArgumentError, match=r"this CuPy is for AMD GPUs \(ROCm\), for which mpiattn has no kernels"
        ):
            backends.get("cuda")


@pytest.mark.parametrize(
    "backend, transport, message",
    [
        ("numpy", "staged", "the back end 'numpy' has no device; only these have: cuda, cuda\\+cudnn"),
        ("emulated", "device", "has no device"),
        ("cuda", "nvlink", "it may be auto, staged, ipc, device"),
        ("numpy", "ipc", "the back end 'numpy' has no device"),
        ("cuda", "device", "this MPI does not take device memory"),
    ],
)
def test_transports_without_a_meaning(backend, transport, message):
    with pytest.raises(ArgumentError, match=message):
        check_transport(backend, transport)
