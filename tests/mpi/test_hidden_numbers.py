"""Numbers that are not finite, or huge, in tokens that are hidden: they reach nobody who does not see them.

With every mask, every option and every back end, in gradients too.
"""

import random
from itertools import product

import biased
import draws
import numpy as np
import pytest
from dense import draw_all, largest, masks
from random_cases import COMPILED
from runs import agreed, my_chunks, on, problem_of
from test_biases import of_rank
from test_decode import RINGS, Mirror

from mpiattn import MeshAttention, tree_decode
from mpiattn import masks as interval_masks
from mpiattn.backends.numpy import backend, tiles
from mpiattn.backends.testing import emulated
from mpiattn.verify import reference

TOKENS = 44
PLAN = {"batch": 2, "seqlen": TOKENS, "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 5}
BACKENDS = tuple(dict.fromkeys(("numpy", "deferred", COMPILED)))
VALUES = {"NaN": np.nan, "inf": np.inf, "-inf": -np.inf, "huge": None, "-huge": None}
MASKS = {
    "lengths": ({}, {"lengths": [30, 17]}),
    "causal lengths": ({"causal": True}, {"lengths": [30, 17]}),
    "gaps": ({}, {"cu_seqlens": [5, 19, 19, 40], "padding": True}),
    "causal gaps": ({"causal": True}, {"cu_seqlens": [[5, 19, 40], [0, 13]], "padding": True}),
    "causal": ({"causal": True}, {}),
    "fewer keys": ({"causal": True, "seqlen_k": 30}, {}),
    "window": ({"window": (4, 2)}, {}),
    "prefix": ({"causal": True, "prefix": 7, "window": (9, 0)}, {}),
    "blocks": ({"causal_block": 8, "causal": True}, {}),
    "intervals": ({"mask": interval_masks.global_tokens(2) | interval_masks.window(3, 1)}, {}),
    "neighborhood": ({"mask": interval_masks.neighborhood((4, 11), 3)}, {"lengths": [44, 20]}),
}
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "bias": {"kinds": "bias"},
    "softcap and biases": {"softcap": 3.0, "kinds": "bias alibi relative"},
    "key_bias": {"kinds": "key_bias"},
    "dropout": {"kinds": "dropout", "softcap": 2.0},
    "all": {"softcap": 2.0, "sinks": True, "kinds": "bias key_bias alibi relative dropout"},
    "shared_kv": {"shared_kv": True, "scale": 0.5, "softcap": 2.0},
    "half": {"dtype": "bfloat16", "softcap": 2.0},
}


def visible(problem, call):
    """Which keys each query sees: bool (batch, queries, keys)."""
    p = problem
    options = {name: value for name, value in masks(p, call).items() if name not in ("scale", "softcap")}
    shown = np.zeros((p.batch, p.seqlen, p.seqlen_k), bool)
    for b in range(p.batch):
        of_entry = {
            name: value[b] if name in reference.OF_DOCUMENTS and np.ndim(value[0]) else value
            for name, value in options.items()
        }
        at = np.arange(p.seqlen), np.arange(p.seqlen_k)
        shown[b] = reference.visible_keys(*at, (p.seqlen, p.seqlen_k), **of_entry)
    return shown


class Poison:
    """Numbers in place of some tokens', and who may notice.

    queries, keys: bool (batch, tokens), whose numbers are changed.  rows: bool (batch, queries), that see any of it.
    seen: bool (batch, keys), that any of these rows sees.
    """

    def __init__(self, shown, queries, keys):
        self.queries, self.keys = queries, keys
        self.rows = (shown & keys[:, None]).any(axis=2) | (queries & shown.any(axis=2))
        self.seen = (shown & self.rows[..., None]).any(axis=1)

    def into(self, inputs, value, dlse=True):
        """The inputs with the value in these tokens.  dlse: there too."""
        changed = inputs._replace(**{n: a.copy() for n, a in inputs._asdict().items() if a is not None})
        for name, tokens in (("q", self.queries), ("dout", self.queries), ("k", self.keys), ("v", self.keys)):
            if getattr(changed, name) is not None:
                getattr(changed, name)[tokens] = value
        if changed.dlse is not None and dlse:
            changed.dlse.swapaxes(1, 2)[self.queries] = value
        return changed


