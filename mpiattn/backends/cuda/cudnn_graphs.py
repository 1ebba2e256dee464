"""cuDNN's attention as graphs: one for each shape of a block, planned once and executed many times.

Arrays are those of the block protocol, (tokens, heads, dim) and (tokens, heads), contiguous; cuDNN takes any strides.
They stay in the inputs' dtype: cuDNN 9.19 plans graphs with float32 results, and writes wrong numbers or none.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

KEPT = 256  # plans; one takes 0.05 to 0.6 s to make
FORWARD = "q", "k", "v", "out", "lse"
BACKWARD = "q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv"


class Shape(NamedTuple):
    """What describes a graph.  names: FORWARD or BACKWARD.  right: of a `row_runs.Run`."""

    names: tuple
    tokens: int
    heads: int
    keys: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    scale: float
    right: int | None


class _Plan(NamedTuple):
    """A graph that can be executed, and the bytes of working memory that it needs."""

    graph: Any
    workspace: int


class Graphs:
    """The graphs of one GPU.

    cudnn: the module.  stream: address of the stream that they run on.  empty: empty(shape, dtype) allocates on it.
    refused: why cuDNN has no plan for a graph, by its `Shape`.
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

    def run(self, names, arrays, scale, right):
        """Compute the results among some arrays; returns whether cuDNN has done so.

        names: FORWARD or BACKWARD.  arrays: in the order of these.  right: of a `row_runs.Run`.
        Backward lse is over all keys of the row, and out is any with rowsum(dout * out) = delta, of which nothing else
        is used.
        """
        (tokens, heads, head_dim), (keys, kv_heads, value_dim) = arrays[0].shape, arrays[2].shape
        dims = tokens, heads, keys, kv_heads, head_dim, value_dim
        plan = self._plan(Shape(names, *dims, arrays[0].dtype.name, scale, right))
        if plan is None:
            return False
        pointers = {number: array.data.ptr for number, array in enumerate(arrays)}
        workspace = self._empty((max(plan.workspace, 1),), "uint8")  # an address even if it needs none
        plan.graph.execute(pointers, workspace.data.ptr, handle=self._handle)
        return True

    def _plan(self, shape):
        """The plan of a graph that is described by a `Shape`; None if cuDNN has none."""
        if shape in self.refused:
            return None
        plan = self._plans.get(shape)
        if plan is None:
            try:
                make = self._forward_graph if shape.names is FORWARD else self._backward_graph
                plan = _planned(self._cudnn, make(shape))
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

    def _forward_graph(self, of):
        graph, shapes = self._graph(of.dtype), _shapes(of)
        inputs = self._inputs(graph, FORWARD, {name: shapes[name] for name in ("q", "k", "v")})
        out, lse = graph.sdpa(
            **inputs, attn_scale=of.scale, generate_stats=True, name="forward", **self._mask(of.right)
        )
        _output(out, FORWARD.index("out"), shapes["out"])
        _output(lse, FORWARD.index("lse"), shapes["lse"]).set_data_type(self._cudnn.data_type.FLOAT)
        return graph

    def _backward_graph(self, of):
        graph, shapes = self._graph(of.dtype), _shapes(of)
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
            attn_scale=of.scale,
            name="backward",
            **self._mask(of.right),
        )
        for name, tensor in zip("qkv", gradients):
            _output(tensor, BACKWARD.index("d" + name), shapes[name])
        return graph


def _shapes(of):
    """Shapes of the inputs of a backward graph, by name: those of a forward graph are among them."""
    of_q, of_out = (of.tokens, of.heads, of.head_dim), (of.tokens, of.heads, of.value_dim)
    of_k, of_v = (of.keys, of.kv_heads, of.head_dim), (of.keys, of.kv_heads, of.value_dim)
    return {"q": of_q, "k": of_k, "v": of_v, "out": of_out, "dout": of_out, "lse": (of.tokens, of.heads, 1)}


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
