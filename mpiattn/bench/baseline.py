"""PyTorch's scaled_dot_product_attention, with each of its back ends, as a baseline for a back end's launches."""

import contextlib
import time

import ml_dtypes
import numpy as np

# Allowed difference of two results, relative to the largest value: a few times the rounding error.
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-13}

# On a GPU: name, name in torch.nn.attention.SDPBackend, whether only for backward, whether deterministic.
ON_GPU = (
    ("torch flash", "FLASH_ATTENTION", False, False),
    ("torch cuDNN", "CUDNN_ATTENTION", False, False),
    ("torch efficient", "EFFICIENT_ATTENTION", False, False),
    ("torch flash, deterministic", "FLASH_ATTENTION", True, True),
    ("torch cuDNN, deterministic", "CUDNN_ATTENTION", True, True),
)
ON_CPU = (("torch", None, False, False),)


def load_torch():
    """The module, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def to_torch(torch, array, device):
    """(tokens, heads, dim) as a contiguous tensor (1, heads, tokens, dim), bfloat16 as torch's own."""
    array = np.ascontiguousarray(array.swapaxes(0, 1))[None]
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def from_torch(torch, tensor):
    """The reverse of `to_torch`, in float32, or float64 for float64."""
    tensor = tensor.detach().to("cpu")
    return (tensor if tensor.dtype == torch.float64 else tensor.float()).numpy()[0].swapaxes(0, 1)


class Sdpa:
    """A pass of one of torch's back ends over the same arrays.  Raises RuntimeError where it is not possible.

    arrays: q, k, v, and dout for the backward pass, NumPy, (tokens, heads, dim).  kind: a name in
    torch.nn.attention.SDPBackend, or None: torch chooses.  bias: NumPy, (heads, queries, keys), or None; bias_gradient:
    whether the backward pass has its gradient too.
    """

    def __init__(
        self,
        torch,
        arrays,
        causal,
        backward,
        on_gpu=False,
        kind=None,
        deterministic=False,
        bias=None,
        bias_gradient=False,
    ):
        self.torch, self.kind, self.deterministic = torch, kind, deterministic
        self.causal, self.on_gpu = causal, on_gpu
        self.grouped = arrays[0].shape[1] != arrays[1].shape[1]
        device = "cuda" if on_gpu else "cpu"
        self.inputs = [to_torch(torch, array, device) for array in arrays[:3]]
        self.bias = None if bias is None else torch.from_numpy(bias)[None].to(self.inputs[0].dtype).to(device)
        self.dout, self.forward = None, None
        if backward:
            if bias_gradient:
                self.bias.requires_grad_()
            self.dout = to_torch(torch, arrays[3], device)
            for tensor in self.inputs:
                tensor.requires_grad_()
            with self._kernel():
                self.forward = self._attention()

    @contextlib.contextmanager
    def _kernel(self):
        """Allow only this back end of torch, and only deterministic algorithms if asked."""
        torch = self.torch
        with contextlib.ExitStack() as stack:
            if self.kind is not None:
                from torch.nn.attention import SDPBackend, sdpa_kernel

                stack.enter_context(sdpa_kernel([getattr(SDPBackend, self.kind)]))
            if self.deterministic:
                torch.use_deterministic_algorithms(True)
                stack.callback(torch.use_deterministic_algorithms, False)
                torch.utils.deterministic.fill_uninitialized_memory = False  # or every new tensor is filled with NaN
            yield

    def _attention(self):
        return self.torch.nn.functional.scaled_dot_product_attention(
            *self.inputs, attn_mask=self.bias, is_causal=self.causal, enable_gqa=self.grouped
        )

    def run(self):
        """One pass: out, or dq, dk and dv."""
        with self._kernel():
            if self.forward is None:
                with self.torch.inference_mode():
                    return [self._attention()]
            of = [*self.inputs, *[self.bias] * (self.bias is not None and self.bias.requires_grad)]
            return self.torch.autograd.grad(self.forward, of, self.dout, retain_graph=True)[:3]

    def seconds(self, times=1):
        """Seconds per pass, over `times` passes; measured with torch's events on a GPU."""
        if not self.on_gpu:
            start = time.perf_counter()
            for _ in range(times):
                self.run()
            return (time.perf_counter() - start) / times
        events = [self.torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.run()  # keeps the GPU busy while the host launches what is measured
        events[0].record()
        for _ in range(times):
            self.run()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / times / 1e3

    def results(self):
        """Those of one pass, NumPy, (tokens, heads, dim)."""
        return [from_torch(self.torch, result) for result in self.run()]


def baselines(arrays, causal, backward, on_gpu):
    """Of every back end of torch by name: {name: (`Sdpa`, its results)}, and {name: why it is not possible}.

    Both are empty where torch is not installed, or sees no GPU for on_gpu.
    """
    torch, possible, missing = load_torch(), {}, {}
    if torch is None or (on_gpu and not torch.cuda.is_available()):
        return possible, missing
    for name, kind, only_backward, deterministic in ON_GPU if on_gpu else ON_CPU:
        if backward or not only_backward:
            try:
                sdpa = Sdpa(torch, arrays, causal, backward, on_gpu, kind, deterministic)
                possible[name] = sdpa, sdpa.results()
            except RuntimeError as error:
                missing[name] = " ".join(str(error).split())[:200]
    return possible, missing
