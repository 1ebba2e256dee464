"""What cuDNN's attention does on this GPU: each question asked of the library itself, against float64, in 30 seconds.

  python gpu_cudnn.py [--no-speed]

It needs CuPy, NumPy, nvidia-cudnn-frontend and cuDNN 9; with torch it times torch's calls beside them.  It does not
import mpiattn.  Each step prints one line, with its seconds; one that fails keeps no other from being tried.
Arrays are those of the block protocol: (tokens, heads, dim), lse (tokens, heads).
"""

import argparse
import contextlib
import ctypes
import glob
import itertools
import os
import sys
import time

import numpy as np

STAIRCASES = (  # of the masks in `Probe.mask`, with numbers of queries and keys
    ("bottom right", (512, 768)),
    ("bottom right", (333, 500)),
    ("offset", (512, 768)),
    ("causal", (512, 768)),
    ("causal", (512, 256)),
)
FLOPS_FORWARD, FLOPS_BACKWARD = 4, 10  # of a pair of query and key, for each column


def main():
    """Ask every question in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-speed", action="store_true", help="leave out what is timed")
    speed = not parser.parse_args().no_speed
    probe = None

    def step(name, function, *arguments, **options):
        start = time.perf_counter()
        try:
            answer = function(*arguments, **options)
        except Exception as error:  # whatever it is, the other questions are still to be asked
            answer = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{name}: {answer} [{time.perf_counter() - start:.2f} s]", flush=True)

    try:
        probe = Probe()
    except Exception as error:
        print(f"no probe: {type(error).__name__}: {error}", flush=True)
        sys.exit(1)
    step("versions", probe.versions)
    forward, backward = probe.forward, probe.backward
    for dim in (64, 128, 256):
        for mask in ("full", "causal"):
            step(f"forward d{dim} {mask}", forward, dim, mask)
    step("forward d128 causal, float32 output", forward, 128, "causal", wide=True)
    step("forward d128 full, float32 output", forward, 128, "full", wide=True, composite=True)
    step("forward d128 causal float16", forward, 128, "causal", bfloat=False)
    step("forward d128 full, odd ends", forward, 128, "full", (500, 333))
    step("forward d192 values 128 causal", forward, 192, "causal", value_dim=128)
    step("forward d80 causal", forward, 80, "causal")
    for mask, shape in STAIRCASES:
        step(f"forward {mask} {shape}", forward, 128, mask, shape)
    for dim in (64, 128, 192, 256):
        step(f"backward d{dim} causal", backward, dim, "causal")
    step("backward d128 causal, deterministic", backward, 128, "causal", True)
    step("backward d128 full", backward, 128, "full")
    step("backward d128 full, odd ends", backward, 128, "full", shape=(500, 333))
    for mask, shape in STAIRCASES:
        step(f"backward {mask} {shape}", backward, 128, mask, shape=shape)
    step("host time of an execution", probe.host_time)
    if speed:
        for mask in ("full", "causal", "full", "causal"):  # twice: the first may find another clock
            step(f"speed forward {mask}", probe.speed_forward, mask)
            step(f"speed backward {mask}", probe.speed_backward, mask, False)
            for name in ("cudnn", "flash"):
                step(f"speed torch {name} {mask}", probe.speed_torch, name, mask == "causal")
        for mask in ("full", "causal"):
            step(f"speed forward {mask}, composite", probe.speed_forward, mask, composite=True)
            step(f"speed forward {mask}, every plan", probe.plans, mask)
            step(f"speed backward {mask}, deterministic", probe.speed_backward, mask, True)


def load():
    """The frontend's module.  It opens the CUDA runtime and cuDNN by name, and finds what is loaded already."""
    for name in ("libcudart.so.13", "libcudnn.so.9"):
        folders = [os.path.join(folder, "nvidia", "*", "lib", name) for folder in sys.path if folder]
        for path in [*(path for folder in folders for path in glob.glob(folder)), name]:
            with contextlib.suppress(OSError):
                ctypes.CDLL(path)
                break
    import cudnn

    return cudnn


