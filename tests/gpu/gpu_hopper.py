"""What only a Hopper GPU can tell: how it reads wgmma's descriptors and tensor maps, setmaxnreg, and how fast wgmma is.

  python gpu_hopper.py RESULT.json [--limit SECONDS]

Needs CuPy with NVRTC, and nothing of mpiattn.  Each step compiles its part of hopper.cu for sm_90a.  It runs in a
process of its own, which is ended after --limit seconds: a step that hangs or fails keeps no other from being done.  A
step is printed in one line.  RESULT.json is {step: {"passed", "seconds", "findings": [{"name", "passed", "text", ...}]
and, if it did not end well, "error"}}.  The exit code is 1 if a step has failed.
"""

import argparse
import ctypes
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROWS, KEYS, DIM = 128, 128, 128  # of hopper_speed.cuh
SCALE = 0.1275
FLOPS_PER_CYCLE = 4096  # of a multiprocessor's tensor cores with bfloat16
TIMES = 4096  # tiles in a timed loop
GROUP = 8 * 128  # bytes of 8 rows of a panel


def source():
    """The text of hopper.cu with what it includes."""
    text = (HERE / "hopper.cu").read_text()
    name = "hopper_speed.cuh"
    return text.replace(f'#include "{name}"', (HERE / name).read_text().replace("#pragma once", ""))


def options(number):
    """The options with which NVRTC compiles the part of a step."""
    return ("--gpu-architecture=sm_90a", "-std=c++17", "--ptxas-options=-v", f"-DSTEP={number}")


def complaints(log):
    """The lines of a compiler's log that say that it did not do what it was asked for.

    Ignored setmaxnreg (C7508) and wgmma that wait for each other (C7510 to C7519) are mere information to NVRTC.
    """
    return [line for line in log.splitlines() if re.search(r"warning|error|performance loss|\(C\d+\)", line, re.I)]


def say(name, passed, text, **more):
    """Hand a finding to the process that waits for it; passed: None if it is only worth knowing."""
    print(json.dumps({"name": name, "passed": passed, "text": text, **more}), flush=True)


def compare(name, got, want, tolerance=0.0, passed=None, **more):
    """Report how `got` differs from `want`, relative to the largest; returns whether it does not.

    passed: the finding's, if a difference need not be a failure.
    """
    off = np.abs(got.astype(np.float64) - want)
    worst = float(np.max(off / max(np.abs(want).max(), 1e-30)))  # NaN if any is
    same = bool(worst <= tolerance)
    wrong = int(np.sum(~(off <= tolerance * np.abs(want).max())))
    text = f"{name} {'right' if same else f'WRONG ({wrong} of {want.size} elements)'}"
    say(name, same if passed is None else passed, text, right=same, wrong=wrong, worst=worst if same else None, **more)
    return same


class Kernels:
    """The kernels of a step, by CuPy."""

    def __init__(self, number):
        import cupy
        from cupy.cuda import nvrtc

        program = nvrtc.createProgram(source(), "hopper.cu", (), ())
        try:
            nvrtc.compileProgram(program, options(number))
            cubin = nvrtc.getCUBIN(program)
        finally:
            self.log = nvrtc.getProgramLog(program)
            nvrtc.destroyProgram(program)
            lines = complaints(self.log)
            say("compiled", not lines, "; ".join(lines) or "compiled without complaints", log=self.log)
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "hopper.cubin"
        path.write_bytes(cubin)
        self.module = cupy.RawModule(path=str(path))  # RawModule(code=) compiles for sm_90, which has no wgmma

    def get(self, name, shared_bytes):
        """A kernel that may be launched with so many bytes, and 1 KiB more to align them."""
        kernel = self.module.get_function(name)
        kernel.max_dynamic_shared_size_bytes = shared_bytes + 1024
        return lambda grid, block, *args: kernel((grid,), (block,), args, shared_mem=shared_bytes + 1024)


