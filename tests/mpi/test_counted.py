"""Bytes and messages counted where they are handed to MPI, against the formula.

The counting communicator knows nothing of plans: it reads sizes off the buffers and counts it is given.
"""

import random
from dataclasses import replace
from itertools import product

import divisions
import numpy as np
import pytest
from dense import draw, draw_all
from runs import agreed, my_chunks, tiles

from mpiattn import Layout, MeshAttention
from mpiattn.model.machine import DEFAULT
from mpiattn.schedule import travels
from mpiattn.schedule.kinds import TAG

# Blocks take no time: the mesh computes in its caller's layout, however uneven that is.
QUICK = replace(DEFAULT, flops=dict.fromkeys(DEFAULT.flops, 1e18))


class Counting:
    """A communicator that counts what its sends and collectives give to other ranks."""

    def __init__(self, comm):
        self.comm, self.bytes, self.messages = comm, 0, 0
        self.rank, self.size = comm.rank, comm.size
        self.Irecv = comm.Irecv

    def _add(self, nbytes, copies=1):
        self.bytes += nbytes * copies
        self.messages += copies * (nbytes > 0)

    def Isend(self, buffer, dest, tag):
        memory, *count, datatype = buffer
        if dest != self.rank:
            self._add(count[0] * datatype.Get_size() if count else memoryview(memory).nbytes)
        return self.comm.Isend(buffer, dest, tag)

    def Iallgatherv(self, sending, receiving):
        _, count, datatype = sending
        assert memoryview(sending[0]).nbytes == count * datatype.Get_size()
        self._add(count * datatype.Get_size(), self.size - 1)
        return self.comm.Iallgatherv(sending, receiving)

    def Ialltoallv(self, sending, receiving):
        _, counts, _, datatype = sending
        for rank, count in enumerate(counts):
            if rank != self.rank:
                self._add(count * datatype.Get_size())
        return self.comm.Ialltoallv(sending, receiving)


def count(plan, call):
    """(bytes, messages) of this rank in a call of the plan."""
    mesh = plan._mesh  # other plans may share it: it is put back
    comms = mesh.comm, mesh.plane, mesh.row, mesh.column
    counting = mesh.comm, mesh.plane, mesh.row, mesh.column = [Counting(comm) for comm in comms]
    try:
        call()
        return sum(comm.bytes for comm in counting), sum(comm.messages for comm in counting)
    finally:
        mesh.comm, mesh.plane, mesh.row, mesh.column = comms


def count_forward(plan):
    return count(plan, lambda: plan.forward(*my_chunks(plan, *draw(plan.problem))))


def uneven(comm, seqlen):
    sizes = [seqlen // comm.size] * comm.size
    sizes[0] += seqlen % comm.size
    sizes[0], sizes[-1] = sizes[0] + sizes[-1], 0  # and an empty chunk where there are several ranks
    return Layout("contiguous", seqlen, comm.size, tuple(sizes)) if comm.size > 1 else "contiguous"


def any_ranges(comm, seqlen):
    return divisions.ranges(random.Random(comm.size), seqlen, comm.size)


def lengths(layout):
    return [layout.length(rank) for rank in range(layout.chunks)]


def hops_that_send(q_lengths, k_lengths, tile, rank):
    """Messages of one rank on the direct route: empty chunks are not sent, a KV chunk or a partial is two."""
    a, b = tile.a, tile.b
    r, c = divmod(rank, a)
    partials = sum(q_lengths[r * a + (c - u) % a] > 0 for u in range(1, a))
    return (a - 1) * (q_lengths[rank] > 0) + 2 * (b - 1) * (k_lengths[rank] > 0) + 2 * partials


@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.many), "float32", "float64"])
@pytest.mark.parametrize("layout", ["striped", uneven, pytest.param(any_ranges, marks=pytest.mark.many)])
def test_case_22_bytes_are_the_formula(comm, layout, dtype):
    shape = {
        "batch": 2,
        "seqlen": 8 * comm.size if layout == "striped" else 45,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 6,
        "value_dim": 5,
        "dtype": dtype,
    }
    everything = layout == "striped"  # a rank without queries needs no keys
    layout = layout if everything else layout(comm, shape["seqlen"])
    for a, b in tiles(comm.size):
        total = {}
        for schedule, route in product(("greedy", "collective"), ("direct", "ring")):
            how = {"layout": layout, "tile": (a, b), "schedule": schedule, "route": route, "machine": QUICK}
            with MeshAttention(comm, **shape, **how) as plan:
                nbytes, messages = count_forward(plan)
                assert (nbytes, messages) == plan.sent
                cut = (lengths(plan.q_layout), lengths(plan.k_layout)), plan.tile, comm.rank
                masked = {} if everything else {"activity": plan.activity, "collective": schedule == "collective"}
                expected = travels.sent(plan.problem, *cut, route=route, **masked).total
                agreed(comm, None if nbytes == expected else f"{schedule} {route} {a}x{b}: {nbytes}, not {expected}")
                if route == "direct" and everything:
                    figures = messages, hops_that_send(*cut[0], *cut[1:])
                    agreed(comm, None if figures[0] == figures[1] else f"{schedule} {a}x{b}: messages {figures}")
            total[schedule, route] = comm.allreduce(nbytes)
        assert not everything or len(set(total.values())) == 1, total


