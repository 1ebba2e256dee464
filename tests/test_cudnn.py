"""The back end `cuda+cudnn` without a GPU: which blocks go to cuDNN, and what comes back, on a made-up cuDNN."""

import sys
import weakref

import fake_cudnn
import fake_cupy
import numpy as np
import pytest
from blocks import EPSILON, causal, chunks, dense, dense_gradients, documents, everything, of_backward, partial, windows
from dense import error, largest
from launch import ROOT, TESTS, mpirun
from mpi4py import MPI

from mpiattn import MeshAttention, backends
from mpiattn.arguments.arrays import on_host
from mpiattn.backends.block import BackwardInputs, BlockInputs, Gradients
from mpiattn.backends.cuda import cudnn_library, devices, row_runs
from mpiattn.backends.cuda.row_runs import Run, runs_of
from mpiattn.backends.testing import emulated
from mpiattn.errors import ArgumentError
from mpiattn.problem.layout import Layout
from mpiattn.problem.mask import Mask
from mpiattn.schedule.needed import Activity
from mpiattn.schedule.tile import Tile
from mpiattn.tuning.blocks import Blocks

needs_compiler = pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler")


@pytest.fixture
def made():
    """The back end on a made-up cuDNN and CuPy."""
    with fake_cudnn.install():
        devices._dealt.clear()
        made = backends.get("cuda+cudnn")
        yield made
        made.close()
        assert not fake_cudnn._streams, "a handle is left"
    fake_cupy._devices[:] = [0]


# Which blocks


def seen_by(runs, queries, keys):
    """Which keys the rows of runs see."""
    seen = np.zeros((queries, keys), bool)
    for run in runs:
        for i in range(run.start, run.stop):
            seen[i, : run.keys if run.right is None else min(run.keys, run.right + 1 + i - run.start)] = True
    return seen


def seen_between(begin, end, keys):
    return (np.arange(keys) >= begin[0][:, None]) & (np.arange(keys) < end[0][:, None])


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(row_runs, "LEAST", 1)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_every_block_of_a_full_or_causal_mask(short, layout, is_causal):
    """Is of runs, in each layout: all that its rows see, and nothing else."""
    for tokens in (64, 61):
        q_layout = k_layout = Layout(layout, tokens, 4)
        activity = Activity(Mask(tokens, tokens, causal=is_causal), q_layout, k_layout, Tile(4, 2, 2))
        counts = []
        for i, j in np.ndindex(4, 4):
            (begin,), (end,) = activity.columns(i, k_layout.ranges(j))
            runs = runs_of(begin, end)
            shape = q_layout.length(i), k_layout.length(j)
            assert (seen_by(runs, *shape) == seen_between(begin, end, shape[1])).all()
            counts.append(len(runs))
        assert max(counts) == 1


def test_runs(short):
    """A staircase may begin with any number of keys, rest, go on and jump; rows between may see nothing."""
    ends = np.array([[0, 0, 4, 5, 6, 6, 6, 7, 8, 8]], np.int32)
    begin = np.zeros_like(ends)
    assert runs_of(begin, ends) == (Run(2, 7, 6, 3), Run(7, 10, 8, 6))
    assert runs_of(*everything(5, 9)) == (Run(0, 5, 9, None),)
    assert runs_of(*everything(5, 0)) == runs_of(*everything(0, 5)) == ()
    assert runs_of(*causal(5, 9)) == (Run(0, 5, 9, 4),) and runs_of(*causal(9, 5)) == (Run(4, 9, 5, 0),)
    jumps = np.array([[0, 1, 2, 0, 4, 4, 2, 3]], np.int32)
    assert runs_of(jumps * 0, jumps) == (Run(1, 3, 2, 0), Run(4, 6, 4, None), Run(6, 8, 3, 1))
    two = np.repeat(ends, 2, 0)
    assert runs_of(np.zeros_like(two), two) == runs_of(begin, ends)


