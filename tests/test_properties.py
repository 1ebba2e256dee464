"""Properties of what computes without MPI, for inputs that Hypothesis draws: few by default, many with --slow."""

from itertools import pairwise

import h5py
import numpy as np
import pytest

from mpiattn import Layout
from mpiattn.decode.token_owners import Ledger
from mpiattn.files import hdf5
from mpiattn.problem.columns import columns_of
from mpiattn.problem.documents import documents
from mpiattn.problem.layout import LAYOUTS
from mpiattn.problem.problem import Problem, dtype_name
from mpiattn.schedule.collective import collective
from mpiattn.schedule.greedy import greedy
from mpiattn.schedule.route import ROUTES
from mpiattn.schedule.steps import apart
from mpiattn.schedule.tile import Tile
from mpiattn.schedule.validate import validate
from mpiattn.verify.reference import visible_keys

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = [50, pytest.param(500, marks=pytest.mark.slow)]


def holds(**strategies):
    """Make a test of a property: it holds for drawn arguments."""

    def made(check):
        @pytest.mark.parametrize("examples", EXAMPLES)
        def test(examples):
            settings(max_examples=examples, derandomize=True, deadline=None)(given(**strategies)(check))()

        test.__doc__ = check.__doc__
        return test

    return made


# Schedules

SIDES = st.integers(1, 9)
TILES = st.builds(Tile, st.integers(1, 2), SIDES, SIDES)
COSTS = st.floats(1e-4, 1e4)


def right(schedule):
    """It is valid with the slots that it claims, and over all ranks every pair of chunks of a plane meets once."""
    tile = schedule.tile
    plane = tile.a * tile.b
    assert validate(schedule) == schedule.slots
    blocks = [block for step in schedule.steps for block in step.blocks]
    pairs = [(tile.in_row(rank, u), tile.in_column(rank, w)) for rank in range(tile.ranks) for u, w in blocks]
    assert sorted(pairs) == [(q, kv) for q in range(tile.ranks) for kv in range(q - q % plane, q - q % plane + plane)]


@holds(
    tile=TILES,
    costs=st.tuples(COSTS, COSTS, COSTS, COSTS),
    route=st.sampled_from(ROUTES),
    direction=st.sampled_from(["forward", "backward"]),
    ahead=st.integers(0, 100),
    both_sides=st.booleans(),
)
def test_greedy_schedules(tile, costs, route, direction, ahead, both_sides):
    schedule = greedy(tile, costs, route, direction, ahead, both_sides)
    right(schedule)
    right(apart(schedule))
    late = greedy(tile, costs, route, direction, both_sides=both_sides)
    assert [step.blocks for step in schedule.steps] == [step.blocks for step in late.steps]


@holds(tile=TILES, route=st.sampled_from(ROUTES), direction=st.sampled_from(["forward", "backward"]))
def test_collective_schedules(tile, route, direction):
    right(collective(tile, route, direction))


# Masks


def lengths_and_documents(draw):
    """seqlen, seqlen_k and the documents of a call; {} without."""
    if draw(st.booleans()):
        return (*draw(st.tuples(*[st.integers(0, 40)] * 2)), {})
    count = draw(st.integers(1, 5))
    cuts, cuts_k = (sorted(draw(st.lists(st.integers(0, 40), min_size=count + 1, max_size=count + 1))) for _ in "qk")
    call = {"cu_seqlens": cuts, "cu_seqlens_k": cuts_k}
    for name, each in (("prefixes", st.integers(0, 45)), ("causal_documents", st.booleans())):
        if draw(st.booleans()):
            call[name] = draw(st.lists(each, min_size=count, max_size=count))
    return cuts[-1] + draw(st.integers(0, 3)), cuts_k[-1] + draw(st.integers(0, 3)), call


