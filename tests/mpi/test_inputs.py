"""Arrays as programs have them: not contiguous, transposed, read-only; never changed."""

from itertools import product

import numpy as np
import pytest
from dense import bits, draw, draw_all
from runs import attend, my_chunks

from mpiattn import ArgumentError, MeshAttention, attention, merge

SHAPE = {"batch": 2, "seqlen": 37, "heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float32", "causal": True}


def strided(array):
    big = np.full((*array.shape[:-1], 2 * array.shape[-1]), np.nan, array.dtype)
    big[..., ::2] = array
    return big[..., ::2]


def reversed_memory(array):
    return array[:, ::-1].copy()[:, ::-1]


def heads_first(array):
    return array.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)


def fortran(array):
    return np.asfortranarray(array)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def misaligned(array):
    raw = np.empty(array.nbytes + 1, np.uint8)[1:]
    view = raw.view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def other(kind, array):
    """An array of that memory layout, lse and dlse by way of a fourth dimension."""
    return kind(array) if array.ndim == 4 else kind(array[..., None])[..., 0]


KINDS = strided, reversed_memory, heads_first, fortran, read_only, misaligned


@pytest.mark.draw(6)
@pytest.mark.parametrize(
    "kind, batch, schedule, backend", list(product(KINDS, [1, 2], ["greedy", "collective"], ["numpy", "deferred"]))
)
def test_case_24_any_memory_layout(comm, kind, batch, schedule, backend):
    """Of q, k, v, and backward of dout, out, lse and dlse too."""
    with MeshAttention(comm, **{**SHAPE, "batch": batch}, schedule=schedule, backend=backend) as plan:
        chunks = my_chunks(plan, *draw_all(plan.problem))
        expected = attend(plan, chunks)
        given = chunks._replace(**{name: other(kind, getattr(chunks, name)) for name in chunks._fields[:5]})
        out, lse = kind(expected.out), other(kind, expected.lse)
        before = bits(*given, out, lse)
        assert bits(*plan.forward(*given[:3])) == bits(*expected[:2])
        grads = plan.backward(given.dout, *given[:3], out, lse, dlse=given.dlse)
        assert bits(*grads) == bits(*expected[2:])
        assert bits(*given, out, lse) == before


@pytest.mark.parametrize("backend", ["numpy", "deferred"])
def test_one_array_as_q_k_and_v(comm, backend):
    with MeshAttention(comm, seqlen=29, heads=2, head_dim=4, backend=backend) as plan:
        chunk = my_chunks(plan, *draw(plan.problem))[0]
        assert bits(*plan.forward(chunk, chunk, chunk)) == bits(*plan.forward(chunk, chunk.copy(), chunk.copy()))


def test_unsuitable_arrays_are_refused(comm):
    with MeshAttention(comm, seqlen=4 * comm.size, heads=2, head_dim=4, dtype="float32") as plan:
        good = np.ones((1, 4, 2, 4), np.float32)
        for bad, text in (
            (good.tolist(), "list"),
            (good.astype(np.float64), "float64"),
            (good[0], r"\(4, 2, 4\)"),
            (good.astype(">f4"), ">f4"),
            (good[:, :2], r"\(1, 2, 2, 4\)"),
            (None, "None"),
        ):
            for position, name in enumerate("qkv"):
                arrays = [good, good, good]
                arrays[position] = bad
                with pytest.raises(ArgumentError, match=f"^{name} (is|has) .*{text}"):
                    plan.forward(*arrays)
        plan.forward(good, good, good)


class Interface:
    """An array of another library: memory, and one way to take it."""

    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self.array = array


class DLPack:
    """The same with another way, which NumPy may look up in the class."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("other", [Interface, DLPack])
def test_arrays_of_other_libraries(comm, other):
    rng = np.random.default_rng(comm.rank)
    q, k, v = rng.standard_normal((3, 1, 4, 2, 8), np.float32)
    expected = attention(q, k, v, comm=comm)
    assert bits(*attention(*(other(array) for array in (q, k, v)), comm=comm)) == bits(*expected)
    assert bits(*merge(*(other(array) for array in expected * 2))) == bits(*merge(*expected * 2))
    with MeshAttention(comm, seqlen=4 * comm.size, heads=2, head_dim=8, layout="contiguous") as plan:
        out = np.empty_like(expected[0])
        into = Interface(out)  # DLPack's are read-only in some versions of NumPy
        plan.forward(other(q), other(k), v, out=into)
        assert np.allclose(out, expected[0], atol=1e-6)
        whole = plan.gather(other(q))
        assert comm.rank or (whole[:, :4] == q).all()


def test_arrays_in_another_order_of_axes(comm):
    with MeshAttention(comm, seqlen=4 * comm.size, heads=2, head_dim=8) as plan:
        good = np.ones((1, 4, 2, 8), np.float32)
        with pytest.raises(ArgumentError) as caught:
            plan.forward(good.swapaxes(1, 2), good, good)
    assert str(caught.value).startswith(
        "q has shape (1, 2, 4, 8); on this rank it must be (batch, tokens, heads, head_dim) = (1, 4, 2, 8), with the "
        "tokens of plan.positions; axes 1 and 2 are swapped"
    )


def test_the_programs_error_state_does_not_matter(comm):
    """Partials that underflow on the wire are no FloatingPointError, on one rank or on all."""
    shape = {"seqlen": 30 * comm.size, "heads": 2, "head_dim": 8, "tile": (1, comm.size), "wire_dtype": "float16"}
    with MeshAttention(comm, **shape) as plan, np.errstate(all="raise"):
        q, k, v = (1e-3 * array for array in my_chunks(plan, *draw(plan.problem)))
        out, lse = plan.forward(q, k, v)
        plan.backward((1e-5 * out).astype(out.dtype), q, k, v, out, lse)


def test_infinite_gradients_where_the_program_traps(comm):
    """Those of sinks too, which on two ranks may be infinite of both signs."""
    with MeshAttention(comm, seqlen=4 * comm.size, heads=2, head_dim=8) as plan, np.errstate(all="raise"):
        q, k, v = my_chunks(plan, *draw(plan.problem))
        sinks, v = np.zeros(2, np.float32), abs(v)  # so that products with v have the sign of dout
        out, lse = plan.forward(q, k, v, sinks=sinks)
        dout = np.full_like(out, (-1) ** comm.rank * np.inf)
        *_, dsinks = plan.backward(dout, q, k, v, out, lse, sinks=sinks)
    assert not np.isfinite(dsinks).any()


@pytest.mark.parametrize(
    "how", [{"root": 1.5}, {"root": lambda: 0}, {"root": -1}, {"axis": "1"}, {"axis": None}, {"axis": 9}]
)
def test_wrong_arguments_of_gather(comm, how):
    """On the last rank alone: the same error on all, and the plan goes on."""
    with MeshAttention(comm, seqlen=9, heads=2, head_dim=4) as plan:
        chunk = np.ones((1, len(plan.positions), 2, 4), np.float32)
        for call in (plan.gather, plan.scatter):
            with pytest.raises(ArgumentError, match=f"^{next(iter(how))} is|^array"):
                call(
                    chunk if call == plan.gather else np.ones((1, 9, 2, 4), np.float32),
                    **how if comm.rank == comm.size - 1 else {},
                )
        masked = np.ma.masked_array(chunk)
        with pytest.raises(ArgumentError, match="MaskedArray"):
            plan.gather(masked)
        plan.forward(chunk, chunk, chunk)