def test_what_has_no_runs(monkeypatch, short):
    """Left to the kernels: windows, documents, groups that differ, many runs, and what is small."""
    assert runs_of(*windows(40, 50)) is None and runs_of(*documents(40, 50)) is None
    begin, end = (np.concatenate(pair) for pair in zip(everything(4, 9), causal(4, 9)))
    assert runs_of(begin, end) is None
    row = np.zeros((1, 4), np.int32)
    for seen in ([2, 2, 0, 0], [2, 2, 2, 0]):
        assert runs_of(row, np.array([seen], np.int32)) is None
    assert runs_of(row + 1, row + 5) is None
    stairs = np.repeat(np.arange(1, 12, dtype=np.int32), 2)[None]
    few = stairs[:, : 2 * row_runs.MOST_RUNS]
    assert len(runs_of(few * 0, few)) == row_runs.MOST_RUNS
    assert runs_of(stairs * 0, stairs) is None
    monkeypatch.setattr(row_runs, "LEAST", 6)
    assert runs_of(*everything(5, 6)) is runs_of(*everything(6, 5)) is None and runs_of(*everything(6, 6))
    assert runs_of(*np.split(np.array([[0] * 9, [9] * 6 + [7] * 3], np.int32), 2)) is None, "the second has few rows"


# A block


def halves(queries, keys, heads=4, kv_heads=2, head_dim=16, value_dim=8, dtype="bfloat16"):
    return chunks(queries, keys, heads, kv_heads, head_dim, value_dim, dtype)


def on_device(made, *arrays):
    return [made.contiguous(array) for array in arrays]


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_block_forward(made, dtype):
    """Added to the partial of other keys by the kernels; rounded to the inputs' dtype once."""
    for queries, keys, mask in ((40, 24, everything), (24, 40, causal), (40, 24, causal)):
        q, k, v = halves(queries, keys, dtype=dtype)
        (begin, end), whole = mask(queries, keys), everything(queries, keys)
        ref = dense(np.concatenate([q]), np.concatenate([k, k]), np.concatenate([v, v[::-1]]), *whole, 0.3)
        given = on_device(made, q, k, v)
        out, lse = partial(made, queries, 4, 8, "float32")
        made.attend(BlockInputs(*given, *on_device(made, begin, end), 0.3), out, lse)
        assert made.blocks == {"cudnn": 1, "kernels": 0}
        made.drain()
        ref = dense(q, k, v, begin, end, 0.3)
        assert error(on_host(out), ref[0]) <= EPSILON[dtype] * largest(ref[0])
        assert error(on_host(lse), ref[1]) <= 1e-6 * largest(ref[1])
        # the same keys with other values: the sum of both is their mean
        flipped = made.contiguous(-v)
        made.attend(BlockInputs(given[0], given[1], flipped, *on_device(made, begin, end), 0.3), out, lse)
        made.drain()
        assert largest(on_host(out)) <= EPSILON[dtype] * largest(ref[0])
        assert error(on_host(lse), ref[1] + np.log(2)) <= 1e-6 * largest(ref[1] + np.log(2))
        made.blocks["cudnn"] = 0


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_block_backward(made, dtype):
    """Of rows that see other keys elsewhere, with their lse and delta; added to gradients that there are."""
    for queries, keys, mask in ((40, 24, everything), (24, 40, causal), (40, 24, causal)):
        q, k, v = halves(queries, keys, dtype=dtype)
        rng = np.random.default_rng(1)
        dout = rng.standard_normal((queries, 4, 8)).astype(dtype)
        begin, end = mask(queries, keys)
        out, lse = dense(q, k, v, begin, end, 0.3)
        other = rng.standard_normal(out.shape)
        lse, out = (lse + np.log(2)).astype(np.float32), ((out + other) / 2).astype(dtype)
        given = on_device(made, q, dout, lse)
        delta = made.empty(lse.shape, "float32")
        made.delta(delta, given[1], made.contiguous(out), None)
        grads = [made.contiguous(np.ones(array.shape, np.float32)) for array in (q, k, v)]
        arguments = *given, delta, *on_device(made, k, v, begin, end)
        made.attend_backward(*of_backward(arguments, 0.3), Gradients(*grads))
        assert made.blocks == {"cudnn": 1, "kernels": 0}
        made.drain()
        exact = (dout.astype(np.float64) * out.astype(np.float64)).sum(-1)
        refs, sizes = dense_gradients(q, dout, lse, exact, k, v, begin, end, 0.3)
        for grad, ref, size in zip(grads, refs, sizes):
            assert error(on_host(grad), 1 + ref) <= 2 * EPSILON[dtype] * largest(size)
        made.blocks["cudnn"] = 0


