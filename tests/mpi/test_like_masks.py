"""`plan.like` of another mask: the same tokens on every rank, so that layers of one model can pass activations on."""

import re
from dataclasses import replace

import numpy as np
import pytest
from dense import draw_all, expected, masks, wrong
from runs import agreed, attend, my_chunks, on, once, subcomm
from test_agreement import same_error
from test_like import counts

import mpiattn.masks
from mpiattn import ArgumentError, Layout, MeshAttention
from mpiattn.comm import mesh, room
from mpiattn.errors import MemoryShortage
from mpiattn.model.machine import DEFAULT
from mpiattn.system import memory_limits
from mpiattn.system.memory_limits import Limit
from mpiattn.verify import reference

GRID = 6, 10
SLOW = replace(DEFAULT, flops=dict.fromkeys(DEFAULT.flops, 1e6), edge=0.0)  # on which balance is worth its messages
SHAPE = {"seqlen": 60, "heads": 4, "kv_heads": 2, "head_dim": 8}
FIELD = mpiattn.masks.neighborhood(GRID, (3, 5))
MASKS = [
    {"window": (9, 0)},
    {"causal": False},
    {"causal": False, "window": (4, 7)},
    {"prefix": 20, "window": (30, 2)},
    {"causal_block": 7},
    {"mask": FIELD},
    {"mask": mpiattn.masks.global_tokens(2) | mpiattn.masks.neighborhood(GRID, 3), "causal": False},
    {"softcap": 2.0, "scale": -0.3},
]


def uneven(ranks):
    """Tokens of every rank, of which the last one has the most and one in the middle has none."""
    sizes = [3 * (rank % 2) for rank in range(ranks)]
    return (*sizes[:-1], 60 - sum(sizes[:-1]))


def ranges(ranks):
    """Pieces of 5 tokens dealt out in turn, the last rank first."""
    pieces = [(start, start + 5) for start in range(0, 60, 5)]
    return Layout.of_ranges([pieces[rank::ranks] for rank in reversed(range(ranks))])