def hidden_from_all(shown):
    """The tokens that nobody sees, and that see nobody."""
    return Poison(shown, ~shown.any(axis=2), ~shown.any(axis=1))


def hidden_from_some(shown, rng):
    """A query and a key in each entry of the batch, and all that are hidden from all."""
    queries, keys = ~shown.any(axis=2), ~shown.any(axis=1)
    for tokens in (queries, keys):
        for of_entry in tokens:
            of_entry[rng.randrange(len(of_entry))] = True
    return Poison(shown, queries, keys)


def biased_with(drawn, shown, value):
    """The biases with the value where a mask hides the pair or, of keys, where nobody sees them."""
    some = {}
    if drawn.bias is not None:
        hidden = ~shown[:, None] if drawn.bias.shape[0] > 1 else ~shown.any(axis=0)[None, None]
        some["bias"] = np.where(hidden, np.asarray(value, drawn.bias.dtype), drawn.bias)
    if drawn.key_bias is not None:
        hidden = ~shown.any(axis=1)
        of_each_entry = drawn.key_bias.ndim == 3 and drawn.key_bias.shape[0] > 1
        hidden = hidden[:, None] if of_each_entry else hidden.all(axis=0)
        some["key_bias"] = np.where(hidden, np.asarray(value, drawn.key_bias.dtype), drawn.key_bias)
    return drawn._replace(**some)


def results(plan, inputs, drawn, call):
    """This rank's results by name."""
    chunks, own = my_chunks(plan, *inputs), of_rank(plan, drawn)
    options = {**call, **own, "sinks": chunks.sinks}
    with np.errstate(all="raise"):  # the program's own, which is none of the library's business
        out, lse = plan.forward(*chunks[:3], **options)
        grads = plan.backward(chunks.dout, *chunks[:3], out, lse, dlse=chunks.dlse, **options)
    names = ["dq", "dk", "dv", *["dsinks"] * (chunks.sinks is not None), *(f"d{name}" for name in drawn.given)]
    return {"out": out, "lse": lse} | {n: g for n, g in zip(names, grads, strict=True) if g is not None}


def complaint(plan, clean, got, poison, exact):
    """The first difference at a token that sees nothing of the poison, as text; None if there is none.

    exact: whether results that all tokens give to must be right too: nobody sees the poison.
    """
    rows, seen = poison.rows[:, plan.positions], poison.seen[:, plan.positions_k]
    of_tokens = {"out": rows, "dq": rows, "dk": seen, "dv": seen}
    half = plan.problem.itemsize == 2
    for name, right in clean.items():
        array, right = got[name].astype(np.float64), right.astype(np.float64)
        if name == "lse":
            array, right = array.swapaxes(1, 2), right.swapaxes(1, 2)
        if name in of_tokens or name == "lse":
            safe = ~of_tokens.get(name, rows)
            array, right = array[safe], right[safe]
        elif not exact:
            continue
        blind = np.isneginf(right)
        if (np.isneginf(array) != blind).any():
            return f"{name} is -inf elsewhere"
        off = np.abs(np.where(blind, 0, array) - np.where(blind, 0, right)).max(initial=0)
        if not off <= (2e-2 if half else 2e-5) * max(1, largest(right)):
            return f"{name} is off by {off}"
    return None


def value_of(name, dtype):
    """A number by its name in `VALUES`."""
    most = float(np.finfo(np.float32).max) * (0.9 if dtype == "bfloat16" else 1)
    return {"huge": most, "-huge": -most}.get(name, VALUES[name])