@pytest.mark.parametrize("wire", [None, "float16", "bfloat16", "float32"])
def test_case_22_backward_and_wire_dtype(comm, wire):
    """Counted at MPI, both passes: a narrower wire takes off what the formula says, and no message."""
    shape = {
        "batch": 2,
        "seqlen": 8 * comm.size,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 6,
        "value_dim": 5,
        "dtype": "float64",
        "wire_dtype": wire,
        "layout": "striped",
    }
    width, tokens = {"float16": 2, "bfloat16": 2, "float32": 4}.get(wire, 8), 8
    for (a, b), schedule in product(tiles(comm.size), ("greedy", "collective")):
        with MeshAttention(comm, **shape, tile=(a, b), schedule=schedule) as plan:
            cut = (lengths(plan.q_layout), lengths(plan.k_layout)), plan.tile, comm.rank
            chunks = my_chunks(plan, *draw_all(plan.problem))
            out, lse = plan.forward(*chunks[:3])
            forward = count(plan, lambda plan=plan, chunks=chunks: plan.forward(*chunks[:3]))
            backward = count(
                plan,
                lambda plan=plan, chunks=chunks, out=out, lse=lse: plan.backward(chunks.dout, *chunks[:3], out, lse),
            )
            arrays = {"forward": (1 + 2, 2), "backward": (4 + 1, 2 + 2)}  # a hop in a row, in a column
            for direction, (nbytes, messages) in (("forward", forward), ("backward", backward)):
                expected = travels.sent(plan.problem, *cut, direction=direction).total
                agreed(comm, None if nbytes == expected else f"{direction} {schedule} {a}x{b}: {nbytes}, {expected}")
                in_row, in_column = arrays[direction]
                assert messages == (a - 1) * in_row + (b - 1) * in_column
            heads = 2 * 4 * tokens
            assert forward[0] == (a - 1) * heads * (8 * 6 + width * 5 + 8) + (b - 1) * heads // 2 * 8 * 11
            assert backward[0] == (
                (a - 1) * heads * (8 * 11 + 16 + width * 6) + (b - 1) * heads // 2 * 11 * (8 + width)
            )


@pytest.mark.many
def test_case_22_forward_by_hand(comm):
    """2(a - 1) + 2(b - 1) chunks of float32 per rank, plus 4 bytes a row of lse."""
    tokens, heads, dim = 4, 2, 8
    shape = {"seqlen": tokens * comm.size, "heads": heads, "head_dim": dim, "dtype": "float32"}
    for a, b in tiles(comm.size):
        with MeshAttention(comm, **shape, tile=(a, b), schedule="greedy") as plan:
            nbytes, _ = count_forward(plan)
        chunk = tokens * heads * dim * 4
        assert nbytes == (2 * (a - 1) + 2 * (b - 1)) * chunk + (a - 1) * tokens * heads * 4


