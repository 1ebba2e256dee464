"""Options of C programs as text, and memory on a GPU; what takes no ranks."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from mpiattn import ArgumentError
from mpiattn.embed import arrays, calls, options, status
from mpiattn.embed.build import SOURCE
from mpiattn.embed.errors import HostError
from mpiattn.embed.handles import Handles
from mpiattn.embed.status import describe
from mpiattn.errors import MemoryShortage


@pytest.mark.parametrize(
    "text, values",
    [
        (None, {}),
        ("  ", {}),
        ("tile=2x2, causal=1, timeout=60", {"tile": "2x2", "causal": True, "timeout": 60}),
        ("causal = false,overlap=0 , batch=1", {"causal": False, "overlap": False, "batch": 1}),
        ("window=128,0, scale=0.5", {"window": (128, 0), "scale": 0.5}),
        ("window=,7,softcap=none", {"window": (None, 7), "softcap": None}),
        ("window=128,", {"window": (128, None)}),
        ("window=(128, 0), layout=[10,0,9],relative_cyclic=(0,1)", None),
        ("causal=.true., overlap=.FALSE.", {"causal": True, "overlap": False}),
        ("sequences=3,, check=1", {"sequences": (3,), "check": True}),
        ("layout=10,0,9", {"layout": (10, 0, 9)}),
        ("mask=neighborhood 7x9 cyclic=0,1 | global 4, grid=20x31", None),
        ("mask=sphere 0.1 rows=20,24,28, heads=2", {"mask": "sphere 0.1 rows=20,24,28", "heads": 2}),
        ("timeout=inf, max_memory=1.5G", {"timeout": float("inf"), "max_memory": "1.5G"}),
        ("relative_grid=4,6, relative_cyclic=0,1", {"relative_grid": (4, 6), "relative_cyclic": (False, True)}),
        ("bias_shared=batch,heads, bias_gradients=key_bias", None),
        ("bias_gradients=0", {"bias_gradients": False}),
        ("dims=2x3", {"dims": (2, 3)}),
        ("causal=T, overlap= F, key_bias=.T.", {"causal": True, "overlap": False, "key_bias": True}),
        ("relative_cyclic= T,F", {"relative_cyclic": (True, False)}),
        ("bias_gradients=F, check=t", {"bias_gradients": False, "check": True}),
        ("scale=  3.5D-01, softcap=1d2, timeout=  6.0E+01", {"scale": 0.35, "softcap": 100.0, "timeout": 60.0}),
        ("grid=  41x   3, dims=   1x   2, tile=  2x   1", {"grid": (41, 3), "dims": (1, 2), "tile": "2x1"}),
        ("sizes=  12,   8xeven", {"sizes": ((12, 8), None)}),
        ("mask=neighborhood   7x   9 cyclic=   1", {"mask": "neighborhood   7x9 cyclic=1"}),
        ("mask=window  128,   0 | global    4", {"mask": "window  128,0 | global    4"}),
        ("mask=sphere  0.1D+00 rows=  20,  24", {"mask": "sphere  0.1E+00 rows=20,24"}),
        (
            "mask=window ,7 | ranges 0:4:0:4:full, seqlen=    9",
            {"mask": "window ,7 | ranges 0:4:0:4:full", "seqlen": 9},
        ),
        ("machine=T, backend=f, dtype=d2", {"machine": "T", "backend": "f", "dtype": "d2"}),
        ("machine=runs/1d5  x 3.json", {"machine": "runs/1d5  x 3.json"}),
        ("grid=20x7, sizes=12,8xeven, heads=2", {"grid": (20, 7), "sizes": ((12, 8), None), "heads": 2}),
    ],
)
def test_text_as_values(text, values):
    wanted = {
        "window=(128, 0), layout=[10,0,9],relative_cyclic=(0,1)": {
            "window": (128, 0),
            "layout": (10, 0, 9),
            "relative_cyclic": (False, True),
        },
        "mask=neighborhood 7x9 cyclic=0,1 | global 4, grid=20x31": {
            "mask": "neighborhood 7x9 cyclic=0,1 | global 4",
            "grid": (20, 31),
        },
        "bias_shared=batch,heads, bias_gradients=key_bias": {
            "bias_shared": ("batch", "heads"),
            "bias_gradients": ("key_bias",),
        },
    }.get(text, values)
    parsed = options.of_text(text)
    assert parsed == wanted and [type(value) for value in parsed.values()] == [type(value) for value in wanted.values()]


@pytest.mark.parametrize("text", ["causal", "=1", "a b=1", "tile=2x2, tile=2x2", "sizes=1,x2"])
def test_text_that_is_no_options(text):
    with pytest.raises(ArgumentError, match=r"(options|sizes) is"):
        options.of_text(text)


@pytest.mark.parametrize("between", [" ", "; "])
def test_options_without_commas(between):
    text = between.join(["seqlen=100", "heads=8", "head_dim=64"])
    given = re.escape(repr(text.removeprefix("seqlen=")))
    why = f"^heads and head_dim are missing in the options, in which seqlen is {given}; commas separate options$"
    with pytest.raises(ArgumentError, match=why):
        options.of_making(options.of_text(text), MPI.COMM_SELF, ("seqlen", "heads", "head_dim"))


@pytest.mark.parametrize(
    "text, why",
    [
        ("seqlen=24, haeds=2, head_dim=8", "haeds is not an argument of MeshAttention; did you mean heads?"),
        ("SEQLEN=24, heads=2, head_dim=8", "SEQLEN is not an argument of MeshAttention; did you mean seqlen?"),
        ("gird=4x6, heads=2, head_dim=8", "gird is not an argument of MeshAttention; did you mean grid?"),
        (
            "seqlen=24, num_heads=2, head_dim=8",
            "num_heads is not an argument of MeshAttention; it is called heads here",
        ),
        ("seqlen=9, heads=2, head_dim=8, dropout=1", "dropout is not an argument of MeshAttention; dropout is one of "),
    ],
)
def test_misspelt_options_get_hints(text, why):
    """Also where the right name is then missing."""
    with pytest.raises(ArgumentError, match=f"^{re.escape(why)}"):
        options.of_making(options.of_text(text), MPI.COMM_SELF, ("seqlen", "heads", "head_dim"), "MeshAttention")


def test_memory_on_a_gpu_is_taken_where_it_lies(monkeypatch):
    """What CUDA says about the address decides: managed and device memory become CuPy's arrays, the host's NumPy's."""
    kinds, made = {}, []
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(pointerGetAttributes=lambda address: SimpleNamespace(type=kinds[address])),
        UnownedMemory=lambda *of: of,
        MemoryPointer=lambda memory, offset: (memory, offset),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, ndarray=lambda *of: made.append(of) or "gpu"))
    host = np.zeros(24, "f")
    of = arrays.Described(memoryview(host).cast("B"), host.ctypes.data, 3, 2, (3, 2), (8, 4))
    for kind in (2, 3):
        kinds[host.ctypes.data] = kind
        assert arrays.array_of("q", of, on_gpu=True) == "gpu"
        assert made.pop() == ((3, 2), np.dtype("f"), ((host.ctypes.data, 96, None), 0), [32, 16])
    kinds[host.ctypes.data] = 1
    assert arrays.array_of("q", of, on_gpu=True).ctypes.data == host.ctypes.data and not made
    kinds[host.ctypes.data] = 2  # freed by the host, and had from the GPU: the array of before does not count
    assert arrays.array_of("q", of, on_gpu=True) == "gpu"


