"""mpiattn.jax: what is refused while JAX traces, what all ranks raise, and how errors come out of compiled code."""

import os

import numpy as np
import pytest
from mpi4py import MPI
from test_agreement import same_error

from mpiattn import ArgumentError, MeshAttention, backends
from mpiattn.errors import KeywordError, VerificationError

if MPI.COMM_WORLD.size > 8:
    pytest.skip("many ranks would take long to load JAX", allow_module_level=True)
# Code that is compiled in half the time; several devices, of which a rank may use one.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=2")
jax = pytest.importorskip("jax", reason="jax is not installed (the jax extra has it)")

import jax.numpy as jnp  # noqa: E402  (needs jax)

from mpiattn import jax as ours  # noqa: E402
from mpiattn.jax import attention  # noqa: E402

NAMES = ("q", "k", "v", "sinks")


@pytest.fixture
def plan(comm):
    with MeshAttention(comm, seqlen=26, heads=2, head_dim=4, causal=True) as made:
        yield made


@pytest.fixture
def given(plan):
    chunks = np.random.default_rng(plan.chunk).standard_normal((3, 1, len(plan.positions), 2, 4), np.float32)
    return {**dict(zip("qkv", map(jnp.asarray, chunks))), "sinks": jnp.ones(2)}


def from_compiled(comm, call):
    """The last line of the error that compiled code raises, after checking that all ranks raise the same."""
    with pytest.raises(RuntimeError) as caught:
        jax.block_until_ready(call())
    assert type(caught.value) is jax.errors.JaxRuntimeError
    lines = comm.allgather(str(caught.value).strip().splitlines()[-1])
    assert len(set(lines)) == 1, lines
    return lines[0]


