"""Launches of the compiled kernels of the back end cpu: threads, and the callback while they compute."""

import ctypes
import re
import signal
import threading

import numpy as np
import pytest
from blocks import MASKS, chunks, dense, everything, windows
from cpu_kernels import SETS, WORK, compiled, kernels_of
from dense import bits
from test_cpu import assert_right, attend, gradients

from mpiattn import ArgumentError, backends
from mpiattn.backends.cpu import library
from mpiattn.system.sources import kernel_dir

pytestmark = compiled


@pytest.fixture(params=SETS)
def backend(request, monkeypatch):
    with kernels_of(request.param, monkeypatch) as made:
        yield made


def test_a_launch_has_the_fields_of_the_struct(monkeypatch):
    """In their order; where it has others, there are no kernels."""
    text = re.search(r"struct launch \{(.*?)\n\};", (kernel_dir() / "cpu" / "launch.h").read_text(), re.DOTALL)[1]
    text = re.sub(r"//.*|\([a-z]+ share\)", "", text)
    assert not library.missing()
    assert re.findall(r"(\w+)\)?[,;]", text) == [name for name, _ in library.Launch._fields_]

    class Longer(ctypes.Structure):
        _fields_ = (*library.Launch._fields_, ("bias", ctypes.c_void_p))

    monkeypatch.setattr(library, "Launch", Longer)
    assert re.match(r"its kernels take launches of \d+ bytes, and library.py makes them of \d+: ", library.missing())


def both_ways(backend, arguments, **options):
    """Bits of a forward and of a backward launch."""
    return bits(*attend(backend, arguments[0], *arguments[4:], **options), *gradients(backend, arguments, **options))


def large(dtype, heads=8, kv_heads=4, mask=MASKS["causal"]):
    """Arguments of attend_backward of launches that take some milliseconds, with an lse that is not theirs."""
    q, k, v = chunks(1200, 900, heads, kv_heads, 40, 40, dtype)
    rows = np.full((2, 1200, heads), 3, WORK[dtype])
    return [q, q, *rows, k, v, *mask(1200, 900)]


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_threads_change_no_bit(backend, monkeypatch, kv_heads):
    """Neither with more KV heads than threads nor with fewer; a single one has its rows and keys shared out."""
    arguments, results = large("float32", 4, kv_heads), set()
    for threads in (1, 2, 3, 5, 1):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        for name in ("cpu", f"cpu:{8 - threads}"):
            made = backends.get(name)
            assert made.name == name and made.threads == (8 - threads if ":" in name else threads)
            results.add(both_ways(made, arguments))
            made.close()
    assert len(results) == 1


