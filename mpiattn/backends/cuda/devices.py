"""Which GPU a rank uses."""

import ctypes
import sys

from ...system import gpu_aware_mpi

_dealt: list[int] = []  # the GPUs that were chosen for this process; empty before the first choice


def choose_device(cupy, local_rank):
    """The number of this rank's GPU, among those in CUDA_VISIBLE_DEVICES; it becomes the current one.

    The current GPU is kept if it is not GPU 0, if it is in use (`in_use`), or if this process has chosen a GPU before.
    Else the choice is local_rank, the rank's number on its node, modulo the number of GPUs.
    """
    runtime = cupy.cuda.runtime
    device, count = runtime.getDevice(), runtime.getDeviceCount()
    if not device and not _dealt and not in_use(count):
        device = local_rank % count
    stay_on(cupy, device)
    return device


def stay_on(cupy, device):
    """Make a GPU the current one, and the GPU of all back ends that this process creates later."""
    cupy.cuda.Device(device).use()
    _dealt.append(device)


def in_use(count):
    """Whether the caller works on GPU 0 already: of `count` GPUs it alone has a context in this process.

    An MPI that takes device memory opens GPUs by itself, so under such an MPI a context says nothing of the caller.
    """
    return primary_contexts(count) == [0] and not ("mpi4py.MPI" in sys.modules and gpu_aware_mpi.gpu_aware()[0])


def primary_contexts(count):
    """The numbers of those of `count` GPUs that this process has used, through torch, CuPy or CUDA itself."""
    try:
        state = ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState  # CuPy has no name for it
    except (OSError, AttributeError):
        return []
    flags, active, opened = ctypes.c_uint(), ctypes.c_int(), []
    for device in range(count):
        if state(device, ctypes.byref(flags), ctypes.byref(active)) == 0 and active.value:
            opened.append(device)
    return opened