WRONG = {
    "array": (np.asarray, "is a ndarray; it must be a JAX array"),
    "none": (lambda x: None, "is a NoneType; it must be a JAX array"),
    "dtype": (lambda x: x.astype(jnp.bfloat16), "has dtype bfloat16; it must be float32"),
    "tokens": (lambda x: x[:, :-1] if x.ndim > 1 else x[:-1], "has shape"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_on_one_rank(comm, plan, given, name, wrong):
    if wrong == "none" and name in ("v", "sinks"):
        return
    change, says = WRONG[wrong]
    guilty = comm.size - 1
    if comm.rank == guilty:
        given[name] = change(given[name])
    text = same_error(comm, lambda: attention(plan, **given))
    assert text.startswith(f"{name} ") and says in text
    assert comm.size == 1 or f"on rank {guilty} of" in text


def test_wrong_while_jax_traces(comm, plan, given):
    """On the rank that is wrong, before anything is sent; it can go on."""
    wrong = [
        ("q", lambda x: x.astype(jnp.float16), "q has dtype float16; it must be float32"),
        ("k", lambda x: x[:, :, :1], "k has shape"),
        ("q", lambda x: x[0], "q has shape"),
        ("v", lambda x: None, "v is None; it must be an array"),
        ("sinks", lambda x: jnp.ones(3), r"sinks has shape \(3,\); on this rank it must be \(heads,\) = \(2,\)"),
        ("sinks", lambda x: [1.0, 2.0], "sinks is a list; it must be a JAX array"),
        ("dropout", lambda x: jnp.float32(0.5), "dropout is or has a JAX array; it must be a value that is no JAX"),
        ("cu_seqlens", lambda x: [jnp.int32(0), 26], "cu_seqlens is or has a JAX array; it must be one JAX array"),
        ("seed", lambda x: jnp.float32(1), "seed has shape .* and dtype float32; it must be one whole number"),
        ("seed", lambda x: jax.random.key(1), "seed has shape .* and dtype key.*; it must be one whole number"),
        ("verify", lambda x: 1, "verify is 1; it must be True or False"),
        ("bias_shared", lambda x: ["heads"], "bias_shared is given without bias"),
    ]
    for name, change, says in wrong if comm.rank == comm.size - 1 else []:
        changed = given | {name: change(given.get(name))}
        with pytest.raises(ArgumentError, match=says):
            jax.jit(lambda q, changed=changed: attention(plan, **changed | ({"q": q} if q.ndim else {})))(changed["q"])
    assert jnp.isfinite(attention(plan, **given)[0]).all()


def test_errors_of_compiled_code(comm, plan, given):
    """Those of one rank too, and the plan goes on: numbers of tokens, documents, a passes' own."""
    last = comm.rank == comm.size - 1
    compiled = jax.jit(lambda given: attention(plan, **given))
    q = given["q"][:, :-1] if last else given["q"]
    for loss in (compiled, jax.jit(jax.grad(lambda given: compiled(given)[0].sum()))):
        text = from_compiled(comm, lambda loss=loss: loss(given | {"q": q}))
        assert "ArgumentError: q has shape" in text and "with the tokens of plan.positions" in text
    if comm.size > 1:
        text = from_compiled(comm, lambda: compiled(given | {"sinks": given["sinks"] + last}))
        assert "ArgumentError: sinks is [1.0, 1.0] on rank 0 but [2.0, 2.0] on rank" in text
    documents = jax.jit(lambda cuts: attention(plan, **given, cu_seqlens=cuts))
    assert "cu_seqlens" in from_compiled(comm, lambda: documents(jnp.array([0, 30, 26])))
    assert jnp.isfinite(compiled(given)[0]).all()


def test_transforms_are_refused(plan, given):
    q = given.pop("q")

    def loss(q):
        return attention(plan, q, **given)[0].sum()

    refused = {
        "q is used inside jax.vmap": lambda: jax.vmap(loss)(q[None]),
        "^q is used inside jax.vmap": lambda: jax.vmap(jax.jit(loss))(q[None]),
        "dout is used inside jax.vmap": lambda: jax.jacrev(lambda q: attention(plan, q, **given)[0])(q),
        "pmap": lambda: jax.pmap(loss)(q[None]),
        "cannot be differentiated again": lambda: jax.grad(lambda q: jax.grad(loss)(q).sum())(q),
        "gradients of mpiattn": lambda: jax.jit(jax.hessian(loss))(q),
        "forward-mode": lambda: jax.jvp(loss, (q,), (q,)),
    }
    for says, call in refused.items():
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=says):
            call()
    assert jnp.isfinite(loss(q))


def test_several_devices_are_refused(plan, given):
    mesh, spec = jax.make_mesh((2,), ("devices",)), jax.sharding.PartitionSpec()
    spread = jax.shard_map(lambda q: attention(plan, **given | {"q": q})[0], mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(ArgumentError, match=r"inside jax.pmap or jax.shard_map, over devices; a rank makes each call"):
        spread(given["q"])
    q = jax.device_put(given["q"], jax.sharding.NamedSharding(mesh, spec))
    with pytest.raises(
        ArgumentError, match="q is spread over several devices of JAX; each rank's arrays must be on one"
    ):
        jax.jit(lambda q: attention(plan, **given | {"q": q}))(q)


def test_plans_that_jax_cannot_have(comm, plan, given, monkeypatch):
    with MeshAttention(comm, seqlen=26, heads=2, head_dim=4, dtype="float64") as double:
        text = same_error(comm, lambda: attention(double, **given))
        assert "float64, which JAX has only after jax.config.update('jax_enable_x64', True)" in text
    monkeypatch.setattr(backends, "find", lambda name: backends.registry.REGISTRY["cuda"])
    assert "takes plans that compute on the CPU" in same_error(comm, lambda: attention(plan, **given))
    plan.close()
    with pytest.raises(ArgumentError, match="the plan is closed"):
        attention(plan, **given)


def test_unknown_keyword(comm, plan, given):
    text = same_error(comm, lambda: attention(plan, **given, is_causal=True), KeywordError)
    assert "mpiattn.jax.attention" in text and "is_causal" in text


@pytest.mark.parametrize("wrong", ["nothing", "out", "dk"])
def test_verified(comm, plan, given, monkeypatch, wrong):
    """A result that is wrong on one rank is found in its pass."""
    forward, backward, guilty = MeshAttention.forward, MeshAttention.backward, comm.size - 1

    def spoilt(self, results, name):
        if wrong == name and comm.rank == guilty:
            results[name == "dk"][:, -1] += 1
        return results

    monkeypatch.setattr(MeshAttention, "forward", lambda self, *a, **o: spoilt(self, forward(self, *a, **o), "out"))
    monkeypatch.setattr(MeshAttention, "backward", lambda self, *a, **o: spoilt(self, backward(self, *a, **o), "dk"))

    def loss(given):
        return attention(plan, **given, verify=True)[0].sum()

    if wrong == "nothing":
        assert all(jnp.isfinite(grad).all() for grad in jax.jit(jax.grad(loss))(given).values())
        return
    call, says = loss if wrong == "out" else jax.grad(loss), f"{wrong} off by"
    assert says in same_error(comm, lambda: call(given), VerificationError)
    assert says in from_compiled(comm, lambda: jax.jit(call)(given))


def test_a_jax_without_the_lists_of_effects(monkeypatch):
    from jax._src import effects

    monkeypatch.delattr(effects, "remat_allowed_effects")
    with pytest.warns(RuntimeWarning, match=r"may refuse mpiattn.jax.attention in jax.checkpoint"):
        ours._allow_callbacks()