class Probe:
    """Graphs, arrays and a stream of one GPU."""

    def __init__(self):
        import cupy

        self.cupy, self.cudnn = cupy, load()
        cupy.cuda.Device(0).use()
        cupy.zeros(1)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self.handle = self.cudnn.create_handle()
        self.cudnn.set_stream(handle=self.handle, stream=self.stream.ptr)
        self.random = cupy.random.RandomState(0)

    def versions(self):
        """Of everything that has a say."""
        cupy = self.cupy
        properties = cupy.cuda.runtime.getDeviceProperties(0)
        return (
            f"{properties['name'].decode()}, capability {cupy.cuda.Device(0).compute_capability}; CuPy "
            f"{cupy.__version__}, NumPy {np.__version__}, frontend {self.cudnn.__version__}, cuDNN "
            f"{self.cudnn.backend_version_string()}"
        )

    # Arrays.  Half types are kept as their bits, which no version of CuPy can misunderstand.

    def halves(self, shape, bfloat=True, scale=1.0):
        """Random numbers of a half type, as bits."""
        return self.rounded(self.random.standard_normal(shape).astype(np.float32) * np.float32(scale), bfloat)

    def rounded(self, array, bfloat=True):
        """float32 rounded to a half type, as bits."""
        if not bfloat:
            return array.astype(np.float16).view(np.uint16)
        bits = self.cupy.ascontiguousarray(array, np.float32).view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)

    def wide(self, bits, bfloat=True):
        """Numbers of any type as float64."""
        if bits.dtype == np.float32:
            return bits.astype(np.float64)
        if not bfloat:
            return bits.view(np.float16).astype(np.float64)
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)

    # Graphs

    def graph(self, bfloat=True):
        """An empty graph."""
        types = self.cudnn.data_type
        return self.cudnn.pygraph(
            io_data_type=types.BFLOAT16 if bfloat else types.HALF,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self.handle,
        )

    def layout(self, shape):
        """(dim, stride) of an array (tokens, heads, columns)."""
        tokens, heads, columns = shape
        return (1, heads, tokens, columns), (tokens * heads * columns, columns, heads * columns, 1)

    def tensor(self, graph, array):
        """The graph's tensor for an array (tokens, heads, columns)."""
        dim, stride = self.layout(array.shape)
        return graph.tensor(dim=dim, stride=stride)

    def mask(self, mask, tokens, keys):
        """Keywords for the mask, and one past the last key of every query."""
        alignment = self.cudnn.diagonal_alignment
        rows = self.cupy.arange(tokens)
        if mask == "full":
            return {}, self.cupy.full(tokens, keys)
        offset = {"causal": 0, "offset": keys - tokens, "bottom right": keys - tokens}[mask]
        where = alignment.BOTTOM_RIGHT if mask == "bottom right" else alignment.TOP_LEFT
        bound = offset if mask == "offset" else 0
        options = {"diagonal_alignment": where, "diagonal_band_right_bound": bound}
        return options, self.cupy.minimum(rows + offset + 1, keys)

    def build(self, graph):
        """Build a graph's plan; returns (workspace, its bytes)."""
        modes = self.cudnn.heur_mode
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        size = graph.get_workspace_size()
        return self.cupy.empty(max(size, 1), np.uint8), size

    def forward_graph(self, q, k, v, mask, scale, wide=False, bfloat=True, composite=False):
        """(execute, out, lse, bytes of workspace) of a forward pass."""
        graph, (tokens, heads, _) = self.graph(bfloat), q.shape
        inputs = [self.tensor(graph, array) for array in (q, k, v)]
        options, _ = self.mask(mask, tokens, len(k))
        if composite:  # the other implementation, the only one with plans for float32 outputs
            options["implementation"] = self.cudnn.attention_implementation.COMPOSITE
        o, stats = graph.sdpa(*inputs, attn_scale=scale, generate_stats=True, name="forward", **options)
        out = self.cupy.full((tokens, heads, v.shape[2]), 0x7FC0, np.float32 if wide else np.uint16)
        lse = self.cupy.full((tokens, heads), np.nan, np.float32)
        for tensor, (dim, stride) in ((o, self.layout(out.shape)), (stats, self.layout((tokens, heads, 1)))):
            tensor.set_output(True).set_dim(dim).set_stride(stride)
        stats.set_data_type(self.cudnn.data_type.FLOAT)
        if wide:
            o.set_data_type(self.cudnn.data_type.FLOAT)
        workspace, size = self.build(graph)
        pointers = {t: a.data.ptr for t, a in zip([*inputs, o, stats], [q, k, v, out, lse])}

        def run():
            graph.execute(pointers, workspace.data.ptr, handle=self.handle)

        run.parts = graph, pointers
        return run, out, lse, size

    def backward_graph(self, arrays, mask, scale, deterministic=False):
        """(execute, (dq, dk, dv), bytes of workspace); arrays: q, k, v, o, dout, lse."""
        graph, (tokens, heads, _) = self.graph(), arrays[0].shape
        inputs = [self.tensor(graph, array) for array in arrays[:5]]
        dim, stride = self.layout((tokens, heads, 1))
        inputs.append(graph.tensor(dim=dim, stride=stride, data_type=self.cudnn.data_type.FLOAT))
        options, _ = self.mask(mask, tokens, len(arrays[1]))
        if deterministic:
            options["use_deterministic_algorithm"] = True
        outputs = graph.sdpa_backward(*inputs, attn_scale=scale, name="backward", **options)
        gradients = []
        for tensor, like in zip(outputs, arrays):
            dim, stride = self.layout(like.shape)
            tensor.set_output(True).set_dim(dim).set_stride(stride)
            gradients.append(self.cupy.full(like.shape, 0x7FC0, np.uint16))
        workspace, size = self.build(graph)
        pointers = {t: a.data.ptr for t, a in zip([*inputs, *outputs], [*arrays, *gradients])}
        return (lambda: graph.execute(pointers, workspace.data.ptr, handle=self.handle)), gradients, size

    # Questions

    def expected(self, q, k, v, end, scale):
        """(out, lse, probabilities) in float64, of (heads, tokens, ...)."""
        cupy, group = self.cupy, q.shape[1] // k.shape[1]
        q, k, v = (array.transpose(1, 0, 2) for array in (q, k, v))
        k, v = (cupy.repeat(array, group, 0) for array in (k, v))
        scores = cupy.matmul(q, k.transpose(0, 2, 1)) * scale
        scores = cupy.where(cupy.arange(k.shape[1])[None, :] < end[:, None], scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        weights = cupy.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        return cupy.matmul(weights / total, v), (top + cupy.log(total))[..., 0], weights / total

    def off(self, array, expected):
        """The largest error relative to the largest value."""
        error = float(self.cupy.abs(array - expected).max() / self.cupy.abs(expected).max())
        return f"{error:.1e}" if error < 0.02 else f"{error:.1e} WRONG"

    def inputs(self, dim, shape, heads, value_dim=None, bfloat=True):
        """Random q, k, v."""
        tokens, keys = shape
        sizes = ((tokens, heads[0], dim), (keys, heads[1], dim), (keys, heads[1], value_dim or dim))
        return [self.halves(size, bfloat) for size in sizes]

    def forward(self, dim, mask, shape=(512, 512), heads=(8, 1), value_dim=None, bfloat=True, **options):
        """One forward pass against float64."""
        q, k, v = self.inputs(dim, shape, heads, value_dim, bfloat)
        scale = dim**-0.5
        run, out, lse, size = self.forward_graph(q, k, v, mask, scale, bfloat=bfloat, **options)
        run()
        self.stream.synchronize()
        _, end = self.mask(mask, *shape)
        exact, exact_lse, _ = self.expected(*(self.wide(array, bfloat) for array in (q, k, v)), end, scale)
        return (
            f"out off by {self.off(self.wide(out, bfloat).transpose(1, 0, 2), exact)}, "
            f"lse by {self.off(lse.T, exact_lse)}, workspace {size} bytes"
        )

    def backward(self, dim, mask, deterministic=False, shape=(512, 512), heads=(8, 1)):
        """One backward pass against float64: a block whose rows see other keys elsewhere, by delta's trick."""
        cupy = self.cupy
        q, k, v = self.inputs(dim, shape, heads)
        dout = self.halves((shape[0], heads[0], dim), scale=0.1)
        scale, group = dim**-0.5, heads[0] // heads[1]
        _, end = self.mask(mask, *shape)
        wq, wk, wv, wd = (self.wide(array) for array in (q, k, v, dout))
        block_out, block_lse, weights = self.expected(wq, wk, wv, end, scale)
        # The rest of the row: as many keys again, whose output differs.
        lse = block_lse + np.log(2)
        rest = cupy.asarray(self.random.standard_normal(block_out.shape)) * cupy.abs(block_out).mean()
        wd = wd.transpose(1, 0, 2)
        delta = (wd * (block_out + rest) / 2).sum(-1, keepdims=True)
        share = weights / 2
        wk, wv = (cupy.repeat(array.transpose(1, 0, 2), group, 0) for array in (wk, wv))
        ds = share * (cupy.matmul(wd, wv.transpose(0, 2, 1)) - delta)
        exact = [cupy.matmul(ds, wk) * scale]
        for left, right in ((ds * scale, wq.transpose(1, 0, 2)), (share, wd)):
            product = cupy.matmul(left.transpose(0, 2, 1), right)
            exact.append(product.reshape(heads[1], group, *product.shape[1:]).sum(1))
        o = (wd * delta / (wd * wd).sum(-1, keepdims=True)).transpose(1, 0, 2)
        o = self.rounded(o)
        stats = cupy.ascontiguousarray(lse.T, np.float32)
        arrays = [q, k, v, cupy.ascontiguousarray(o), dout, stats]
        run, gradients, size = self.backward_graph(arrays, mask, scale, deterministic)
        run()
        self.stream.synchronize()
        first = [array.copy() for array in gradients]
        run()
        self.stream.synchronize()
        same = all(bool((a == b).all()) for a, b in zip(first, gradients))
        offs = [
            f"{name} off by {self.off(self.wide(array).transpose(1, 0, 2), right)}"
            for name, array, right in zip(("dq", "dk", "dv"), gradients, exact)
        ]
        return f"{', '.join(offs)}, same bits twice: {same}, workspace {size} bytes"

    def host_time(self, launches=200):
        """Microseconds of Python for one execution, and seconds to build a first and a second plan."""
        q, k, v = self.inputs(128, (64, 64), (8, 1))
        times = []
        for mask in ("full", "causal"):
            start = time.perf_counter()
            run, *_ = self.forward_graph(q, k, v, mask, 0.1)
            times.append(time.perf_counter() - start)
        run()
        self.stream.synchronize()
        start = time.perf_counter()
        for _ in range(launches):
            run()
        took = (time.perf_counter() - start) / launches
        self.stream.synchronize()
        return f"{took * 1e6:.0f} us an execution; plans built in {times[0]:.2f} and {times[1]:.2f} s"

    def timed(self, run, flops, repeats=10):
        """TFLOP/s of the median of repeated runs."""
        for _ in range(3):
            run()
        events = [self.cupy.cuda.Event() for _ in range(repeats + 1)]
        events[0].record(self.stream)
        for event in events[1:]:
            run()
            event.record(self.stream)
        self.stream.synchronize()
        ms = sorted(self.cupy.cuda.get_elapsed_time(a, b) for a, b in itertools.pairwise(events))[repeats // 2]
        return f"{flops / ms / 1e9:.0f} TFLOP/s, {ms:.3f} ms"

    def large(self):
        """Inputs of the size at which speeds are published."""
        return self.inputs(128, (8192, 8192), (32, 4))

    def flops(self, q, mask, each):
        """Useful operations of a block."""
        tokens, heads, dim = q.shape
        return each * dim * heads * (tokens * tokens if mask == "full" else tokens * (tokens + 1) // 2)

    def speed_forward(self, mask, **options):
        """One forward pass of 8192 tokens."""
        q, k, v = self.large()
        run, _, _, size = self.forward_graph(q, k, v, mask, 128**-0.5, **options)
        return f"{self.timed(run, self.flops(q, mask, FLOPS_FORWARD))}, workspace {size / 2**20:.0f} MiB"

    def plans(self, mask):
        """Each of the plans that cuDNN proposes for a forward pass, the one that it thinks the best first."""
        q, k, v = self.large()
        run, *_ = self.forward_graph(q, k, v, mask, 128**-0.5)
        graph, pointers = run.parts
        answers = []
        for number in range(graph.get_execution_plan_count()):
            with contextlib.suppress(Exception):  # not every plan that is proposed can be built
                graph.build_plan_at_index(number)
                memory = self.cupy.empty(max(graph.get_workspace_size_plan_at_index(number), 1), np.uint8)

                def launch(number=number, memory=memory):
                    graph.execute_plan_at_index(pointers, memory.data.ptr, number, handle=self.handle)

                name = graph.get_plan_name_at_index(number)
                answers.append(f"{name} {self.timed(launch, self.flops(q, mask, FLOPS_FORWARD))}")
        return "; ".join(answers)

    def speed_backward(self, mask, deterministic):
        """One backward pass of 8192 tokens."""
        q, k, v = self.large()
        forward, out, lse, _ = self.forward_graph(q, k, v, mask, 128**-0.5)
        forward()
        arrays = [q, k, v, out, self.halves(out.shape), lse]
        run, _, size = self.backward_graph(arrays, mask, 128**-0.5, deterministic)
        return f"{self.timed(run, self.flops(q, mask, FLOPS_BACKWARD))}, workspace {size / 2**20:.0f} MiB"

    def speed_torch(self, name, causal):
        """torch's call, forward, of the same inputs."""
        import torch

        ops = torch.ops.aten
        stream = torch.cuda.ExternalStream(self.stream.ptr)
        with torch.cuda.stream(stream):
            # K and V are laid out once for every query head, since not every version of torch takes fewer.
            make = lambda: torch.randn(1, 32, 8192, 128, device="cuda", dtype=torch.bfloat16)  # noqa: E731
            q, k, v = make(), make(), make()
            if name == "cudnn":
                run = lambda: ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)  # noqa: E731
            else:
                run = lambda: ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)  # noqa: E731
            flops = FLOPS_FORWARD * 128 * 32 * (8192 * 8192 if not causal else 8192 * 8193 // 2)
            return f"{self.timed(run, flops)}, torch {torch.__version__}, 32 KV heads"


if __name__ == "__main__":
    main()