def check(comm, name, mask, option, values=tuple(VALUES)):
    """Every value in what is hidden from all, and in what is hidden from some."""
    (of_plan, call), options = MASKS[mask], dict(OPTIONS[option])
    sinks, kinds = options.pop("sinks", False), options.pop("kinds", None)
    rng = random.Random(f"{draws.seed()} {mask} {option}")
    schedule = rng.choice(["greedy", "collective"])
    arguments = {**PLAN, **of_plan, **options, "backend": name, "tile": (1, comm.size), "schedule": schedule}
    problem = problem_of(arguments)
    shown = visible(problem, call)
    drawn = biased.draw(problem, 5, kinds) if kinds else biased.Drawn()
    inputs = draw_all(problem, sinks=sinks)
    with MeshAttention(comm, **arguments, key_bias=drawn.key_bias is not None) as plan:
        clean = results(plan, inputs, drawn, call)
        for number in values:
            value = value_of(number, problem.dtype)
            for poison, exact in ((hidden_from_all(shown), True), (hidden_from_some(shown, rng), False)):
                changed = poison.into(inputs, value, dlse=not sinks)
                got = results(plan, changed, biased_with(drawn, shown, value), call)
                agreed(comm, complaint(plan, clean, got, poison, exact), (name, mask, option, number, exact))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """A block of NumPy's is many tiles, some of which all rows see and some no row."""
    monkeypatch.setattr(tiles, "ROWS", 8)
    monkeypatch.setattr(tiles, "COLUMNS", 16)
    monkeypatch.setattr(backend, "PANEL", 32)


@pytest.mark.draw(5)
@on(1, 3)
@pytest.mark.parametrize("name, mask, option", list(product(BACKENDS, MASKS, OPTIONS)))
def test_hidden_tokens(group, name, mask, option):
    check(group, name, mask, option)


@pytest.mark.workshop
@pytest.mark.draw(3)
@on(1)
@pytest.mark.skipif(not emulated.compiler(), reason="the emulation needs a C++ compiler")
@pytest.mark.parametrize("mask, option", list(product(MASKS, OPTIONS)))
def test_kernels(group, mask, option):
    check(group, "emulated", mask, option, values=("NaN", "-huge"))


class Poisoned(Mirror):
    """A cache of which every token 7 and 30 has one number everywhere."""

    value = np.nan

    def draw(self, *shape):
        """Random numbers; those of many tokens are keys or values."""
        array = super().draw(*shape)
        if shape[1] > 30:
            array[:, [7, 30]] = self.value
        return array


@pytest.mark.draw(3)
@on(1, 3)
@pytest.mark.parametrize("name, dtype", list(product(BACKENDS, ["float32", "bfloat16"])))
@pytest.mark.parametrize("value", ["NaN", "inf", "-inf"])
def test_decoding(group, name, dtype, value):
    """A key outside of a window or a mask: of one query, of some of several, of all."""
    shape = {"sequences": 2, "capacity": 100 * group.size, "page_size": 4, "backend": name, "dtype": dtype}
    mirror = Poisoned(group, 2, 8, 5, **shape)
    mirror.value = VALUES[value]
    mirror.append(41)
    mirror.append(2, counts=[2, 0])
    some = interval_masks.global_tokens(5) | interval_masks.window(8, 0)
    for window, softcap, queries in product([(20, 0), (9, 0), (12, 3)], [None, 2.0], [1, 3, 6]):
        q = mirror.draw(2, queries, 4, 8)
        for decode in (tree_decode, *RINGS.values()):
            got = decode(q, mirror.cache, window=window, softcap=softcap)
            agreed(group, mirror.wrong(got, q, window=window, softcap=softcap), (window, softcap, queries, decode))
        got = tree_decode(q, mirror.cache, mask=some, softcap=softcap)
        agreed(group, mirror.wrong(got, q, mask=some, softcap=softcap), (softcap, queries))
    mirror.cache.close()