LAYOUTS = {
    "auto": lambda ranks: {},
    "contiguous": lambda ranks: {"layout": "contiguous"},
    "striped": lambda ranks: {"layout": "striped"},
    "zigzag": lambda ranks: {"layout": "zigzag"},
    "computed in zigzag": lambda ranks: {"layout": "contiguous", "mesh_layout": "zigzag"},
    "uneven": lambda ranks: {"layout": uneven(ranks)},
    "uneven, other keys": lambda ranks: {"layout": (uneven(ranks), uneven(ranks)[::-1])},
    "ranges": lambda ranks: {"layout": ranges(ranks)},
    "ranges as they are": lambda ranks: {"layout": ranges(ranks), "mesh_layout": "ranges"},
    "grid": lambda ranks: {"layout": Layout.grid(GRID, (1, ranks))},
    "a layout with an order": lambda ranks: {"layout": Layout("striped", 60, ranks, order=(*reversed(range(ranks)),))},
    "planes": lambda ranks: {"tile": (2 - ranks % 2, 1, ranks // (2 - ranks % 2)), "layout": "striped"},
    "ulysses": lambda ranks: {"tile": "ulysses" if 4 % ranks == 0 else "auto"},
    "ring": lambda ranks: {"tile": "ring", "schedule": "greedy", "route": "ring", "direction": "both"},
    "no overlap": lambda ranks: {"overlap": False, "max_message": 100, "backend": "deferred", "timeout": 50.0},
}


def right(comm, plan):
    """Every rank's chunks of both passes are those of dense attention under the plan's mask."""
    inputs, p = draw_all(plan.problem), plan.problem
    ref = once(comm, lambda: expected(inputs, **masks(p)))
    result = attend(plan, my_chunks(plan, *inputs))
    agreed(comm, wrong(p, result, ref, inputs, plan.positions, plan.positions_k), repr(plan))


def alike(plan, other):
    """Both hold the same tokens, and are of the same problem but for what queries see."""
    assert (other.q_layout, other.k_layout) == (plan.q_layout, plan.k_layout)
    assert other.positions.tolist() == plan.positions.tolist()
    assert other.positions_k.tolist() == plan.positions_k.tolist()
    assert other.problem.without_tokens == plan.problem.without_tokens
    assert other.backend == plan.backend and other.machine == plan.machine and other._home is plan._home
    kept = "tile", "schedule", "route", "direction", "backend", "transport", "max_message", "machine", "overlap"
    asked = [[getattr(each._asked.options, name) for name in kept] for each in (plan, other)]
    assert asked[0] == asked[1]


@pytest.mark.many
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(comm, layout):
    """A causal plan and one of each mask: the same positions, and results of dense attention."""
    how = {**SHAPE, "causal": True, **LAYOUTS[layout](comm.size)}
    with MeshAttention(comm, **how) as plan:
        for given in MASKS:
            with plan.like(**given) as other:
                alike(plan, other)
                for name, value in given.items():
                    assert getattr(other.problem, name) == value
                right(comm, other)
        right(comm, plan)


def test_other_numbers_of_keys(comm):
    how = {"heads": 2, "head_dim": 8, "causal": True, "layout": ("zigzag", "striped")[comm.size % 2]}
    with MeshAttention(comm, seqlen=31, seqlen_k=50, **how) as plan, plan.like(window=(6, 3), causal=False) as other:
        alike(plan, other)
        right(comm, other)


def test_as_a_new_plan_with_these_layouts(comm):
    """What is searched is what a constructor searches that is given the layouts."""
    for given in ({"window": (50, 0)}, {"causal": False}, {"mask": mpiattn.masks.global_tokens(3)}):
        how = {"seqlen": 300, "heads": 4, "head_dim": 16, "direction": "both"}
        with (
            MeshAttention(comm, **how, causal=True) as plan,
            plan.like(**given) as other,
            MeshAttention(comm, **how, layout=(plan.q_layout, plan.k_layout), **{"causal": True, **given}) as new,
        ):
            assert (repr(other), other.mesh_layout) == (repr(new), new.mesh_layout)
            assert other.predicted_seconds == new.predicted_seconds and other.timeout == new.timeout
            assert other.nbytes == new.nbytes and other.memory_cost == new.memory_cost


@pytest.mark.many
@pytest.mark.parametrize("seqlen", [96, 384])
def test_two_layers(comm, seqlen):
    """A full layer and a sliding one, the second of the first's results; gradients of the first's inputs.

    Plans of the two masks that are made apart hold the same tokens too.
    """
    how = {"seqlen": seqlen, "heads": 2, "head_dim": 8, "direction": "both", "dtype": "float64", "machine": SLOW}
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, seqlen, 2, 8))
    middle, _ = reference.attention(q, k, v, causal=True)
    want, _ = reference.attention(middle, middle, middle, causal=True, window=(16, 0))
    dmiddle = sum(reference.backward(dout, middle, middle, middle, causal=True, window=(16, 0))[:3])
    grads = reference.backward(dmiddle, q, k, v, causal=True)
    positions = []
    for first in ({"causal": True}, {"causal": True, "window": (16, 0)}):  # whichever is made first
        with MeshAttention(comm, **how, **first) as plan, plan.like(window=(16, 0)) as sliding:
            positions.append(plan.positions)
            with plan.like(window=None) as full:
                chunks = my_chunks(full, q, k, v)
                out, lse = full.forward(*chunks)
                last, last_lse = sliding.forward(out, out, out)
                dout_chunk = np.ascontiguousarray(dout[:, sliding.positions])
                of_middle = sliding.backward(dout_chunk, out, out, out, last, last_lse)
                got = full.backward(sum(of_middle), *chunks, out, lse)
                at = full.positions
        for result, of in zip((last, *got), (want, *grads)):
            assert np.abs(result - of[:, at]).max(initial=0) < 1e-10
    assert np.array_equal(*positions)


def test_none_removes_and_what_is_left_out_stays(comm):
    how = {**SHAPE, "causal": True, "window": (9, 0), "mask": FIELD, "softcap": 3.0, "scale": 0.25}
    with MeshAttention(comm, **how) as plan:
        for given, want in (
            ({"window": None}, {"window": (None, None)}),
            ({"mask": None}, {"mask": None}),
            ({"softcap": None}, {"softcap": None}),
            ({"scale": None}, {"scale": 1 / 8**0.5}),
            ({"causal": False}, {"causal": False}),
            ({}, {}),
        ):
            with plan.like(**given) as other:
                of_problem = {**vars(plan.problem), **want}
                assert {name: getattr(other.problem, name) for name in how} == {name: of_problem[name] for name in how}
                right(comm, other)


