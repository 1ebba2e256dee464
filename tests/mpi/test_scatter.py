"""Scatter, gather and positions."""

import random

import divisions
import numpy as np
import pytest
from runs import agreed

from mpiattn import ArgumentError, Layout, MeshAttention
from mpiattn.backends import wire
from mpiattn.comm import rounds, whole_arrays
from mpiattn.problem.problem import dtype_name


def plan_of(comm, layout, seqlen, seqlen_k=None):
    return MeshAttention(comm, seqlen=seqlen, seqlen_k=seqlen_k, heads=1, head_dim=1, layout=layout)


def uneven(comm, seqlen):
    sizes = [0] * comm.size
    sizes[-1] = seqlen - seqlen // 3
    sizes[0] += seqlen - sum(sizes)
    return Layout("contiguous", seqlen, comm.size, tuple(sizes))


def drawn(comm, seqlen):
    return divisions.either(random.Random(f"{seqlen} {comm.size}"), seqlen, comm.size)


LAYOUTS = ("contiguous", "striped", "zigzag", uneven, drawn)


@pytest.mark.draw(6)
@pytest.mark.many
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seqlen", [0, 1, 5, 61])
def test_case_23_scatter_then_gather(comm, layout, seqlen):
    layout = layout(comm, seqlen) if callable(layout) else layout
    with plan_of(comm, layout, seqlen) as plan:
        for axis, shape in ((1, (2, seqlen, 3)), (2, (2, 3, seqlen)), (0, (seqlen,))):
            whole = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
            own = np.take(whole, plan.positions, axis)
            for root in (None, 0, comm.size - 1):
                given = whole if root in (None, comm.rank) else None
                chunk = plan.scatter(given, root=root, axis=axis)
                same = chunk.dtype == whole.dtype and np.array_equal(chunk, own) and chunk.flags.c_contiguous
                agreed(comm, None if same else f"scatter from {root} along {axis}")
                back = plan.gather(chunk, root=root, axis=axis)
                right = np.array_equal(back, whole) if root in (None, comm.rank) else back is None
                agreed(comm, None if right else f"gather to {root} along {axis}")


@pytest.mark.many
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_positions_cover_the_sequence_once(comm, layout):
    with plan_of(comm, layout, 53, 17) as plan:
        for positions, total in ((plan.positions, 53), (plan.positions_k, 17)):
            assert positions.dtype == np.int64 and (np.diff(positions) > 0).all()
            assert sorted(np.concatenate(comm.allgather(positions))) == list(range(total))


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag", uneven])
def test_owners_hold_their_positions(comm, layout):
    layout = (layout(comm, 53), layout(comm, 17)) if callable(layout) else layout
    with plan_of(comm, layout, 53, 17) as plan:
        for keys, positions, total in ((False, plan.positions, 53), (True, plan.positions_k, 17)):
            owners = plan.owner(np.arange(total), keys=keys)
            assert np.flatnonzero(owners == comm.rank).tolist() == positions.tolist()
            first = plan.owner(total - 1, keys=keys)
            assert isinstance(first, int) and first == owners[-1]
        with pytest.raises(ArgumentError, match="from 17 to 17; they must be from 0 to 16"):
            plan.owner(17, keys=True)


def test_keys_have_their_own_positions(comm):
    with plan_of(comm, "striped", 6, 29) as plan:
        whole = np.arange(29.0)[None]
        chunk = plan.scatter(whole if comm.rank == 0 else None, keys=True)
        assert np.array_equal(chunk[0], plan.positions_k)
        back = plan.gather(chunk, root=None, keys=True)
        assert np.array_equal(back, whole)