@st.composite
def masked(draw):
    """A problem and the documents of a call."""
    seqlen, seqlen_k, call = lengths_and_documents(draw)
    side = st.none() | st.integers(0, 50)
    causal = draw(st.booleans()) or ("prefixes" in call and "causal_documents" not in call)
    prefix, block = draw(st.tuples(st.integers(0, 45), st.none() | st.integers(1, 45))) if causal else (0, None)
    return Problem(
        seqlen=seqlen,
        seqlen_k=seqlen_k,
        heads=1,
        head_dim=1,
        causal=causal,
        window=draw(st.tuples(side, side)),
        prefix=prefix,
        causal_block=block,
    ), call


def layouts(seqlen, chunks):
    """Layouts of a sequence, with unequal chunks and chunks in another order among them."""
    order = st.none() | st.permutations(range(chunks)).map(tuple)
    cuts = st.lists(st.integers(0, seqlen), min_size=chunks - 1, max_size=chunks - 1).map(sorted)
    sizes = cuts.map(lambda cuts: tuple(end - start for start, end in pairwise([0, *cuts, seqlen])))
    return st.builds(Layout, st.sampled_from(LAYOUTS), st.just(seqlen), st.just(chunks), order=order) | st.builds(
        Layout, st.just("contiguous"), st.just(seqlen), st.just(chunks), sizes, order
    )


@holds(masked=masked(), chunks=st.integers(1, 5), data=st.data())
def test_intervals_are_a_dense_mask(masked, chunks, data):
    """In positions, and in the local columns of every block of a layout."""
    problem, call = masked
    seqlen, seqlen_k = problem.seqlen, problem.seqlen_k
    groups = documents(problem, **call, padding=bool(call))
    dense = visible_keys(
        np.arange(seqlen),
        np.arange(seqlen_k),
        (seqlen, seqlen_k),
        problem.causal,
        problem.window,
        prefix=problem.prefix,
        causal_block=problem.causal_block,
        **call,
    )
    (lo,), (hi,) = problem.whole_mask.key_interval(np.arange(seqlen), groups)
    keys = np.arange(seqlen_k)
    assert np.array_equal((keys >= lo[:, None]) & (keys < hi[:, None]), dense)
    assert problem.whole_mask.pairs(groups) == dense.sum()
    rows, columns = (data.draw(layouts(tokens, chunks)) for tokens in (seqlen, seqlen_k))
    for q in range(chunks):
        at = rows.positions(q)
        for k in range(chunks):
            (begin,), (end,) = problem.whole_mask.key_interval(at, groups, columns_of(columns.positions(k)))
            local = np.arange(columns.length(k))
            assert np.array_equal(
                (local >= begin[:, None]) & (local < end[:, None]), dense[np.ix_(at, columns.positions(k))]
            )


# Tokens of ranks


def same_tokens(owned, rank, held, start, stop):
    """What a layout or a ledger says of a rank is what its list of positions holds."""
    assert owned.positions(rank).tolist() == held and owned.length(rank) == len(held)
    before, parts = owned.between(rank, start, stop)
    assert before == sum(position < start for position in held)
    assert [position for part in parts for position in part] == [at for at in held if start <= at < stop]


@holds(layout=st.tuples(st.integers(0, 60), st.integers(1, 9)).flatmap(lambda sizes: layouts(*sizes)), data=st.data())
def test_layouts_partition_the_tokens(layout, data):
    """Every token is on one rank, which `owner` names; positions increase."""
    owners = layout.owner(np.arange(layout.seqlen)).tolist()
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, layout.seqlen + 2)] * 2)))
    for rank in range(layout.chunks):
        same_tokens(layout, rank, [at for at, owner in enumerate(owners) if owner == rank], start, stop)
    assert sum(layout.lengths) == len(owners) == layout.seqlen


@st.composite
def changes(draw):
    """Number of ranks, which is first, and changes of a ledger."""
    ranks = draw(st.integers(1, 6))
    placed = st.integers(0, 40).flatmap(lambda tokens: layouts(tokens, ranks))
    change = st.tuples(st.just("deal"), st.integers(0, 20)) | st.tuples(st.just("truncate"), st.integers(0, 120))
    return ranks, draw(st.integers(0, 9)), draw(st.lists(change | st.tuples(st.just("place"), placed), max_size=12))