def test_a_plan_that_is_causal_by_its_prefix(comm):
    """Without the prefix it is causal still; that it be causal no more contradicts what makes it so."""
    for given, removed in (({"prefix": 20}, {"prefix": 0}), ({"causal_block": 7}, {"causal_block": None})):
        with MeshAttention(comm, **SHAPE, **given) as plan:
            with plan.like(**removed) as causal, causal.like(causal=False) as full:
                assert causal.problem.causal and not full.problem.causal
                right(comm, causal)
            with plan.like(causal=False, **removed) as full:
                assert not full.problem.causal
            (name,) = given
            text = same_error(comm, lambda plan=plan: plan.like(causal=False))
            assert text.startswith("causal is False") and name in text
            assert name in same_error(comm, lambda plan=plan, given=given: plan.like(causal=False, **given))


def test_like_of_like(comm):
    """Of masks and lengths in turn; a length keeps the last one's choice, a mask searches it anew."""
    with (
        MeshAttention(comm, **SHAPE, causal=True) as plan,
        plan.like(window=(5, 0)) as second,
        second.like(causal=False, window=None) as third,
        third.like(window=(5, 0), causal=True) as fourth,
        second.like(seqlen=77) as longer,
        longer.like(window=None) as fifth,
        plan.like(seqlen=77, window=(3, 3), causal=False) as both,
    ):
        for other in (second, third, fourth):
            alike(plan, other)
            right(comm, other)
        assert repr(fourth).partition(";")[2] == repr(second).partition(";")[2]
        for other in (longer, fifth, both):
            assert other.problem.seqlen == other.problem.seqlen_k == 77
            assert other.q_layout.kind == plan.q_layout.kind
            assert other.positions.tolist() == longer.positions.tolist()
            right(comm, other)
        assert longer.tile == second.tile and longer.problem.window == (5, 0) and both.problem.window == (3, 3)


def test_lengths_beside_a_layout_of_the_caller(comm):
    """A kind as a `Layout` goes to other lengths; tokens of every rank do not, with a mask or without."""
    with (
        MeshAttention(comm, **SHAPE, layout=Layout("zigzag", 60, comm.size)) as plan,
        plan.like(seqlen=50) as shorter,
        shorter.like(window=(3, 0)) as other,
        plan.like(seqlen=50, causal=True) as causal,
    ):
        for each in (other, causal):
            assert each.positions.tolist() == Layout("zigzag", 50, comm.size).positions(comm.rank).tolist()
            right(comm, each)
    with MeshAttention(comm, **SHAPE, layout=uneven(comm.size)) as plan:
        for given in ({}, {"window": (3, 0)}):
            text = same_error(comm, lambda given=given, plan=plan: plan.like(seqlen=61, **given))
            assert "whose sum is seqlen, 61" in text


def test_a_mask_of_the_other_length(comm):
    """It may go where the length changes, and come."""
    with MeshAttention(comm, **SHAPE, mask=FIELD) as plan:
        assert "mask" in same_error(comm, lambda: plan.like(seqlen=61))
        with plan.like(seqlen=61, mask=None) as other:
            right(comm, other)
        with plan.like(seqlen=72, mask=mpiattn.masks.neighborhood((8, 9), 3)) as other:
            right(comm, other)


def test_expected_documents(comm):
    """They stay with the length, and go by another."""
    cuts = [0, 6, 40, 60]
    with MeshAttention(comm, **SHAPE, causal=True, expected_cu_seqlens=cuts) as plan:
        for given in ({"window": (9, 0)}, {}, {"softcap": 1.0}):
            with plan.like(**given) as other:
                assert other._decision.mask.cuts == (0, 6, 40, 60) and other._asked.options.expected_cu_seqlens == cuts
        with plan.like(seqlen=50) as other, other.like(window=(9, 0)) as third, third.like(seqlen=60):
            assert other._decision.mask.cuts is None and third._decision.mask.cuts is None