def test_in_pieces(comm, monkeypatch):
    """Arrays above a piece's size, here of 64 bytes, go in rounds."""
    monkeypatch.setattr(rounds, "PIECE_BYTES", 64)
    for layout in ("contiguous", "striped", "zigzag"):
        with plan_of(comm, layout, 101) as plan:
            whole = np.random.default_rng(1).standard_normal((1, 101, 3))
            chunk = plan.scatter(whole if comm.rank == 0 else None)
            assert np.array_equal(chunk, whole[:, plan.positions])
            for root in (0, None):
                back = plan.gather(chunk, root=root)
                assert (back is None and comm.rank) or np.array_equal(back, whole)


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_no_message_is_longer_than_allowed(comm, monkeypatch, layout):
    """And own tokens are in none; those of a chunk for all ranks are in one, which MPI copies."""
    sent = []

    class Watched:
        def __getattr__(self, name):
            return getattr(own, name)

        def Isend(self, message, dest, tag):
            assert dest != comm.rank
            sent.append(message[0].nbytes)
            return own.Isend(message, dest, tag)

        def Iallgatherv(self, message, gathered):
            if len(message) == 3:  # tokens, not what ranks tell each other
                sent.append(message[1] * message[2].Get_size())
            return own.Iallgatherv(message, gathered)

    with MeshAttention(comm, seqlen=50, heads=1, head_dim=8, max_message=64, layout=layout) as plan:
        own = plan._peers.comm
        monkeypatch.setattr(plan._peers, "comm", Watched())
        whole = np.random.default_rng(1).standard_normal((2, 50, 4))
        chunk = plan.scatter(whole if comm.rank == 0 else None)
        assert np.array_equal(chunk, whole[:, plan.positions])
        others = whole.nbytes - chunk.nbytes
        assert sum(sent) == (0 if comm.rank else others) and max(sent, default=0) <= 64
        sent.clear()
        back = plan.gather(chunk)
        assert sum(sent) == (chunk.nbytes if comm.rank else 0) and max(sent, default=0) <= 64
        assert comm.rank or np.array_equal(back, whole)
        sent.clear()
        assert np.array_equal(plan.gather(chunk, root=None), whole)
        assert sum(sent) == chunk.nbytes and max(sent, default=0) <= 64