@holds(changes=changes(), shares=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted))
def test_owners_of_tokens_are_those_of_a_list(changes, shares):
    """A token more goes to the rank with the fewest; among equals to `first`, and then to the next."""
    (ranks, first, steps), owners = changes, []
    ledger = Ledger(ranks, first)
    for action, how in steps:
        getattr(ledger, action)(how)
        if action == "place":
            owners += how.owner(np.arange(how.seqlen)).tolist()
        elif action == "truncate":
            del owners[how:]
        else:
            for _ in range(how):
                owners.append(min(range(ranks), key=lambda rank: (owners.count(rank), (rank - first) % ranks)))
        assert ledger.seqlen == len(owners)
        cuts = [round(share * (len(owners) + 2)) for share in shares]
        for rank in range(ranks):
            held = [at for at, owner in enumerate(owners) if owner == rank]
            same_tokens(ledger, rank, held, *cuts)
            assert ledger.below(rank, cuts).tolist() == [sum(at < cut for at in held) for cut in cuts]


# HDF5

FLOATS = ("<f2", ">f2", "<f4", ">f4", "<f8", ">f8")
BFLOAT16 = {"bfloat16": h5py.h5t.IEEE_F16LE, "big-endian bfloat16": h5py.h5t.IEEE_F16BE}


def store(file, kind, array, how):
    """Store float32 values as another writer would; returns them as the dtype that is to be read."""
    if kind in FLOATS:
        file.create_dataset("x", data=array.astype(kind), **how)
        return array.astype(np.dtype(kind).newbyteorder("="))
    array = array.astype(dtype_name("bfloat16"))
    if kind == "opaque":
        file.create_dataset("x", data=array.view("V2"), **how)
    else:
        stored = BFLOAT16[kind].copy()
        stored.set_fields(*hdf5.BFLOAT16_FIELDS)
        stored.set_ebias(127)
        file.create_dataset("x", array.shape, h5py.Datatype(stored), **how)[...] = array.astype(np.float32)
    return array


@st.composite
def stored(draw):
    """How a dataset is stored, its shape, and the start and shape of a part of it."""
    shape = draw(st.tuples(*[st.integers(0, 7)] * 4))
    starts = tuple(draw(st.integers(0, size)) for size in shape)
    count = tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, starts))
    how = {}
    if all(shape) and draw(st.booleans()):
        how = {
            "chunks": tuple(draw(st.integers(1, size)) for size in shape),
            "compression": draw(st.sampled_from([None, "gzip", "lzf"])),
            "shuffle": draw(st.booleans()),
            "fletcher32": draw(st.booleans()),
        }
    return draw(st.sampled_from([*FLOATS, *BFLOAT16, "opaque"])), how, shape, starts, count


@holds(stored=stored(), axes=st.sampled_from(hdf5.AXES))
def test_what_is_read_is_the_slice(stored, axes):
    """Of any type, storage and order of axes; and what is written there is all that changes."""
    kind, how, shape, starts, count = stored
    whole = np.random.default_rng(0).standard_normal(shape, np.float32)
    part = tuple(slice(start, start + size) for start, size in zip(starts, count))
    with h5py.File("in memory", "w", driver="core", backing_store=False) as file:
        if "chunks" in how:
            how = how | {"chunks": hdf5.natural(how["chunks"], axes)}
        expected = store(file, kind, whole if axes == "bshd" else whole.swapaxes(1, 2), how)
        expected = expected if axes == "bshd" else expected.swapaxes(1, 2)
        place = hdf5.natural(starts, axes), hdf5.natural(count, axes)
        read = hdf5.read(file["x"], *place)
        natural = read if axes == "bshd" else read.swapaxes(1, 2)
        assert natural.dtype == expected.dtype and natural.tobytes() == expected[part].tobytes()
        hdf5.write(file["x"], place[0], -read)
        expected[part] = -expected[part]
        again = hdf5.read(file["x"], (0,) * 4, file["x"].shape)
        assert (again if axes == "bshd" else again.swapaxes(1, 2)).tobytes() == expected.tobytes()