def bits(values):
    """The upper halves of float32 numbers: bfloat16, rounded towards zero."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def number(halves):
    """The float64 numbers that bfloat16 bits stand for."""
    return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rounded(values):
    """To the nearest bfloat16."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return number(((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16))


def integers(random, most, *shape):
    """Random small integers, so that sums are exact: (the numbers, their bits on the GPU)."""
    import cupy

    values = random.integers(-most, most + 1, shape).astype(np.float64)
    return values, cupy.asarray(bits(values))


def swizzled(panel):
    """Rows of 64 elements as they lie in shared memory."""
    rows = np.arange(len(panel))[:, None]
    return panel.reshape(-1, 8, 8)[rows, np.arange(8) ^ rows % 8].reshape(-1, 64)


def device():
    """The GPU and the software."""
    import cupy

    gpu = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(gpu.id)
    versions = {
        "CuPy": cupy.__version__,
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "NVRTC": cupy.cuda.nvrtc.getVersion(),
    }
    text = f"{properties['name'].decode()}, {properties['multiProcessorCount']} multiprocessors, {versions}"
    say("device", gpu.compute_capability == "90", text)


def descriptors():
    """Products by wgmma for several layouts of the right operand."""
    import cupy

    kernels, random = Kernels(1), np.random.default_rng(1)

    def product(name, left, right, leading, stride):
        columns = int(name.split("_")[1])
        out = cupy.asarray(np.full((64, columns), np.nan, np.float32))
        kernels.get(name, 96 * 1024)(1, 128, left, right, out, np.uint32(leading), np.uint32(stride))
        return out.get()

    cases = {}
    for columns in (64, 128):
        for dim in (64, 128):
            a, left = integers(random, 3, 64, dim)
            b, right = integers(random, 3, columns, dim)
            compare(f"A B^T, n {columns}, k {dim}", product(f"scores_{columns}_{dim}", left, right, 16, GROUP), a @ b.T)
            b, right = integers(random, 3, dim, columns)
            cases[columns, dim] = left, right, a @ b
    q, k, v = (integers(random, most, rows, DIM) for most, rows in ((1, 64), (1, KEYS), (3, KEYS)))
    right = {
        (columns, keys): compare(
            f"P V, n {columns}, {keys} keys, leading = next 64 columns, stride = next 8 keys",
            product(f"values_{columns}_{keys}", left, right, keys * 128, GROUP),
            want,
            passed=True,
        )
        for (columns, keys), (left, right, want) in cases.items()
    }
    out = cupy.empty((64, DIM), np.float32)
    kernels.get("chain", 80 * 1024)(1, 128, q[1], k[1], v[1], out)
    compare("bfloat16(Q K^T) V", out.get(), rounded(q[0] @ k[0].T) @ v[0])
    # Those that should be wrong are last: should they read beyond shared memory, no kernel runs any more.
    a, left = integers(random, 3, 64, DIM)
    b, other = integers(random, 3, KEYS, DIM)
    compare("A B^T with leading 0", product("scores_128_128", left, other, 0, GROUP), a @ b.T, passed=True)
    exchanged = {
        (columns, keys): compare(
            f"P V, n {columns}, {keys} keys, leading and stride exchanged",
            product(f"values_{columns}_{keys}", left, right, GROUP, keys * 128),
            want,
            passed=True,
        )
        for (columns, keys), (left, right, want) in cases.items()
    }
    first, second = all(right.values()), all(exchanged.values())
    verdict = "leading = next 64 columns, stride = next 8 keys" if first else "leading = next 8 keys" if second else "?"
    say("MN-major", first or second, f"MN-major: {verdict}")