def test_numbers_of_the_header():
    """The version of the interface, types of elements and statuses are those of Python's side."""
    header = (SOURCE / "mpiattn.h").read_text()
    assert re.findall(r"#define MPIATTN_ABI (\d+)", header) == [str(calls.ABI)]
    values = {name: int(value) for name, value in re.findall(r"MPIATTN_(\w+) = (\d+)", header)}
    assert {name.upper(): number for number, name in arrays.NAMES.items()}.items() <= values.items()
    errors = [name for name in values if name.startswith("ERR_")]
    assert [values[name] for name in errors] == [*range(1, 12)] and [values["ERR_FILE"], values["ERR_OTHER"]] == [
        status.FILE,
        status.OTHER,
    ]
    with pytest.raises(HostError, match="run mpiattn-config --build"):
        calls.start(calls.ABI + 1, print, None, None)


def test_errors_in_words():
    with pytest.raises(Exception, match="that of another kind: cache"):
        plans, caches = Handles("plan"), Handles("cache")
        plans[caches.add(object())]
    assert describe(MemoryError()) == (8, "not enough memory", b"")
    assert describe(MemoryShortage("the plan needs more")) == (8, "the plan needs more", b"")
    try:
        {}["x"]
    except KeyError as error:
        assert (
            describe(error)[0] == 10
            and "KeyError: 'x' (in test_errors_in_words, test_embed_values.py:" in describe(error)[1]
        )
    assert describe(SystemExit(3))[0] == 10