def test_key_biases_and_shared_values(comm):
    """What calls are given stays: numbers of keys, and one array for keys and values."""
    rng = np.random.default_rng(0)
    with MeshAttention(comm, **SHAPE, causal=True, key_bias=True) as plan, plan.like(window=(9, 0)) as other:
        alike(plan, other)
        q, k, v = my_chunks(other, *draw_all(other.problem)[:3])
        key_bias = rng.standard_normal(60).astype(np.float32)[other.positions_k]
        other.verify(q, k, v, *other.forward(q, k, v, key_bias=key_bias), key_bias=key_bias, samples=None)
    shared = {"shared_kv": True, "value_dim": 4, "scale": 0.4}
    with MeshAttention(comm, **SHAPE, **shared) as plan, plan.like(causal=True) as other:
        alike(plan, other)
        right(comm, other)
        assert "scale is left out" in same_error(comm, lambda: plan.like(scale=None))


def test_either_may_be_closed_first(comm, monkeypatch):
    """The mesh of the other tile too, which is made and freed with its plan."""
    monkeypatch.setattr(mesh, "UNUSED", 0)
    for first in (0, 1):
        plans = [MeshAttention(comm, **SHAPE, causal=True)]
        plans.append(plans[0].like(window=(5, 0)))
        assert plans[1]._home.users >= 2
        plans[first].close()
        right(comm, plans[1 - first])
        plans[1 - first].close()
        with pytest.raises(ArgumentError, match="the plan is closed"):
            plans[first].like(window=None)


def test_scores_alone_need_no_search(comm, monkeypatch):
    """One small allreduce, as for another length; and a mask takes one broadcast and agreement more."""
    with MeshAttention(comm, seqlen=59, heads=4, head_dim=8, causal=True, tile="ring") as plan:
        waits, spaces = counts(monkeypatch)
        with plan.like(softcap=2.0, scale=0.1):
            assert len(waits) == (comm.size > 1)
        (space,) = spaces
        assert len(space.layout_pairs) == 1
        waits.clear()
        spaces.clear()
        with plan.like(window=(11, 0)):
            assert [len(space.layout_pairs) for space in spaces] == [1] * (comm.rank == 0)
            assert len(waits) <= 4


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"window": 3}, "window is 3; it must be (left, right)"),
        ({"window": (-2, 0)}, "window is (-2, 0)"),
        ({"causal": "yes"}, "causal is 'yes'"),
        ({"causal": None}, "causal is None"),
        ({"prefix": -1}, "prefix is -1"),
        ({"prefix": None}, "prefix is None"),
        ({"causal_block": 0}, "causal_block is 0"),
        ({"mask": np.ones((60, 60), bool)}, "mask is"),
        ({"mask": mpiattn.masks.neighborhood((6, 11), 3)}, "mask"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"scale": "1"}, "scale is '1'"),
    ],
    ids=str,
)
def test_wrong_on_one_rank(comm, given, says):
    """The same error on all, and the first plan goes on."""
    last = comm.rank == comm.size - 1
    with MeshAttention(comm, **SHAPE) as plan:
        text = same_error(comm, lambda: plan.like(**given if last else {}))
        assert text.startswith(says)
        right(comm, plan)
        plan.like(window=(3, 0)).close()


def test_masks_that_differ_between_ranks(comm, at_least):
    at_least(2)
    first = comm.rank == 0
    with MeshAttention(comm, **SHAPE, window=(9, 0)) as plan:
        for own, says in (
            ({"window": (comm.rank, 0)}, "window is (0, 0) on rank 0 but (1, 0) on rank 1"),
            ({"window": (3, 0)} if first else {}, "window is (3, 0) on rank 0 but (9, 0) on rank 1"),
            ({"window": None if first else (9, 0)}, "window is left out on rank 0 but (9, 0) on rank 1"),
            ({"mask": FIELD if first else mpiattn.masks.global_tokens(1)}, "mask is "),
            ({"softcap": 1.0 + comm.rank}, "softcap is 1.0 on rank 0 but 2.0 on rank 1"),
            ({} if first else {"window": (9, 0)}, "a mask is left out on rank 0 but given on rank 1"),
        ):
            text = same_error(comm, lambda own=own: plan.like(**own))
            assert text.startswith(says) and text.endswith("it must be the same on every rank")
        plan.like(**({"window": (9, 0), "softcap": None} if first else {"causal": False})).close()  # which is the same