def test_split_messages_are_counted(comm):
    shape = {"seqlen": 8 * comm.size, "heads": 2, "head_dim": 8, "dtype": "float32"}
    chunk = 8 * 2 * 8 * 4
    for limit, pieces in ((chunk, 1), (chunk - 1, 2), (chunk // 4, 4), (100, -(-chunk // 100))):
        with MeshAttention(comm, **shape, tile="ring", schedule="greedy", max_message=limit) as plan:
            nbytes, messages = count_forward(plan)
            assert (nbytes, messages) == (2 * (comm.size - 1) * chunk, 2 * (comm.size - 1) * pieces)
            assert plan.sent == (nbytes, messages)


def test_counters_add_up(comm):
    with MeshAttention(comm, seqlen=2 * comm.size, heads=1, head_dim=2) as plan:
        chunks = my_chunks(plan, *draw(plan.problem))
        plan.forward(*chunks)
        once = np.array(plan.sent)
        plan.forward(*chunks)
        assert (np.array(plan.sent) == 2 * once).all()
        assert plan.wait_seconds >= 0


MASKS = [{"causal": True}, {"window": (5, 0)}, {"causal": True, "window": (20, None)}]


@pytest.mark.draw(3)
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("mask", MASKS)
def test_what_nobody_sees_is_not_sent(comm, mask, layout):
    """Forward and backward, every tile: bytes counted are those of the chunks and partials that masks leave."""
    shape = {"seqlen": 7 * comm.size + 2, "heads": 2, "kv_heads": 1, "head_dim": 6, "value_dim": 4}
    shape |= {**mask, "layout": layout, "mesh_layout": layout}
    for (a, b), schedule, route in product(tiles(comm.size), ("greedy", "collective"), ("direct", "ring")):
        with MeshAttention(comm, **shape, tile=(a, b), schedule=schedule, route=route) as plan:
            cut = (lengths(plan.q_layout), lengths(plan.k_layout)), plan.tile, comm.rank
            q, k, v = my_chunks(plan, *draw(plan.problem))
            out, lse = plan.forward(q, k, v)
            before = 0
            for direction in ("forward", "backward"):
                if direction == "backward":
                    plan.backward(np.ones_like(out), q, k, v, out, lse)
                nbytes, before = plan.sent[0] - before, plan.sent[0]
                expected = travels.sent(plan.problem, *cut, route, direction, plan.activity, schedule == "collective")
                figures = f"{direction} {schedule} {route} {a}x{b}: {nbytes}, {expected}"
                agreed(comm, None if nbytes == expected.total else figures)


def test_a_window_needs_its_neighbours_only(comm):
    """Contiguous chunks, a causal window no longer than a chunk, Ring: keys of one neighbour, whatever the length."""
    tokens, heads, dim = 6, 2, 4
    with MeshAttention(
        comm,
        seqlen=tokens * comm.size,
        heads=heads,
        head_dim=dim,
        causal=True,
        window=(tokens, 0),
        layout="contiguous",
        tile="ring",
        schedule="greedy",
    ) as plan:
        nbytes, _ = count_forward(plan)
    assert nbytes == (2 * tokens * heads * dim * 4 if comm.rank < comm.size - 1 else 0)


def test_keys_that_a_window_receives(comm):
    """Contiguous chunks: with a causal window W, those of its column among the W before its row's first query."""
    tokens, heads, dim = 5, 2, 4
    for (a, b), window, route in product(tiles(comm.size), (0, 3, 5, 12, 31), ("direct", "ring")):
        with MeshAttention(
            comm,
            seqlen=tokens * comm.size,
            heads=heads,
            head_dim=dim,
            causal=True,
            window=(window, 0),
            layout="contiguous",
            tile=(a, b),
            schedule="greedy",
            route=route,
        ) as plan:
            received, receive = [], plan._exchange.receive

            def counted(comm, buffer, source, tag, receive=receive, received=received):
                received.append(buffer.nbytes if tag == TAG["KV"] else 0)
                return receive(comm, buffer, source, tag)

            plan._exchange.receive = counted
            plan.forward(*my_chunks(plan, *draw(plan.problem)))
        keys = sum(received) / (heads * dim * 4)
        first, chunks = comm.rank // a * a * tokens, range(comm.rank % a, comm.rank // a * a, a)
        seen = sum(max(0, (chunk + 1) * tokens - max(chunk * tokens, first - window)) for chunk in chunks)
        agreed(comm, None if keys == seen else f"{a}x{b}, window {window}, {route}: {keys} keys, not {seen}")


def test_documents_change_with_every_call(comm):
    """Nothing is allocated for them, and the mesh stays."""
    shape = {"seqlen": 40 * comm.size, "heads": 2, "head_dim": 8, "causal": True}
    with MeshAttention(comm, **shape) as plan:

        def held():
            return id(plan._passes.pool._memory), plan._mesh.comm

        q, k, v = my_chunks(plan, *draw(plan.problem))
        before = None
        for cut in range(1, 12):
            documents = {"cu_seqlens": [0, cut, 3 * cut, shape["seqlen"]]}
            out, lse = plan.forward(q, k, v, **documents)
            plan.backward(out, q, k, v, out, lse, **documents)
            before = before or (held(), plan.nbytes)
            assert (held(), plan.nbytes) == before


def test_case_22_backward_by_hand(comm):
    """A hop of a row: q, dout, lse, delta there and dq back; of a column: k, v there and dk, dv back."""
    tokens, heads, dim = 4, 2, 8
    shape = {"seqlen": tokens * comm.size, "heads": heads, "head_dim": dim, "dtype": "float32"}
    for (a, b), schedule in product(tiles(comm.size), ("greedy", "collective")):
        with MeshAttention(comm, **shape, tile=(a, b), schedule=schedule) as plan:
            q, k, v = my_chunks(plan, *draw(plan.problem))
            out, lse = plan.forward(q, k, v)
            before = plan.sent[0]
            plan.backward(out, q, k, v, out, lse)
            chunk = tokens * heads * dim * 4
            assert plan.sent[0] - before == (a - 1) * (3 * chunk + tokens * heads * 8) + (b - 1) * 4 * chunk
