"""mpiattn.jax: values and gradients beside dense JAX, the order of calls, and what is compiled how often."""

import os
import time
from functools import partial

import numpy as np
import pytest
from dense import bits
from mpi4py import MPI
from runs import agreed, once, tiles

from mpiattn import MeshAttention
from mpiattn.verify import reference

if MPI.COMM_WORLD.size > 8:
    pytest.skip("many ranks would take long to load JAX", allow_module_level=True)
# Code that is compiled in half the time; several devices, of which a rank may use one.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=2")
jax = pytest.importorskip("jax", reason="jax is not installed (the jax extra has it)")

import jax.numpy as jnp  # noqa: E402  (needs jax)
from jax.experimental import io_callback  # noqa: E402

from mpiattn.jax import attention  # noqa: E402

TOLERANCE = 2e-5  # of the largest value
SHAPE = {"batch": 2, "seqlen": 37, "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6, "causal": True}
DOCUMENTS = {
    "cu_seqlens": [0, 5, 5, 21, 37],
    "prefixes": [3, 0, 100, 8],
    "causal_documents": [True, False, True, False],
}
BIASES = ("bias", "key_bias", "alibi_slopes", "relative_bias")


def draw(plan, names, shared=False):
    """Whole arrays by name, of values that the plan's dtypes have, the same on every rank; shared: one bias for all."""
    p, numbers = plan.problem, np.random.default_rng(0)
    queries, keys = (p.batch, p.seqlen, p.heads), (p.batch, p.seqlen_k, p.kv_heads)
    shapes = {
        "q": (*queries, p.head_dim),
        "k": (*keys, p.head_dim),
        "v": (*keys, p.value_dim),
        "dout": (*queries, p.value_dim),
        "dlse": (p.batch, p.heads, p.seqlen),
        "sinks": (p.heads,),
        "bias": (1, 1 if shared else p.heads, p.seqlen, p.seqlen_k),
        "key_bias": (p.heads, p.seqlen_k),
        "alibi_slopes": (p.heads,),
        "relative_bias": (1, 9),
    }
    return {
        name: numbers.standard_normal(shape).astype(p.dtype if name in ("q", "k", "v", "dout") else p.partial_dtype)
        for name, shape in shapes.items()
        if name in ("q", "k", "v", "dout", "dlse", *names)
    }


def place(plan, name, heads=1):
    """Index of this rank's part in a whole array.  heads: of a bias."""
    if name == "bias":
        rows, columns = plan.bias_positions
        return slice(None), plan.bias_heads if heads > 1 else slice(None), rows[:, None], columns
    if name in ("key_bias", "dlse", "lse"):
        return ..., plan.positions_k if name == "key_bias" else plan.positions
    return (slice(None), plan.positions_k if name in "kv" else plan.positions) if name in "qkv dout" else ...


def own(plan, whole):
    """This rank's parts as JAX arrays, and those with gradients by themselves."""
    parts = {name: jnp.asarray(array[place(plan, name, array.shape[1 % array.ndim])]) for name, array in whole.items()}
    return {name: part for name, part in parts.items() if name not in ("dout", "dlse")}, parts


def dense(p, whole, documents):
    """(out, lse) of the whole problem, by JAX alone."""
    q, k, v = (whole[name] for name in "qkv")
    k, v = (jnp.repeat(x, p.heads // p.kv_heads, 2) for x in (k, v))
    score = p.scale * jnp.einsum("bihd,bjhd->bhij", q, k)
    far = np.arange(p.seqlen) - np.arange(p.seqlen)[:, None]
    score += whole.get("bias", 0)
    if "key_bias" in whole:
        score += whole["key_bias"][:, None]
    if "alibi_slopes" in whole:
        score -= whole["alibi_slopes"][:, None, None] * np.abs(far)
    if "relative_bias" in whole:
        score += whole["relative_bias"][:, np.clip(far, -4, 4) + 4]
    at = np.arange(p.seqlen)
    visible = reference.visible_keys(at, at, (p.seqlen, p.seqlen), causal=p.causal, **documents)
    score = jnp.where(visible, score, -jnp.inf)
    lse = jax.nn.logsumexp(score, 3)
    if "sinks" in whole:
        lse = jnp.logaddexp(lse, whole["sinks"][:, None])
    return jnp.einsum("bhij,bjhd->bihd", jnp.exp(score - lse[..., None]), v), lse


def loss_of(results, given):
    """The loss, and the results, as jax.value_and_grad(has_aux=True) takes them."""
    out, lse = results
    return (out.astype(lse.dtype) * given["dout"].astype(lse.dtype)).sum() + (lse * given["dlse"]).sum(), results


CASES = {
    "plain": ({}, {}, ()),
    "documents": ({}, DOCUMENTS, ("sinks",)),
    "biases": ({"key_bias": True}, {}, BIASES),
    "planes": ({"tile": "planes", "key_bias": True}, {}, (*BIASES, "sinks")),
    "pieces": ({"tile": "bands", "key_bias": True}, {}, (*BIASES[1:], "sinks")),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_dense_jax(comm, case):
    options, documents, names = CASES[case]
    options = SHAPE | {"tile": tiles(comm.size)[-1]} | options
    if options["tile"] == "planes":  # which have the same tile of a bias
        options |= {"tile": f"{comm.size}x1x1", "heads": 2 * comm.size, "kv_heads": comm.size}
    with MeshAttention(comm, **options, layout="zigzag") as plan:
        whole = draw(plan, names, shared=case == "planes")
        parts, given = own(plan, whole)
        how = documents | ({"bias_shared": ["batch", "heads"]} if case == "planes" else {})

        def loss(parts):
            return loss_of(attention(plan, **parts, **how), given)

        def dense_loss(leaves):
            return loss_of(dense(plan.problem, leaves, documents), whole)

        (_, (out, lse)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(parts)
        leaves = {name: whole[name] for name in parts}
        right, expected = once(
            comm, lambda: jax.device_get(jax.jit(jax.value_and_grad(dense_loss, has_aux=True))(leaves))
        )
        pairs = {name: (x, y[place(plan, name)]) for name, x, y in zip(("out", "lse"), (out, lse), right[1])}
        for name, grad in grads.items():
            zeros = np.zeros(whole[name].shape)
            zeros[place(plan, name, zeros.shape[1 % zeros.ndim])] = grad
            pairs[f"d{name}"] = comm.allreduce(zeros), expected[name]
    off = {name: np.abs(x - y).max(initial=0) / max(np.abs(y).max(initial=0), 0.1) for name, (x, y) in pairs.items()}
    complaints = {name: error for name, error in off.items() if not error < TOLERANCE}
    agreed(comm, complaints and str(complaints))


@pytest.fixture
def calls(monkeypatch):
    """The passes of all plans, in the order in which they begin: (plan, name, keywords)."""
    seen = []

    def recorded(name):
        run = getattr(MeshAttention, name)

        def call(self, *arrays, **options):
            seen.append((self, name, options))
            return run(self, *arrays, **options)

        return call

    for name in ("forward", "backward"):
        monkeypatch.setattr(MeshAttention, name, recorded(name))
    return seen


@pytest.fixture
def plan(comm):
    with MeshAttention(comm, seqlen=26, heads=2, head_dim=4, causal=True) as made:
        yield made


@pytest.fixture
def qkv(plan):
    numbers = np.random.default_rng(plan.chunk)
    return [*map(jnp.asarray, numbers.standard_normal((3, 1, len(plan.positions), 2, 4), np.float32))]


def test_the_same_however_it_is_differentiated(plan, qkv, calls):
    """jax.checkpoint keeps the results of a call: each pass runs once."""

    def layers(q, k, v):
        out, lse = attention(plan, q * 2, k, v)
        again, _ = attention(plan, jnp.sin(out), k, v, cu_seqlens=[0, 9, 26])
        return again.sum() + lse.sum()

    expected = None
    of_all = (0, 1, 2)
    for grad in (
        jax.grad(layers, of_all),
        jax.jit(jax.grad(layers, of_all)),
        jax.grad(jax.jit(layers), of_all),
        jax.grad(jax.checkpoint(layers), of_all),
        jax.jit(jax.grad(jax.checkpoint(layers), of_all)),
    ):
        calls.clear()
        grads = grad(*qkv)
        assert [name for _, name, _ in calls] == ["forward", "forward", "backward", "backward"]
        expected = expected or grads
        for got, ref in zip(grads, expected):  # what is between the calls may be rounded elsewhere
            np.testing.assert_allclose(got, ref, rtol=1e-5, atol=1e-6)


def test_scan_over_layers(plan, qkv, calls):
    weights = jnp.linspace(0.5, 1, 3)

    def layer(q, weight):
        return attention(plan, q * weight, *qkv[1:])[0], None

    def loss(weights, q, layer=layer):
        q, _ = jax.lax.scan(layer, q, weights)
        return (q**2).sum()

    def unrolled(weights, q):
        for weight in weights:
            q, _ = layer(q, weight)
        return (q**2).sum()

    expected = jax.grad(unrolled, (0, 1))(weights, qkv[0])
    for again in (layer, jax.checkpoint(layer)):
        calls.clear()
        grads = jax.jit(jax.grad(partial(loss, layer=again), (0, 1)))(weights, qkv[0])
        assert [name for _, name, _ in calls] == ["forward"] * 3 + ["backward"] * 3
        for got, ref in zip(grads, expected):
            np.testing.assert_allclose(got, ref, rtol=1e-4, atol=1e-5)


def test_compiled_once(plan, qkv):
    """Documents and a seed that are JAX arrays change from step to step; results are those of the plan's own calls."""
    traced = []

    @jax.jit
    def step(qkv, cuts, seed):
        traced.append(1)
        results, pull = jax.vjp(lambda *qkv: attention(plan, *qkv, cu_seqlens=cuts, dropout=0.4, seed=seed), *qkv)
        return results, pull(results)

    arrays = [*map(np.asarray, qkv)]
    made = set()
    for number, cuts in enumerate(([0, 9, 26], [0, 20, 26], [0, 26, 26])):
        (out, lse), grads = step(qkv, jnp.asarray(cuts), jnp.uint32(2**31 + number))
        given = {"cu_seqlens": cuts, "dropout": 0.4, "seed": 2**31 + number}
        right = plan.forward(*arrays, **given)
        expected = plan.backward(right[0], *arrays, *right, dlse=right[1], **given)
        assert bits(out, lse, *grads) == bits(*right, *expected)
        made |= {bits(out)} if len(plan.positions) else {number}
    assert len(traced) == 1 and len(made) == 3


def test_order_of_calls(comm, plan, qkv, calls):
    """That of the program on every rank, although nothing but their order joins the calls, and ranks come late."""
    q, k, v = qkv
    work = jnp.ones((150, 150))

    def late(x, steps):
        """x, after so many steps of work."""
        return x + 0 * jax.lax.fori_loop(0, steps, lambda _, w: jnp.tanh(w @ work), work).sum()

    with MeshAttention(comm, seqlen=26, heads=2, head_dim=4) as other:

        @jax.jit
        def loss(q, first, second):
            a, _ = attention(plan, late(q, first), k, v)
            io_callback(lambda: calls.append((None, "of the program", {})), None, ordered=True)
            b, _ = attention(other, late(q, second), k, v)
            attention(plan, q, k, v)  # whose results nobody uses
            return late(a.sum(), second) * 2 + late(b.sum(), first)

        steps = [300, 0] if comm.rank % 2 else [0, 300]
        for _ in range(2):
            calls.clear()
            time.sleep(0.1 * (comm.rank % 3))
            jax.grad(loss)(q, *steps).block_until_ready()
            order = [(made is plan, name) for made, name, _ in calls]
            assert [name for _, name in order[:4]] == ["forward", "of the program", "forward", "forward"]
            assert [of_plan for of_plan, _ in order[:4]] == [True, False, False, True]
            assert sorted(order[4:]) == [(False, "backward"), (True, "backward")]
            assert len(set(comm.allgather(tuple(order)))) == 1


def test_calls_under_a_condition(plan, qkv, calls):
    def loss(q, condition):
        return jax.lax.cond(condition, lambda q: attention(plan, q, *qkv[1:])[0], lambda q: 2 * q, q).sum()

    grad = jax.jit(jax.grad(loss))
    assert (grad(qkv[0], False) == 2).all() and not calls
    assert (grad(qkv[0], True) == jax.grad(lambda q: attention(plan, q, *qkv[1:])[0].sum())(qkv[0])).all()
    assert [name for _, name, _ in calls] == ["forward", "backward"] * 2


@pytest.mark.parametrize("then", ["a call", "the end"])
def test_compiled_calls_that_still_run(comm, calls, then):
    """What JAX does not trace comes after what it runs in the background; so does the end of a plan."""

    @jax.jit
    def slow(x):
        return x + 0 * jax.lax.fori_loop(0, 600, lambda _, w: jnp.tanh(w @ w), jnp.ones((200, 200))).sum()

    with MeshAttention(comm, seqlen=26, heads=2, head_dim=4) as plan:
        q = jnp.ones((1, len(plan.positions), 2, 4))
        compiled = jax.jit(lambda q: attention(plan, q, q, q, cu_seqlens=[0, 3, 26]))
        jax.block_until_ready([compiled(q), slow(q), attention(plan, q, q, q)])
        calls.clear()
        running = compiled(slow(q))  # which JAX begins when its argument is there
        if then == "a call":
            attention(plan, q, q, q)
    assert [options["cu_seqlens"] is None for _, _, options in calls] == [False, True][: 1 + (then == "a call")]
    jax.block_until_ready(running)


def test_only_gradients_that_are_wanted(plan, qkv, calls):
    """Those of a bias take its memory once more; a loss that does not depend on lse has no dlse."""
    rows, columns = plan.bias_positions
    bias, slopes = jnp.zeros((1, 2, len(rows), len(columns))), jnp.ones(2)

    def loss(q, bias, slopes):
        return attention(plan, q, *qkv[1:], bias=bias, alibi_slopes=slopes)[0].sum()

    for number, wanted in ((0, []), (1, ["bias"]), (2, ["alibi_slopes"])):
        for grad in (jax.grad(loss, number), jax.jit(jax.grad(loss, number)), jax.grad(jax.checkpoint(loss), number)):
            calls.clear()
            grad(qkv[0], bias, slopes)
            assert calls[-1][2]["bias_gradients"] == wanted and calls[-1][2]["dlse"] is None
    dq, dv = jax.jit(jax.grad(lambda q, v: attention(plan, q, qkv[1], v)[1].sum(), (0, 1)))(qkv[0], qkv[2])
    assert jnp.isfinite(dq).all() and not dv.any()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_bits_are_those_of_the_plan(comm, dtype):
    """In every dtype; with one array for keys and values in float32."""
    shared, x64 = dtype == "float32", dtype == "float64"
    options = {
        "seqlen": 26,
        "heads": 2,
        "head_dim": 4,
        "value_dim": 3,
        "dtype": dtype,
        "shared_kv": shared,
        "scale": 0.5,
    }
    try:
        jax.config.update("jax_enable_x64", x64)
        with MeshAttention(comm, **options) as plan:
            whole = draw(plan, ["sinks"])
            parts, given = own(plan, whole)
            if shared:
                del parts["v"]

            def loss(parts):
                return loss_of(attention(plan, **parts), given)

            (_, results), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(parts)
            q, k, v, sinks, dout, dlse = (
                np.asarray(given[name]) if name in (*parts, "dout", "dlse") else None
                for name in ("q", "k", "v", "sinks", "dout", "dlse")
            )
            right = plan.forward(q, k, v, sinks=sinks)
            expected = plan.backward(dout, q, k, v, *right, dlse=dlse, sinks=sinks)
            assert bits(*results) == bits(*right) and {x.dtype for x in results} == {x.dtype for x in right}
            expected = dict(zip(("q", "k", "v", "sinks"), expected))
            expected["sinks"] = expected["sinks"] / comm.size
            assert bits(*grads.values()) == bits(*(expected[name] for name in grads))
            assert all(grads[name].dtype == part.dtype for name, part in parts.items())
    finally:
        jax.config.update("jax_enable_x64", False)