def test_what_contradicts_the_grid(comm):
    """As the constructor says it, by the caller's own layout and communicator."""
    turned = mpiattn.masks.neighborhood(GRID[::-1], 3)
    with MeshAttention(comm, **SHAPE, layout=Layout.grid(GRID, (1, comm.size))) as plan:
        assert "they must be the same grid" in same_error(comm, lambda: plan.like(mask=turned))
    cart = comm.Create_cart((1, comm.size), (False, True))
    with MeshAttention(cart, **SHAPE, layout=Layout.grid(GRID, cart)) as plan, plan.like(causal=True) as second:
        for each in (plan, second):
            assert "the periods (False, True)" in same_error(cart, lambda each=each: each.like(mask=FIELD))
    if comm.size > 1:
        with MeshAttention(cart, **SHAPE) as plan, plan.like(causal=True) as second:
            for each in (plan, second):
                assert "layout is left out" in same_error(cart, lambda each=each: each.like(mask=FIELD))
    cart.Free()


def test_a_window_beside_masks_with_other_places(comm):
    mask = mpiattn.masks.tree([-1, -1]) & mpiattn.masks.share_question(2, [3, 3])
    how = {"seqlen": 8, "heads": 1, "head_dim": 4}
    with MeshAttention(comm, **how, mask=mask) as plan, MeshAttention(comm, **how, window=(3, 0)) as windowed:
        for call in (lambda: plan.like(window=(3, 0)), lambda: windowed.like(mask=mask)):
            assert "give tokens other places" in same_error(comm, call)
        windowed.like(mask=mask, window=None).close()


def test_memory_limits(comm, at_least, monkeypatch):
    """max_memory holds for the other plan too, and so does what is left of the nodes."""
    with MeshAttention(
        comm, **SHAPE, window=(0, 0), layout="contiguous", max_memory=12_000 + 70_000 // comm.size
    ) as plan:
        least = plan._decision.choice.nbytes
        plan.like(window=(1, 0)).close()
    at_least(2)
    with MeshAttention(comm, **SHAPE, window=(0, 0), layout="contiguous", max_memory=least) as plan:
        text = same_error(comm, lambda: plan.like(window=None))
        assert text.startswith(f"max_memory is {least} bytes a rank; the smallest plan for these arguments needs ")
        right(comm, plan)
    for layout in ("auto", Layout("contiguous", 60, comm.size)):
        how = {**SHAPE, "layout": layout}
        with MeshAttention(comm, **how, window=(0, 0)) as plan, MeshAttention(comm, **how, causal=True) as causal:
            monkeypatch.setattr(room, "LEAST", 1)
            monkeypatch.setattr(memory_limits, "limits", lambda: [Limit("all of it", 1000)])
            for call in (
                lambda plan=plan: plan.like(window=None),
                lambda plan=plan: plan.like(window=None, seqlen=59),
                lambda causal=causal: causal.like(seqlen=59),
            ):
                text = same_error(comm, call, MemoryShortage)
                assert "left of all of it; no plan fits" in text
            monkeypatch.undo()
            right(comm, plan)
            plan.like(window=None).close()


@on(4)
def test_ranks_in_another_order_than_their_nodes(group, monkeypatch):
    """A mesh that follows the nodes does so for both plans, and each rank has the tokens that it had."""
    with subcomm(group, 4) as comm:
        monkeypatch.setattr(mesh, "nodes_of", lambda peers: [0, 1, 0, 1])
        for how in ({}, {"layout": "striped", "tile": (2, 1, 2)}):
            with MeshAttention(comm, **SHAPE, causal=True, **how) as plan:
                assert plan._decision.order == (0, 2, 1, 3)
                for given in MASKS:
                    with plan.like(**given) as other, other.like(seqlen=43, mask=None) as shorter:
                        assert other._decision.order == (0, 2, 1, 3)
                        alike(plan, other)
                        right(comm, other)
                        right(comm, shorter)


def test_the_log_says_what_was_chosen(comm, caplog):
    caplog.set_level("INFO", "mpiattn")
    with MeshAttention(comm, **SHAPE, tile="ring") as plan:
        caplog.clear()
        with plan.like(window=(3, 0)) as other:
            (made,) = (text for text in caplog.messages if repr(other)[:-6] in text)
            chosen = "mesh_layout, schedule, route chosen by the shortest predicted time"
            assert re.search(rf"the positions of plan \d+; {chosen}", made)