def tensor_map(array, box):
    """A tensor map of bfloat16 (z, y, x) with the swizzle of 128 bytes: one element of 128 bytes, on 64.

    box: (x, y, z) elements.
    """
    memory = np.zeros(192, np.uint8)
    start = -memory.ctypes.data % 64
    made = memory[start : start + 128].view("V128")
    z, y, x = array.shape
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    encode.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32] + [ctypes.c_void_p] * 5 + [ctypes.c_int] * 4
    sizes, strides = (ctypes.c_uint64 * 3)(x, y, z), (ctypes.c_uint64 * 2)(x * 2, x * y * 2)
    extents, steps = (ctypes.c_uint32 * 3)(*box), (ctypes.c_uint32 * 3)(1, 1, 1)
    bfloat16, plain, swizzle_128, promote_256, zeros = 9, 0, 3, 3, 0
    error = encode(
        made.ctypes.data,
        bfloat16,
        3,
        array.data.ptr,
        sizes,
        strides,
        extents,
        steps,
        plain,
        swizzle_128,
        promote_256,
        zeros,
    )
    if error:
        raise RuntimeError(f"cuTensorMapEncodeTiled: CUresult {error}")
    return made


def boxes():
    """What the copy engine makes of boxes, and wgmma of what it copied."""
    import cupy

    kernels, random = Kernels(2), np.random.default_rng(2)
    tokens, heads = 200, 3
    data = random.integers(0, 1 << 16, (tokens, heads, DIM)).astype(np.uint16)
    array = cupy.asarray(data)
    padded = np.zeros((tokens + 128, heads, DIM), np.uint16)
    padded[64 : 64 + tokens] = data  # from key -64 on

    def box(name, array, shape, at, want):
        out = cupy.zeros(want.shape, np.uint16)
        launch = kernels.get("box", want.nbytes)
        launch(1, 128, tensor_map(array, shape), out, *map(np.int32, at), np.int32(want.nbytes))
        compare(name, out.get(), swizzled(want).astype(np.float64))

    for name, x, head, key in (
        ("box inside", 0, 1, 0),
        ("second panel", 64, 2, 70),
        ("keys beyond the last", 64, 1, 150),
        ("keys before the first", 0, 0, -8),
    ):
        box(name, array, (64, 1, 64), (x, head, key), padded[64 + key :][:64, head, x : x + 64])
    packed = 4
    queries, q = integers(random, 3, 16, 2 * packed, DIM)
    box("4 packed heads", q, (64, packed, 16), (64, packed, 0), bits(queries)[:, packed:, 64:].reshape(-1, 64))
    keys, k = integers(random, 3, tokens, 2, DIM)
    out = cupy.empty((64, KEYS), np.float32)
    head, first = 1, 100
    kernels.get("box_scores", 48 * 1024)(
        1,
        128,
        tensor_map(q, (64, packed, 16)),
        np.int32(packed),
        tensor_map(k, (64, 1, 64)),
        np.int32(head),
        np.int32(first),
        out,
    )
    want = np.zeros((64, KEYS))
    want[:, : tokens - first] = queries[:, head * packed :].reshape(64, DIM) @ keys[first:, head].T
    compare("boxes, then wgmma", out.get(), want)


def registers():
    """Registers of a producer go to consumers, which need more than there are at the start."""
    import cupy

    kernels, random = Kernels(3), np.random.default_rng(3)
    for tiles in (1, 2, 7, 64):
        elements = random.integers(-9, 10, (tiles, 4096)).astype(np.float32)
        out = cupy.empty((192, 256), np.float32)
        kernels.get("registers", 32 * 1024)(1, 384, cupy.asarray(elements), out, np.int32(tiles))
        sums = elements.sum(0, dtype=np.float64)
        compare(f"{tiles} tiles", out.get(), sums[np.arange(256) + 16 * np.arange(192)[:, None]])
    kernel = kernels.module.get_function("registers")
    attributes = {"num_regs": kernel.num_regs, "local_size_bytes": kernel.local_size_bytes}
    say("attributes", kernel.local_size_bytes == 0, str(attributes), **attributes)