@pytest.mark.draw(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_boxes_of_places_and_of_all(comm, monkeypatch, layout, axis):
    """Whether a message holds the tokens of one place before the axis or of all; more rounds than are under way."""
    layout, shape = layout(comm, 53) if callable(layout) else layout, [3, 2, 4]
    shape[axis] = 53
    whole = np.random.default_rng(1).standard_normal(shape)
    monkeypatch.setattr(rounds, "PIECE_BYTES", 200)
    if (comm.rank + axis) % 3:  # one end may pack what the other end takes as it lies
        monkeypatch.setattr(wire, "BLOCK_BYTES", 1)
    with plan_of(comm, layout, 53) as plan:
        for run_bytes in (1, 2**20):
            monkeypatch.setattr(whole_arrays, "RUN_BYTES", run_bytes)
            for root in (0, comm.size - 1, None):
                for given in (whole, np.asfortranarray(whole), whole[::-1]):
                    chunk = plan.scatter(given if root in (None, comm.rank) else None, root=root, axis=axis)
                    assert np.array_equal(chunk, np.take(given, plan.positions, axis))
                    back = plan.gather(np.asfortranarray(chunk), root=root, axis=axis)
                    assert (back is None and comm.rank != root) or np.array_equal(back, given)


def test_transposed_and_read_only_arrays(comm):
    with plan_of(comm, "zigzag", 23) as plan:
        whole = np.asfortranarray(np.random.default_rng(1).standard_normal((2, 23, 4)))
        whole.flags.writeable = False
        chunk = plan.scatter(whole[::-1] if comm.rank == 0 else None)
        assert np.array_equal(chunk, whole[::-1][:, plan.positions])


def test_rows_without_bytes(comm):
    with plan_of(comm, "striped", 7) as plan:
        chunk = plan.scatter(np.zeros((0, 7)))
        assert chunk.shape == (0, len(plan.positions))
        assert plan.gather(chunk, root=None).shape == (0, 7)


def test_wrong_arguments(comm):
    """Named on every rank, wherever they are wrong, and the plan still works."""
    last = comm.size - 1
    with plan_of(comm, "striped", 12) as plan:
        whole = np.zeros((1, 12))
        own = np.zeros((1, len(plan.positions)))
        wrong = [
            (lambda: plan.scatter(whole[:, 1:]), "11"),
            (lambda: plan.scatter(None), "NoneType"),
            (lambda: plan.scatter(whole, root=comm.size), "root"),
            (lambda: plan.gather(own, root=-1), "root"),
            (lambda: plan.scatter(whole, root=0.5), "root is 0.5"),
            (lambda: plan.gather(own if comm.rank != last else np.zeros((1, 99))), r"chunk has shape \(1, 99\)"),
            (lambda: plan.gather(own.T), r"chunk has .* along axis 1; if they are along axis 0, say axis=0"),
            (lambda: plan.gather(own.astype("f4" if comm.rank == last else "f8")), "float32"),
        ]
        for call, text in wrong[: None if comm.size > 1 else -1]:
            with pytest.raises(ArgumentError, match=text) as caught:
                call()
            assert len(set(comm.allgather(str(caught.value)))) == 1
        assert np.array_equal(plan.scatter(whole, root=None), own)


def test_root_must_be_the_same_everywhere(comm):
    if comm.size == 1:
        pytest.skip("takes two ranks to disagree")
    with plan_of(comm, "striped", 12) as plan:
        own = np.zeros((1, len(plan.positions)))
        for call in (lambda: plan.scatter(np.zeros((1, 12)), root=comm.rank), lambda: plan.gather(own, root=comm.rank)):
            with pytest.raises(ArgumentError, match="root is 0 on rank 0 but 1 on rank 1"):
                call()


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("dtype", [">f4", "<f4", ">i2", ">c16", ">U3", ">M8[s]", "bfloat16"])
def test_byte_order(comm, layout, dtype):
    """Numbers arrive, in this machine's byte order; ranks that gather may hold either."""
    with plan_of(comm, layout, 23) as plan:
        whole = np.arange(46).reshape(2, 23).astype(dtype_name(dtype) if dtype == "bfloat16" else dtype)
        at = plan.positions
        for root in (0, None):
            chunk = plan.scatter(whole if root in (None, comm.rank) else None, root=root)
            back = plan.gather(whole[:, at] if comm.rank % 2 else chunk, root=root)
            for array, right in ((chunk, whole[:, at]), (back, whole)):
                assert array is None or (array.dtype.isnative and np.array_equal(array, right))
            assert back is not None or comm.rank


def test_fields_are_refused(comm):
    """An array of records may change its size when it is copied."""
    records = np.zeros((1, 10), dtype=[("a", "i4"), ("junk", "S40"), ("b", "f8")])
    with plan_of(comm, "contiguous", 10) as plan:
        for array in (records, records[["a", "b"]], records.view("V52")):
            whole, chunk = array if comm.rank == 0 else None, array[:, plan.positions]
            for call, given in (plan.scatter, whole), (plan.gather, chunk):
                with pytest.raises(ArgumentError, match=r"(array|chunk) has dtype .*; it must be of numbers") as caught:
                    call(given)
                assert len(set(comm.allgather(str(caught.value)))) == 1


@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_axes_from_the_end(comm, axis):
    with plan_of(comm, "zigzag", 11) as plan:
        shape = [2, 3, 4]
        shape[axis] = 11
        whole = np.arange(np.prod(shape)).reshape(shape)
        for root in (0, None):
            chunk = plan.scatter(whole if root in (None, comm.rank) else None, root=root, axis=axis)
            assert np.array_equal(chunk, np.take(whole, plan.positions, axis))
            back = plan.gather(chunk, root=root, axis=axis)
            assert (back is None and comm.rank) or np.array_equal(back, whole)
        with pytest.raises(ArgumentError, match=r"axis is -4; array has shape .*, so it may be from -3 to 2"):
            plan.scatter(whole, root=None, axis=-4)