@needs_compiler
def test_what_goes_to_the_kernels(made):
    """Other masks, dtypes, dims and scores; and gradients where a dlse was given."""

    def launch(queries=24, keys=40, mask=causal, dtype="bfloat16", dlse=None, backward=False, **options):
        q, k, v = halves(queries, keys, dtype=dtype, **{n: options.pop(n) for n in ("head_dim",) if n in options})
        shared = options.pop("shared_kv", False)
        given, (begin, end) = on_device(made, q, k, v), on_device(made, *mask(queries, keys))
        made.blocks.update(cudnn=0, kernels=0)
        out, lse = partial(made, queries, 4, 8, "float32")
        kv = given[1], None if shared else given[2]
        block = BlockInputs(given[0], *kv, begin, end, **({"scale": 0.3} | options))
        if not backward:
            made.attend(block, out, lse)
        else:
            dout = made.contiguous(np.ones((queries, 4, 8), q.dtype))
            delta = made.empty(lse.shape, "float32")
            if dlse is not False:
                made.delta(delta, dout, dout, dlse and lse)
            grads = [made.empty(array.shape, "float32") for array in given]
            made.attend_backward(block, BackwardInputs(dout, lse, delta), Gradients(*grads))
        return [name for name, count in made.blocks.items() if count]

    assert launch() == launch(backward=True) == launch(mask=everything) == ["cudnn"]
    assert launch(mask=windows) == launch(mask=documents) == launch(dtype="float32") == ["kernels"]
    assert launch(softcap=5.0) == launch(scale=-0.3) == launch(head_dim=12) == launch(shared_kv=True) == ["kernels"]
    assert launch(backward=True, dlse=True) == ["kernels"]
    made._delta_of_out = False
    assert launch(backward=True, dlse=False) == ["kernels"], "nobody says where delta comes from"
    made.architecture = 80
    assert launch(head_dim=136) == ["cudnn"] and launch(head_dim=136, backward=True) == ["kernels"]
    made.architecture = 90
    assert launch(head_dim=136, backward=True) == ["cudnn"]
    made.drain()


@needs_compiler
def test_arrays_that_begin_anywhere(made):
    """What cuDNN reads begins at a multiple of 16 bytes; results are added wherever they are."""

    def shifted(array):
        memory = made.empty((array.size + 1,), array.dtype)
        made.copy(memory[1:].reshape(array.shape), array)
        return memory[1:].reshape(array.shape)

    q, k, v = halves(40, 24)
    begin, end = everything(40, 24)
    out, lse = dense(q, k, v, begin, end, 0.3)
    half = out.astype(q.dtype)
    given = [shifted(array) for array in (q, half, lse.astype(np.float32), k, v)]
    bounds, delta = on_device(made, begin, end), shifted(np.zeros(lse.shape, np.float32))
    partial_of = [shifted(np.full(array.shape, fill, np.float32)) for array, fill in ((out, 0), (lse, -np.inf))]
    made.attend(BlockInputs(given[0], *given[3:], *bounds, 0.3), *partial_of)
    made.delta(delta, given[1], given[1], None)
    grads = [shifted(np.zeros(array.shape, np.float32)) for array in (q, k, v)]
    made.attend_backward(*of_backward((*given[:3], delta, *given[3:], *bounds), 0.3), Gradients(*grads))
    made.drain()
    assert made.blocks == {"cudnn": 2, "kernels": 0}
    assert error(on_host(partial_of[0]), out) <= EPSILON["bfloat16"] * largest(out)
    exact = (half.astype(np.float64) ** 2).sum(-1)
    refs, sizes = dense_gradients(q, half, lse, exact, k, v, begin, end, 0.3)
    for grad, ref, size in zip(grads, refs, sizes):
        assert error(on_host(grad), ref) <= 2 * EPSILON["bfloat16"] * largest(size)


@needs_compiler
def test_what_cudnn_refuses(made, monkeypatch):
    """Goes to the kernels, without asking again."""
    asked = []

    def refuse(self):
        asked.append(self)
        raise fake_cudnn.cudnnGraphNotSupportedError("no engine")

    monkeypatch.setattr(fake_cudnn.pygraph, "check_support", refuse)
    q, k, v = halves(24, 40)
    for _ in range(2):
        out, lse = partial(made, 24, 4, 8, "float32")
        made.attend(BlockInputs(*on_device(made, q, k, v, *causal(24, 40)), 0.3), out, lse)
    made.drain()
    ref = dense(q, k, v, *causal(24, 40), 0.3)
    assert error(on_host(out), ref[0]) <= EPSILON["bfloat16"] * largest(ref[0])
    assert made.blocks == {"cudnn": 0, "kernels": 2} and len(asked) == 1
    assert list(made.graphs.refused.values()) == ["no engine"]