def speed():
    """TFLOP/s of loops of wgmma on all multiprocessors."""
    import cupy

    kernels, random = Kernels(4), np.random.default_rng(4)
    blocks = cupy.cuda.Device().attributes["MultiProcessorCount"]
    halves = [bits(random.standard_normal((rows, DIM))) for rows in (ROWS, KEYS, KEYS)]
    arrays = [cupy.asarray(each) for each in halves]
    q, k, v = map(number, halves)
    scores, weights = q @ k.T, np.exp2(SCALE * (q @ k.T))
    check = 3
    attention = weights @ v / weights.sum(1, keepdims=True)
    out = cupy.empty((blocks, ROWS, DIM), np.float32)
    cycles = cupy.empty(blocks, np.int64)
    for name, products, want in (
        ("scores", 1, check * scores),
        ("scores_in_flight", 1, check * scores),
        ("scores_registers", 1, check * scores),
        ("values", 1, check * (q @ v)),
        ("values_in_flight", 1, check * (q @ v)),
        ("products", 2, check * (rounded(scores) @ v)),
        ("forward", 2, attention),
        ("forward_ahead", 2, attention),
    ):
        launch = kernels.get(f"speed_{name}", 96 * 1024)
        out.set(np.full(out.shape, np.nan, np.float32))
        launch(blocks, 256, *arrays, out, cycles, np.int32(check))
        compare(f"{name}, results", out.get(), np.broadcast_to(want, out.shape), 2e-2)
        seconds = []
        for _ in range(6):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            launch(blocks, 256, *arrays, out, cycles, np.int32(TIMES))
            stop.record()
            stop.synchronize()
            seconds.append(cupy.cuda.get_elapsed_time(start, stop) / 1e3)
        flops = products * 2 * ROWS * KEYS * DIM * TIMES  # of a block
        median, fastest = np.median(seconds[1:]), min(seconds[1:])
        each = float(np.median(cycles.get()))
        share = flops / each / FLOPS_PER_CYCLE
        rate = blocks * flops / median / 1e12
        say(
            name,
            None,
            f"{name} {rate:.0f} TFLOP/s, {share:.0%} of the cycles, {each / median / 1e9:.2f} GHz",
            tflops=rate,
            fastest_tflops=blocks * flops / fastest / 1e12,
            cycles_of_a_tile=each / TIMES,
            share=share,
        )


STEPS = {"device": device, "descriptors": descriptors, "boxes": boxes, "registers": registers, "speed": speed}


def attempt(name, limit):
    """A step in a process of its own: what RESULT.json says of it."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, __file__, "--step", name], stdout=output, stderr=errors, stdin=subprocess.DEVNULL
        )
        error = None
        try:
            if child.wait(limit):
                errors.seek(0)
                error = errors.read().strip()[-2000:] or f"exit code {child.returncode}"
        except subprocess.TimeoutExpired:
            error = f"no end in {limit:g} s"
            child.kill()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                error += ", and it cannot be ended"
        output.seek(0)
        findings = [json.loads(line) for line in output if line.startswith("{") and line.endswith("}\n")]
    record = {
        "passed": error is None and all(each["passed"] is not False for each in findings),
        "seconds": round(time.perf_counter() - start, 2),
        "findings": findings,
    }
    return record | ({"error": error} if error else {})


def main():
    """Do a step, or each in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, nargs="?")
    parser.add_argument("--limit", type=float, default=40, help="seconds of a step; it should take less than 6")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        STEPS[args.step]()
        return 0
    if args.result is None:
        parser.error("RESULT.json is missing")
    done = {}
    for name in STEPS:
        done[name] = record = attempt(name, args.limit)
        words = [each["text"] for each in record["findings"]]
        words += [record["error"].splitlines()[-1]] if "error" in record else []
        print(f"{name}: {'passed' if record['passed'] else 'FAILED'} in {record['seconds']} s: {'; '.join(words)}")
        sys.stdout.flush()
        args.result.write_text(json.dumps(done, indent=1))
    return int(not all(record["passed"] for record in done.values()))


if __name__ == "__main__":
    sys.exit(main())
