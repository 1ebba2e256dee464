"""Asks cuDNN, without a GPU, for a plan of every graph of the back end `cuda+cudnn`: python cudnn_plans.py CAPABILITY

cuDNN plans for a GPU that is described to it.  It still asks the CUDA runtime and the driver a few things; libraries
that `stubs` compiles answer these.  They have to come first in LD_LIBRARY_PATH.
Prints a dict: why a graph was refused, by (direction, dtype, head_dim, value_dim, right), "" if there is a plan.
"""

import itertools
import json
import subprocess
import sys

import launch

CAPABILITIES = (80, 90, 100)
CASES = (  # dtype, head_dim, value_dim, right
    ("bfloat16", 64, 64, None),
    ("float16", 80, 80, 37),
    ("float16", 128, 128, None),
    ("bfloat16", 128, 128, 0),
    ("bfloat16", 192, 128, 0),
    ("float16", 256, 256, 37),
)
# Functions of the driver by what they do here: hand out an address, or nothing.
HANDLES = (
    "cuLibraryLoadData cuLibraryGetKernel cuModuleLoadData cuModuleGetFunction cuKernelGetFunction cuLibraryGetModule"
)
SUCCEED = "cuInit cuKernelSetAttribute cuLibraryUnload cuModuleUnload cuFuncSetAttribute"
FAIL = (
    "cuCtxGetCurrent cuCtxGetLimit cuCtxPopCurrent cuCtxPushCurrent cuDeviceGetAttribute cuFuncGetAttribute "
    "cuGetErrorName cuGetErrorString cuGetExportTable cuGetProcAddress cuGetProcAddress_v2 cuLaunchCooperativeKernel "
    "cuLaunchKernel cuLaunchKernelEx cuLibraryLoadFromFile cuLinkAddData cuLinkComplete cuLinkCreate cuLinkDestroy "
    "cuMemcpyDtoDAsync cuMemsetD32Async cuMemsetD8Async cuOccupancyMaxActiveClusters cuStreamGetCtx "
    "cuTensorMapEncodeIm2col cuTensorMapEncodeTiled"
)
DRIVER = """
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuKernelGetAttribute(int *value) { *value = 0; return 0; }
int cuOccupancyMaxPotentialClusterSize(int *size) { *size = 8; return 0; }
"""
# Only the capability is read of cudaDeviceProp, whose layout is that of CUDA 12.
RUNTIME = """
#include <string.h>
int cudaGetDevice(int *device) { *device = 0; return 0; }
const char *cudaGetErrorString(int error) { return "none"; }
int cudaGetDeviceProperties(char *properties, int device) {
    int major = MAJOR;
    memset(properties, 0, 700);
    memcpy(properties + 360, &major, 4);
    return 0;
}
int cudaGetDeviceProperties_v2(char *properties, int device) { return cudaGetDeviceProperties(properties, device); }
"""


def stubs(compiler, folder, capability):
    """Compile a CUDA runtime and a driver that do nothing into a folder."""
    driver = [f"int {name}(void **handle) {{ *handle = (void *)0x1000; return 0; }}" for name in HANDLES.split()]
    driver += [
        f"int {name}(void) {{ return {code}; }}"
        for names, code in ((SUCCEED, 0), (FAIL, 100))
        for name in names.split()
    ]
    for name, text in (("libcuda.so.1", "\n".join(driver) + DRIVER), ("libcudart.so.13", RUNTIME)):
        source = folder / f"{name}.c"
        source.write_text(text)
        options = ["-w", "-shared", "-fPIC", f"-DMAJOR={capability // 10}", f"-Wl,-soname,{name}"]
        subprocess.run([compiler, *options, "-o", folder / name, source], check=True, timeout=launch.patience(60))


def described(capability):
    """A GPU of a compute capability, as cuDNN describes an H100."""
    shared = 166912 if capability == 80 else 232448
    return json.dumps(
        {
            "deviceName": "a GPU that is described",
            "cudaDeviceId": 0,
            "deviceVer": 10 * capability,
            "driverVer": 13000,
            "multiProcessorCount": 132,
            "maxGridSize": [2**31 - 1, 65535, 65535],
            "maxBlockSize": [1024, 1024, 64],
            "regsPerBlock": 65536,
            "smClockRateKHz": 1980000,
            "memClockRateKHz": 2619000,
            "memoryBusWidth": 5120,
            "l2CacheSize": 50 * 2**20,
            "warpSize": 32,
            "maxSharedMemoryPerBlock": 49152,
            "maxSharedMemoryPerBlockOptin": shared,
            "reservedSharedMemoryPerBlock": 1024,
            "maxRegistersPerSM": 65536,
            "pciDeviceId": 0,
            "maxCtasPerSM": 32,
            "maxThreadsPerBlock": 1024,
            "maxThreadsPerSM": 2048,
            "isTccDriver": 0,
            "supportCoopLaunch": 1,
            "oversizedSharedMemoryPerBlock": 0,
            "totalGlobalMem": 80 * 2**30,
        }
    )


class Described:
    """The frontend, whose graphs are for a GPU that is described, and have no handle, which needs a GPU."""

    def __init__(self, cudnn, capability):
        self._cudnn, self._capability = cudnn, capability
        self._device = cudnn.create_device_properties(described(capability))

    def __getattr__(self, name):
        return getattr(self._cudnn, name)

    def create_handle(self):
        return None

    def set_stream(self, handle, stream):
        assert handle is None

    def pygraph(self, handle, **options):
        assert handle is None
        return self._cudnn.pygraph(device_property=self._device, sm_version=self._capability, **options)


def main(capability):
    """Ask for every graph."""
    from mpiattn.backends.cuda import cudnn_graphs, cudnn_library

    graphs = cudnn_graphs.Graphs(Described(cudnn_library.load(), capability), 0, None)
    answers = {}
    for names, case in itertools.product((cudnn_graphs.FORWARD, cudnn_graphs.BACKWARD), CASES):
        backward = names is cudnn_graphs.BACKWARD
        dtype, *dims, right = case
        shape = cudnn_graphs.Shape(names, 333, 8, 300, 2, *dims, dtype, 0.3, right)
        graphs._plan(shape)
        asked = "backward" if backward else "forward", *case
        answers[asked] = graphs.refused.get(shape, "")
    print(answers)


if __name__ == "__main__":
    main(int(sys.argv[1]))
