"""What the back end `cuda` asks of a machine: whose GPU is whose, where memory is allocated, which NumPy there is."""

from types import SimpleNamespace

import fake_cupy
import numpy as np
import pytest
from mpi4py import MPI

from mpiattn import KVCache, MeshAttention
from mpiattn.backends.cuda import devices
from mpiattn.comm import room
from mpiattn.errors import ArgumentError


@pytest.mark.parametrize(
    ("opened", "aware", "device"),
    [([], False, 1), ([0], False, 0), ([0, 1], False, 1), ([1], False, 1), ([0], True, 1)],
)
def test_gpu_0_of_the_callers_own_choice(gpu, monkeypatch, opened, aware, device):
    """It is kept where it alone is in use, unless MPI may have opened it; the driver says which GPUs are."""

    def state(number, flags, active):
        active._obj.value = number in opened
        return 0

    devices._dealt.clear()
    fake_cupy.Device(0).use()
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: SimpleNamespace(cuDevicePrimaryCtxGetState=state))
    monkeypatch.setattr(devices.gpu_aware_mpi, "gpu_aware", lambda: (aware, "a test says so"))
    assert devices.choose_device(fake_cupy, 3) == device == fake_cupy.runtime.getDevice()


def test_pinned_memory_is_of_the_back_ends_gpu(gpu, monkeypatch):
    """Whatever GPU is current in the thread that calls, no other gets a context for it, nor as it is freed."""
    used = []
    monkeypatch.setattr(
        fake_cupy.PinnedMemory, "__del__", lambda self: used.append(fake_cupy.runtime.getDevice()), False
    )
    allocated = fake_cupy.PinnedMemory.__init__

    def allocate(self, size, flags=0):
        used.append(fake_cupy.runtime.getDevice())
        allocated(self, size, flags)

    monkeypatch.setattr(fake_cupy.PinnedMemory, "__init__", allocate)
    with fake_cupy.Device(1 - gpu.device):
        gpu.sent((array := gpu.contiguous(np.ones(9)), gpu.outgoing(array))[0])
        gpu.close()
    assert used == [gpu.device] * 2


def test_memory_that_a_gpu_lacks(gpu, monkeypatch):
    """That of CuPy's pool is free too; ranks that use another part of a GPU do not share its memory."""
    assert gpu.device_memory() == (fake_cupy.FREE[0] + 2**20, f"0000:0{gpu.device}:00.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5")
    assert gpu.device_memory()[1] == f"0000:0{gpu.device}:00.0MIG-5"
    monkeypatch.setattr(fake_cupy, "FREE", [2**24])
    how = {"capacity": 5000, "kv_heads": 4, "head_dim": 128, "page_size": 50, "backend": "cuda"}
    with pytest.raises(ArgumentError, match=r"needs 19.5 MiB on .*; 17 MiB are left of the memory of GPU 0000:"):
        monkeypatch.setattr(room, "LEAST", 1)
        KVCache(MPI.COMM_SELF, **how)
    monkeypatch.setattr(fake_cupy, "FREE", [2**25])
    KVCache(MPI.COMM_SELF, **how).close()


def test_bfloat16_needs_a_numpy_that_cupy_has_it_of(gpu, monkeypatch):
    """An error when a plan is made, and when a tensor comes before there is a plan; other dtypes do not care."""
    monkeypatch.setattr(np, "__version__", "2.1.1")
    wanted = "needs NumPy 2.1.2 or newer, .* is 2.1.1: pip install 'numpy>=2.1.2'"
    shape = {"seqlen": 5, "heads": 1, "head_dim": 16, "backend": "cuda"}
    with pytest.raises(ArgumentError, match=f"dtype is 'bfloat16', which on a GPU {wanted}"):
        MeshAttention(MPI.COMM_SELF, **shape, dtype="bfloat16")
    MeshAttention(MPI.COMM_SELF, **shape, dtype="float16").close()

    class Tensor:
        dtype = "torch.bfloat16"

        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, **options):
            raise NotImplementedError("CuPy does not support bfloat16. Please install ml_dtypes to use bfloat16.")

    with pytest.raises(ArgumentError, match=f"q has dtype 'torch.bfloat16', which on a GPU {wanted}"):
        gpu.array("q", Tensor())
    monkeypatch.setattr(np, "__version__", "2.1.2")
    MeshAttention(MPI.COMM_SELF, **shape, dtype="bfloat16").close()