@pytest.mark.parametrize("dtype", WORK)
def test_small_heads_are_read_ahead(backend, monkeypatch, dtype):
    """Each KV head gives the bits that it gives alone, whatever the one before it had to do."""
    monkeypatch.setattr(backend, "threads", 3)
    for queries, keys, heads, head_dim, value_dim in ((9, 5, 10, 64, 64), (20, 33, 30, 40, 24), (70, 150, 20, 8, 33)):
        q, k, v = chunks(queries, keys, heads, 10, head_dim, value_dim, dtype)
        dout = np.resize(v[::-1], (queries, heads, value_dim))
        rows = [q, dout, *np.random.default_rng(0).uniform(2, 3, (2, queries, heads)).astype(WORK[dtype])]
        for mask in MASKS.values():
            bounds = mask(queries, keys)
            out, lse = into = attend(backend, q, k, v, *bounds)
            attend(backend, q, k, v, *bounds, into=into)
            dq, dk, dv = gradients(backend, [*rows, k, v, *bounds])
            for head in range(10):
                of, own = (np.s_[:, head * n : (head + 1) * n] for n in (heads // 10, 1))
                inputs = q[of], k[own], v[own], *bounds
                alone = attend(backend, *inputs)
                attend(backend, *inputs, into=alone)
                assert bits(out[of], lse[of]) == bits(*alone)
                assert bits(dq[of], dk[own], dv[own]) == bits(
                    *gradients(backend, [*(array[of] for array in rows), *inputs[1:]])
                )


def steady(queries, keys):
    """Windows of up to 90 keys, some of none, that move on."""
    rng = np.random.default_rng(2)
    begin = np.sort(np.clip(np.arange(queries) + rng.integers(-30, 30, queries), 0, keys))
    end = np.minimum(begin + rng.integers(0, 90, queries), keys)
    return begin[None].astype(np.int32), end[None].astype(np.int32)


def jumping(queries, keys):
    """The same windows; some tiles of 192 or of 256 rows have those of others."""
    order = np.concatenate([np.arange(768, 1536), np.arange(768), np.arange(1536, queries)])
    return tuple(np.ascontiguousarray(side[:, order]) for side in steady(queries, keys))


@pytest.mark.draw(12)
@pytest.mark.parametrize("mask", [steady, jumping])
@pytest.mark.parametrize("dtype", WORK)
def test_narrow_windows(backend, monkeypatch, dtype, mask):
    """A piece of work packs only the keys that it sees; how many threads share the pieces changes no bit."""
    q, k, v = chunks(2600, 2700, 2, 1, 16, 16, dtype)
    begin, end = mask(2600, 2700)
    seen = np.zeros(2700, bool)
    for first, last in zip(begin[0], end[0]):
        seen[first:last] = True
    v[~seen] = v[np.flatnonzero(seen)[[700, 2300]], 0, 3] = np.nan
    ref, results = dense(q, k, v, begin, end, 0.1), set()
    for threads in (1, 2, 5):
        monkeypatch.setattr(backend, "threads", threads)
        backend._scratch.fill(0xFF)  # NaN
        out, lse = attend(backend, q, k, v, begin, end, 0.1)
        assert_right(backend, (out, lse), ref, v)
        results.add(bits(out, lse))
    assert len(results) == 1


def as_a_batch(array, batch, apart):
    """(tokens, batch * heads, dim) itself or, apart, as (tokens, batch, heads, dim) with one sequence after another."""
    if not apart:
        return array
    return np.ascontiguousarray(array.reshape(len(array), batch, -1, array.shape[-1]).swapaxes(0, 1)).swapaxes(0, 1)


@pytest.mark.parametrize("dtype", WORK)
@pytest.mark.parametrize("of", ["queries", "keys", "both"])
def test_a_batch_where_it_lies(backend, monkeypatch, dtype, of):
    """Bits are those of a batch folded into the heads, whichever of the arrays are."""
    monkeypatch.setattr(backend, "threads", 2)
    queries, keys = of in ("queries", "both"), of in ("keys", "both")
    for batch, tokens, heads, kv_heads, groups in (
        (3, 9, 2, 1, 3),
        (2, 150, 4, 2, 1),
        (4, 33, 3, 3, 4),
        (2, 70, 1, 1, 2),
    ):
        q, k, v = chunks(tokens, tokens + 5, batch * heads, batch * kv_heads, 40, 24, dtype)
        dout = np.resize(v[::-1], (tokens, batch * heads, 24))
        rows = np.random.default_rng(0).uniform(2, 3, (2, tokens, batch * heads)).astype(WORK[dtype])
        bounds = windows(tokens, tokens + 5, groups)
        results = []
        for apart in (False, True):
            own_q, own_dout = (as_a_batch(array, batch, apart and queries) for array in (q, dout))
            own_kv = [as_a_batch(array, batch, apart and keys) for array in (k, v)]
            out, *grads = (np.ones_like(array, WORK[dtype]) for array in (own_dout, own_q, *own_kv))
            lse, delta = rows.copy()
            attend(backend, own_q, *own_kv, *bounds, into=(out, lse))
            if dtype == WORK[dtype]:
                backend.delta(delta, own_dout, out, rows[1])
                backend.sink(out, lse, rows[0, 0])
            gradients(backend, [own_q, own_dout, lse, delta, *own_kv, *bounds], into=grads)
            results.append(bits(lse, delta, *(array.reshape(len(array), -1) for array in (out, *grads))))
        assert results[0] == results[1]


@pytest.mark.parametrize("name", ["cpu:", "cpu:0", "cpu:257", "cpu:-1", "cpu:2.0", "cpu:²", "cpu:2:1", "cpu:all"])
def test_threads_that_cannot_be(name):
    message = f"backend is {name!r}; write cpu:THREADS, with 1 to 256 threads"
    with pytest.raises(ArgumentError, match=re.escape(message)):
        backends.find(name)


def test_every_launch_asks(backend):
    """Also one that takes no time, so that messages move."""
    shares, q = [], np.ones((1, 1, 4), np.float32)
    attend(backend, q, q, q, *everything(1, 1), meanwhile=shares.append)
    assert shares and shares[0] == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_it_asks_meanwhile(backend, monkeypatch, threads):
    """With shares that grow, in the thread that called; it changes no bit, and what it raises ends the launch."""
    monkeypatch.setattr(backend, "threads", threads)
    arguments, shares, calls = large("float64"), [], []

    def meanwhile(share):
        assert threading.current_thread() is threading.main_thread()
        shares.append(share)

    for launch in (
        lambda of: attend(backend, arguments[0], *arguments[4:], meanwhile=of),
        lambda of: gradients(backend, arguments, meanwhile=of),
    ):
        expected = bits(*launch(None))
        for _ in range(100):  # on a busy machine the other threads can end a launch before this one runs again
            shares.clear()
            assert bits(*launch(meanwhile)) == expected
            assert shares == sorted(shares) and shares[0] == 0 and shares[-1] <= 1
            if len(shares) > 2:
                break
        assert len(shares) > 2

        def fail(share):
            calls.append(share)
            if share > 0:
                raise KeyboardInterrupt("enough")

        with pytest.raises(KeyboardInterrupt, match="enough"):
            for _ in range(100):
                launch(fail)
        assert calls[-1] > 0 and not any(calls[:-1])
        calls.clear()


def test_a_signal_ends_a_launch(backend):
    """What its handler raises is raised, as Ctrl-C's is, wherever in a launch the signal comes."""

    def raised(*_):
        raise KeyboardInterrupt("Ctrl-C")

    arguments, before = large("float64"), signal.signal(signal.SIGALRM, raised)
    try:
        for launch in (
            lambda: attend(backend, arguments[0], *arguments[4:], meanwhile=float),
            lambda: gradients(backend, arguments, meanwhile=float),
        ):
            with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                for _ in range(100):
                    launch()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
