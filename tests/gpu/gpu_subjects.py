"""What gpu_speed.py times: blocks and calls of decoding, on a back end and on PyTorch's kernels.

A subject has a name, `check(direction)`, which launches it once and returns what it is off, of the largest value, or
None, and `seconds(direction, times)`, the mean of so many passes by events.
"""

import contextlib
from functools import partial

import cupy
import ml_dtypes
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mpiattn.backends.block import BackwardInputs, BlockInputs, Gradients
from mpiattn.backends.pages import Tables

ROWS = 16  # that are compared with float64, of each result
KV_HEADS = 4  # of a block
PAGE = 64


def shared(tensor):
    """A bfloat16 tensor as a CuPy array of the same memory."""
    return cupy.from_dlpack(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)


def plain(array):
    """A CuPy array as a tensor of the same memory, bfloat16 too."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def off(result, rows, expected):
    """The largest difference of some rows of a result, relative to the largest value of all its rows."""
    return float((result[rows].double() - expected).abs().max() / result.abs().max())


class Block:
    """A case's inputs, (tokens, heads, dim), and parts of its results in float64."""

    def __init__(self, dim, heads, tokens, causal):
        self.dim, self.heads, self.tokens, self.causal = dim, heads, tokens, causal
        draw = torch.Generator("cuda").manual_seed(dim + tokens)
        self.q, self.k, self.v, self.dout = (
            torch.randn(tokens, n, dim, generator=draw, device="cuda", dtype=torch.bfloat16)
            for n in (heads, KV_HEADS, KV_HEADS, heads)
        )
        pairs = tokens * (tokens + 1) // 2 if causal else tokens**2
        self.flops = {"forward": 4 * pairs * heads * dim, "backward": 10 * pairs * heads * dim}
        self.forward = None  # float32 (out, lse) that have been compared
        self.rows = torch.linspace(0, tokens - 1, ROWS, device="cuda").long()
        self.scale = dim**-0.5

    def expected_out(self):
        """Those rows of out in float64, (rows, heads, dim)."""
        out = []
        for head in range(self.heads):
            k, v = (each[:, head * KV_HEADS // self.heads].double() for each in (self.k, self.v))
            score = self.q[self.rows, head].double() @ k.T * self.scale
            if self.causal:
                score.masked_fill_(torch.arange(self.tokens, device="cuda") > self.rows[:, None], -torch.inf)
            out.append(score.softmax(-1) @ v)
        return torch.stack(out, 1)

    def expected_gradients(self, out, lse):
        """Rows of dq, dk and dv in float64, from float32 (out, lse) that have been compared."""
        packed, dk, dv, dq = self.heads // KV_HEADS, [], [], []
        delta = (self.dout.double() * out.double()).sum(-1)
        everything = torch.arange(self.tokens, device="cuda")
        for head in range(self.heads):
            q, dout = self.q[:, head].double(), self.dout[:, head].double()
            k, v = (each[:, head // packed].double() for each in (self.k, self.v))

            def scores(queries, keys, head=head, q=q, dout=dout, k=k, v=v):
                p = (q[queries] @ k[keys].T * self.scale - lse[queries, head, None].double()).exp()
                if self.causal:
                    p.masked_fill_(keys > queries[:, None], 0)
                return p, p * (dout[queries] @ v[keys].T - delta[queries, head, None]) * self.scale

            p, ds = scores(everything, self.rows)
            dv.append(p.T @ dout)
            dk.append(ds.T @ q)
            dq.append(scores(self.rows, everything)[1] @ k)

        def summed(each):
            return torch.stack(each, 1).view(ROWS, KV_HEADS, packed, self.dim).sum(2)

        return torch.stack(dq, 1), summed(dk), summed(dv)


class Own:
    """The launches of a back end on a block."""

    def __init__(self, backend, block):
        self.backend, self.block, self.name = backend, block, f"mpiattn {backend.name}"
        self.q, self.k, self.v, self.dout = map(shared, (block.q, block.k, block.v, block.dout))
        end = np.arange(1, block.tokens + 1) if block.causal else np.full(block.tokens, block.tokens)
        interval = np.zeros((1, block.tokens), np.int32), end[None].astype(np.int32)
        self.inputs = BlockInputs(self.q, self.k, self.v, *map(backend.contiguous, interval), block.scale)
        rows = block.tokens, block.heads
        self.out, self.lse, self.delta = (backend.empty(shape, "float32") for shape in ((*rows, block.dim), rows, rows))
        self.given = BackwardInputs(self.dout, self.lse, self.delta)
        self.grads = Gradients(*(backend.empty(array.shape, "float32") for array in (self.q, self.k, self.v)))
        self.rounded = backend.empty(self.q.shape, ml_dtypes.bfloat16)
        torch.cuda.synchronize()
        self.event = partial(cupy.cuda.Event)

    def forward(self):
        self.backend.attend(self.inputs, self.out, self.lse)

    def backward(self):
        """With delta, as torch's does it."""
        self.backend.delta(self.delta, self.dout, self.rounded, None)
        self.backend.attend_backward(self.inputs, self.given, self.grads)

    def prepare(self, direction):
        if direction == "forward":
            self.backend.clear(self.out, self.lse)

    def check(self, direction):
        """What it is off; launches it once."""
        block, backend = self.block, self.backend
        if direction == "forward":
            self.out.fill(np.nan)
            backend.clear(self.out, self.lse)
            self.forward()
            backend.drain()
            return off(plain(self.out), block.rows, block.expected_out())
        backend.copy(self.rounded, self.out)
        backend.zero(self.grads[:3])
        self.backward()
        backend.drain()
        block.forward = plain(self.out), plain(self.lse)
        expected = block.expected_gradients(*block.forward)
        return max(off(plain(grad), block.rows, of) for grad, of in zip(self.grads, expected))

    def seconds(self, direction, times):
        """Of a pass, by events around each; the host runs ahead."""
        pairs, launch = [], getattr(self, direction)
        launch()  # keeps the GPU busy while the host launches what is measured
        for _ in range(times):
            self.prepare(direction)
            pairs.append((self.event(), self.event()))
            self.backend.stream.record(pairs[-1][0])
            launch()
            self.backend.stream.record(pairs[-1][1])
        pairs[-1][1].synchronize()
        return sum(cupy.cuda.get_elapsed_time(*pair) for pair in pairs) / times / 1e3


class Torch:
    """One of torch's kernels on a block."""

    def __init__(self, kind, block, deterministic=False):
        self.block, self.kind, self.deterministic = block, getattr(SDPBackend, f"{kind}_ATTENTION"), deterministic
        self.name = f"torch {kind.lower()}" + ", deterministic" * deterministic
        # (1, heads, tokens, dim), with the strides of (tokens, heads, dim), as models have them
        self.inputs = [each.transpose(0, 1)[None].detach() for each in (block.q, block.k, block.v)]
        self.dout = block.dout.transpose(0, 1)[None]

    @contextlib.contextmanager
    def allowed(self):
        with sdpa_kernel([self.kind]):
            if self.deterministic:
                torch.use_deterministic_algorithms(True)
                torch.utils.deterministic.fill_uninitialized_memory = False
            yield
            torch.use_deterministic_algorithms(False)

    def attention(self):
        return scaled_dot_product_attention(*self.inputs, is_causal=self.block.causal, enable_gqa=True)

    def forward(self):
        with torch.inference_mode():
            return self.attention()

    def backward(self):
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    def check(self, direction):
        block = self.block
        with self.allowed():
            if direction == "forward":
                return off(self.forward()[0].transpose(0, 1), block.rows, block.expected_out())
            for each in self.inputs:
                each.requires_grad_()
            self.out = self.attention()
            gradients = self.backward()
        expected = block.expected_gradients(*block.forward)
        return max(off(grad[0].transpose(0, 1), block.rows, of) for grad, of in zip(gradients, expected))

    def seconds(self, direction, times):
        launch, events = getattr(self, direction), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        with self.allowed():
            launch()  # keeps the GPU busy meanwhile
            events[0].record()
            for _ in range(times):
                launch()
            events[1].record()
            events[1].synchronize()
        return events[0].elapsed_time(events[1]) / times / 1e3


class Decode:
    """A call of decoding: one token of each sequence, keys in pages in any order."""

    def __init__(self, backend, keys, kv_heads, packed, window=None):
        self.backend, self.name, self.keys, self.packed = backend, f"mpiattn {backend.name}", keys, packed
        pages = [-(-int(n) // PAGE) for n in keys]
        numbers = np.random.default_rng(0).permutation(sum(pages)).astype(np.int32)
        self.tables = np.split(numbers, np.cumsum(pages)[:-1])
        draw = torch.Generator("cuda").manual_seed(0)
        self.pools = [
            torch.randn(kv_heads, sum(pages) * PAGE, 128, generator=draw, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        ]
        self.q = torch.randn(len(keys), kv_heads * packed, 128, generator=draw, device="cuda", dtype=torch.bfloat16)
        self.end = np.array(keys, np.int32)
        self.begin = np.maximum(0, self.end - window) if window else np.zeros_like(self.end)
        self.nbytes = 2 * 2 * 128 * kv_heads * int((self.end - self.begin).sum())
        arrays = [shared(each) for each in (self.q, *self.pools)]
        tables = Tables.of(self.tables)
        self.inputs = BlockInputs(*arrays, self.begin, self.end, 128**-0.5, pages=tables, page_size=PAGE)
        self.out, self.lse = (backend.empty(shape, "float32") for shape in (self.q.shape, self.q.shape[:2]))
        torch.cuda.synchronize()

    def launch(self):
        self.backend.attend_pages(self.inputs, self.out, self.lse)

    def check(self, _):
        self.out.fill(np.nan)
        self.launch()
        self.backend.drain()
        worst = 0.0
        for sequence in {0, len(self.keys) // 2, len(self.keys) - 1}:
            slots = self.tables[sequence].astype(np.int64)[:, None] * PAGE + np.arange(PAGE)
            slots = torch.from_numpy(slots.reshape(-1)[self.begin[sequence] : self.end[sequence]]).cuda()
            k, v = (pool[:, slots].double() for pool in self.pools)
            q = self.q[sequence].double().view(len(k), self.packed, 128)
            out = (q @ k.mT * 128**-0.5).softmax(-1) @ v
            worst = max(worst, off(plain(self.out)[sequence].view(out.shape), slice(None), out))
        return worst

    def seconds(self, _, times):
        events = cupy.cuda.Event(), cupy.cuda.Event()
        self.launch()
        self.backend.stream.record(events[0])
        for _ in range(times):
            self.launch()
        self.backend.stream.record(events[1])
        events[1].synchronize()
        return cupy.cuda.get_elapsed_time(*events) / times / 1e3


class Copy:
    """A copy that reads and writes as many bytes together."""

    name = "a copy"

    def __init__(self, nbytes):
        self.of, self.to = (torch.ones(nbytes // 2, dtype=torch.int8, device="cuda") for _ in range(2))

    def check(self, _):
        return None

    def seconds(self, _, times):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.to.copy_(self.of)
        events[0].record()
        for _ in range(times):
            self.to.copy_(self.of)
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / times / 1e3
