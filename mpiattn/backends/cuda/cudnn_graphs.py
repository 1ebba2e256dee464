"""cuDNN's attention as graphs: one for each shape of a block, planned once and executed many times.

Arrays are those of the block protocol, (tokens, heads, dim) and (tokens, heads), contiguous; cuDNN takes any strides.
They stay in the inputs' dtype: cuDNN 9.19 plans graphs with float32 results, and writes wrong numbers or none.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

KEPT = 256  # plans; one takes 0.05 to 0.6 s to make
FORWARD = "q", "k", "v", "out", "lse"
BACKWARD = "q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv"


class _Plan(NamedTuple):
    """A graph that can be executed, and the bytes of working memory that it needs."""

    graph: Any
    workspace: int


class Graphs:
    """The graphs of one GPU.

    cudnn: the module.  stream: address of the stream that they run on.  empty: empty(shape, dtype) allocates on it.
    refused: why cuDNN has no plan for a graph, by what describes the graph.
    """

    def __init__(self, cudnn, stream, empty):
        self._cudnn, self._empty, self._plans, self.refused = cudnn, empty, OrderedDict(), {}
        self._handle = cudnn.create_handle()
        cudnn.set_stream(handle=self._handle, stream=stream)

    def close(self):
        """Free the plans and the library's handle."""
        self._plans.clear()
        if self._handle is not None:
            self._cudnn.destroy_handle(self._handle)
            self._handle = None

    def forward(self, q, k, v, out, lse, scale, right):
        """Set (out, lse) to the attention of q to k and v; returns whether cuDNN has done so.

        right: of a `row_runs.Run`.
        """
        return self._run(self._forward_graph, FORWARD, (q, k, v, out, lse), scale, right)

    def backward(self, q, k, v, out, dout, lse, dq, dk, dv, scale, right):
        """Set dq, dk and dv to a block's gradients; returns whether cuDNN has done so.

        lse: over all keys of the row.  out: any with rowsum(dout * out) = delta, of which nothing else is used.
        """
        return self._run(self._backward_graph, BACKWARD, (q, k, v, out, dout, lse, dq, dk, dv), scale, right)

    def _run(self, make, names, arrays, scale, right):
        (tokens, heads, head_dim), (keys, kv_heads, value_dim) = arrays[0].shape, arrays[2].shape
        shape = names, tokens, heads, keys, kv_heads, head_dim, value_dim, arrays[0].dtype.name, scale, right
        plan = self._plan(make, shape)
        if plan is None:
            return False
        pointers = {number: array.data.ptr for number, array in enumerate(arrays)}
        workspace = self._empty((max(plan.workspace, 1),), "uint8")  # an address even if it needs none
        plan.graph.execute(pointers, workspace.data.ptr, handle=self._handle)
        return True

    def _plan(self, make, shape):
        """The plan of a graph that is described by `shape`; None if cuDNN has none."""
        if shape in self.refused:
            return None
        plan = self._plans.get(shape)
        if plan is None:
            try:
                plan = _planned(self._cudnn, make(*shape[1:]))
            except (self._cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
                self.refused[shape] = str(error)
                return None
            self._plans[shape] = plan
            if len(self._plans) > KEPT:
                self._plans.popitem(last=False)
        self._plans.move_to_end(shape)
        return plan

    # The number of a tensor in a graph is that of its name in FORWARD or BACKWARD.

    def _graph(self, dtype):
        types = self._cudnn.data_type
        return self._cudnn.pygraph(
            io_data_type={"float16": types.HALF, "bfloat16": types.BFLOAT16}[dtype],
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self._handle,
        )

    def _mask(self, right):
        """The arguments for a run's staircase: its first row sees `right` keys to the right of the diagonal."""
        if right is None:
            return {}
        return {"diagonal_alignment": self._cudnn.diagonal_alignment.TOP_LEFT, "diagonal_band_right_bound": right}

    def _inputs(self, graph, names, shapes):
        """Input tensors by name; lse is float32, the others have the graph's dtype."""
        tensors = {}
        for name, shape in shapes.items():
            dim, stride = _layout(*shape)
            more = {"data_type": self._cudnn.data_type.FLOAT} if name == "lse" else {}
            tensors[name] = graph.tensor(name=name, uid=names.index(name), dim=dim, stride=stride, **more)
        return tensors

    def _forward_graph(self, tokens, heads, keys, kv_heads, head_dim, value_dim, dtype, scale, right):
        graph = self._graph(dtype)
        shapes = {"q": (tokens, heads, head_dim), "k": (keys, kv_heads, head_dim), "v": (keys, kv_heads, value_dim)}
        inputs = self._inputs(graph, FORWARD, shapes)
        out, lse = graph.sdpa(**inputs, attn_scale=scale, generate_stats=True, name="forward", **self._mask(right))
        _output(out, FORWARD.index("out"), (tokens, heads, value_dim))
        _output(lse, FORWARD.index("lse"), (tokens, heads, 1)).set_data_type(self._cudnn.data_type.FLOAT)
        return graph

    def _backward_graph(self, tokens, heads, keys, kv_heads, head_dim, value_dim, dtype, scale, right):
        graph = self._graph(dtype)
        of_q, of_out = (tokens, heads, head_dim), (tokens, heads, value_dim)
        of_k, of_v = (keys, kv_heads, head_dim), (keys, kv_heads, value_dim)
        shapes = {"q": of_q, "k": of_k, "v": of_v, "out": of_out, "dout": of_out, "lse": (tokens, heads, 1)}
        inputs = self._inputs(graph, BACKWARD, shapes)
        # Its deterministic algorithm is not asked for: that keeps a number for every pair of query and key, 4 GiB for
        # 32 heads of 8192 tokens, and takes a quarter longer.
        gradients = graph.sdpa_backward(
            inputs["q"],
            inputs["k"],
            inputs["v"],
            inputs["out"],
            inputs["dout"],
            inputs["lse"],
            attn_scale=scale,
            name="backward",
            **self._mask(right),
        )
        for name, tensor, shape in zip(("dq", "dk", "dv"), gradients, (of_q, of_k, of_v)):
            _output(tensor, BACKWARD.index(name), shape)
        return graph


def _layout(tokens, heads, columns):
    """(dim, stride) of a contiguous array (tokens, heads, columns), whose batch is 1, in cuDNN's order of axes."""
    return (1, heads, tokens, columns), (tokens * heads * columns, columns, heads * columns, 1)


def _output(tensor, number, shape):
    dim, stride = _layout(*shape)
    return tensor.set_output(True).set_uid(number).set_dim(dim).set_stride(stride)


def _planned(cudnn, graph):
    """The `_Plan` of a graph, the one that cuDNN thinks the quickest."""
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return _Plan(graph, graph.get_workspace_size())
