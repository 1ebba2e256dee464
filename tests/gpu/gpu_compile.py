"""Compiles the kernels that gpu_speed.py and gpu_tiles.py launch into CuPy's cache, many at a time.

python gpu_compile.py [--processes N]
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor


def kernels():
    """The `Kernel`s of bfloat16 with several query heads a KV head, for this GPU."""
    import cupy

    from mpiattn.backends.cuda import launches
    from mpiattn.backends.cuda.tile_table import Blocks, attention_kernel

    architecture = int(cupy.cuda.Device().compute_capability)
    for dim, packed in ((128, 8), (64, 8), (256, 4), (128, 4)):
        for work in ("gradient_kv", "gradient_q", "forward", "decode"):
            for page in (0, 64) if work == "decode" else (0,):
                blocks = Blocks("bfloat16", dim, dim, packed, page_size=page)
                yield attention_kernel(work, blocks, architecture)[0]
    yield attention_kernel("decode", Blocks("bfloat16", 128, 128, 1, page_size=64), architecture)[0]
    for name, vector in (("merge", 4), ("add", 4), ("delta", 8), ("out_of_delta", 8)):
        yield launches.partials_kernel(name, "bfloat16", vector)
    yield launches.partials_kernel("add_splits", "float32")
    yield launches.merge_kernel(9)
    yield launches.merge_kernel(99)
    yield launches.cast_kernel("bfloat16", "float32", 4)


def compiled(number):
    """Seconds to compile and load kernel `number`."""
    import cupy

    from mpiattn.backends.cuda import kernel_source

    kernel, start = list(kernels())[number], time.perf_counter()
    module = cupy.RawModule(code=kernel_source.expanded(kernel.file), options=("-std=c++17", *kernel.options()))
    module.get_function(kernel.name)
    return time.perf_counter() - start


def main():
    """Compile all; print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    from multiprocessing import get_context

    count, start = len(list(kernels())), time.perf_counter()
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        seconds = list(pool.map(compiled, range(count)))
    print(f"{count} kernels in {time.perf_counter() - start:.1f} s, {sum(seconds):.1f} s of compiling")


if __name__ == "__main__":
    sys.exit(main())