@needs_compiler
def test_plans_are_made_once(made, monkeypatch):
    """For each shape; those used last are kept."""
    built, build = [], fake_cudnn.pygraph.build_plans
    monkeypatch.setattr(fake_cudnn.pygraph, "build_plans", lambda self: (built.append(self), build(self)))
    monkeypatch.setattr("mpiattn.backends.cuda.cudnn_graphs.KEPT", 2)

    def attend(queries):
        q, k, v = halves(queries, 40)
        out, lse = partial(made, queries, 4, 8, "float32")
        made.attend(BlockInputs(*on_device(made, q, k, v, *everything(queries, 40)), 0.3), out, lse)

    for queries in (24, 25, 24, 26, 24, 25):
        attend(queries)
    made.drain()
    assert len(built) == 4


def test_row_intervals_are_looked_at_once(made, monkeypatch):
    """As long as they live; others that lie where they lay are other intervals."""
    looked = []
    monkeypatch.setattr(row_runs, "runs_of", lambda *pair: looked.append(pair) or runs_of(*pair))
    begin, end = on_device(made, *causal(24, 40))
    assert made._runs_of(begin, end) == made._runs_of(begin, end) == (Run(0, 24, 40, 16),) and len(looked) == 1
    gone = weakref.ref(end)
    del begin, end
    assert gone() is None and not made._runs and not made._on_host
    nobodys = fake_cupy.empty((1, 24), np.int32), fake_cupy.empty((1, 24), np.int32)
    assert made._runs_of(*nobodys) is None, "they did not come from the host"


# The library


@pytest.mark.draw(1)
@needs_compiler
@pytest.mark.workshop
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks(ranks):
    """Those numbers of ranks of which the launch of tests/mpi has few tests."""
    command = [
        sys.executable,
        *"-m pytest -q --color=no -p no:cacheprovider".split(),
        TESTS / "mpi" / "test_cudnn_ranks.py",
    ]
    outcome = mpirun(ranks, command, timeout=200, cwd=ROOT, env={"OPENBLAS_NUM_THREADS": "1"})
    assert " passed" in outcome.stdout and " skipped" not in outcome.stdout, outcome.stdout


def test_without_cudnn(monkeypatch):
    """Which of them is missing, and what installs it."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ArgumentError, match=r"needs CuPy"):
        backends.get("cuda+cudnn")
    with fake_cudnn.install():
        monkeypatch.setattr(fake_cudnn, "backend_version", lambda: 91899)
        with pytest.raises(ArgumentError, match=r"cuDNN is 9\.18\.99; it must be 9\.19\.0 or newer"):
            backends.get("cuda+cudnn")
        cudnn_library.load.cache_clear()
        monkeypatch.setitem(sys.modules, "cudnn", None)
        with pytest.raises(ArgumentError, match=r"it needs cuDNN \(.*\): pip install 'mpiattn\[cudnn\]'"):
            backends.get("cuda+cudnn")
        sys.modules["cudnn"] = fake_cudnn  # for `install` to take away


def test_what_is_measured_is_measured_of_this_cudnn(made):
    assert made.version == "no GPU, but NumPy, cuDNN 9.19.0" and made.name == "cuda+cudnn"


@needs_compiler
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_is_tuned_is_cudnn(made, direction):
    """`mpiattn tune` times blocks of which cuDNN computes those that it can take."""
    Blocks(made, 32, "bfloat16", 16, direction, heads=2).run()
    assert made.blocks == {"cudnn": 1, "kernels": 0}


@needs_compiler
def test_a_plan(made):
    """From arrays to results and back; it is the caller's choice alone."""
    give = [fake_cupy.asarray(np.ones((1, 16, 2, 16), np.float16)) for _ in range(4)]
    with MeshAttention(
        MPI.COMM_SELF, seqlen=16, heads=2, head_dim=16, dtype="float16", causal=True, backend="cuda+cudnn"
    ) as plan:
        out, lse = plan.forward(*give[:3])
        grads = plan.backward(give[3], *give[:3], out, lse)
        assert plan._backend.blocks == {"cudnn": 2, "kernels": 0}
    assert np.allclose(on_host(out), 1) and np.allclose(on_host(lse)[0, 0], 4 + np.log(np.arange(1, 17)))
    assert np.allclose(on_host(grads[2])[0, :, 0, 0].sum(), 16, rtol=1e-3) and np.isfinite(on_host(grads[0])).all()
    assert backends.for_array(give[0]) == "cuda"
