"""`mpiattn convert`: tensors of every kind of file become what `mpiattn run` takes, or an error says why not."""

import subprocess
import sys

import h5py
import launch
import ml_dtypes
import numpy as np
import pytest
from files import bfloat16_type, write_input

from mpiattn.cli import convert, main
from mpiattn.files import tensor_files
from mpiattn.files.problems import read_problems

SHAPES = {"q": (2, 33, 4, 8), "k": (2, 21, 2, 8), "v": (2, 21, 2, 5), "dout": (2, 33, 4, 5)}
DTYPES = ["float32", "bfloat16", "float16", "float64"]


def drawn(dtype="float32", names=("q", "k", "v"), axes="bshd"):
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal(SHAPES[name]).astype(dtype) for name in names}
    return made if axes == "bshd" else {name: np.ascontiguousarray(made[name].swapaxes(1, 2)) for name in made}


def save(kind, folder, tensors):
    """The files that hold the tensors."""
    path = folder / f"in.{kind}"
    if kind == "npy":
        for name, array in tensors.items():
            np.save(folder / f"{name}.npy", array)
        return [folder / f"{name}.npy" for name in tensors]
    if kind in ("npz", "packed.npz"):
        (np.savez if kind == "npz" else np.savez_compressed)(path, **tensors)
    elif kind == "h5":
        with h5py.File(path, "w") as file:
            for name, array in tensors.items():
                file[name.replace(".", "/")] = array
    elif kind == "safetensors":
        pytest.importorskip("safetensors")
        from safetensors.numpy import save_file

        save_file(tensors, path)
    else:
        torch = pytest.importorskip("torch")
        whole = {
            name: torch.tensor(array.view(np.int16)).view(torch.bfloat16)
            if array.dtype.name == "bfloat16"
            else torch.tensor(array)
            for name, array in tensors.items()
        }
        torch.save(whole, path, _use_new_zipfile_serialization=kind == "pt")
    return [path]


def run(sources, out, *options):
    return main(["convert", *map(str, sources), str(out), *options])


def assert_holds(path, expected):
    with h5py.File(path) as file:
        assert set(file) == set(expected)
        for name, array in expected.items():
            kind = bfloat16_type() if array.dtype.name == "bfloat16" else h5py.h5t.py_create(array.dtype)
            assert file[name].id.get_type() == kind
            assert np.array_equal(file[name][...].astype(np.float64), array.astype(np.float64)), name


@pytest.mark.draw(24)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["npy", "npz", "packed.npz", "safetensors", "pt", "old.pth"])
@pytest.mark.parametrize("axes, piece", [("bshd", 2**22), ("bhsd", 7), ("bhsd", 100)])
def test_every_kind_order_and_dtype(tmp_path, monkeypatch, capsys, kind, dtype, axes, piece):
    monkeypatch.setattr(convert, "PIECE_ELEMENTS", piece)
    names = ("q", "k", "v", "dout")
    sources = save(kind, tmp_path, drawn(dtype, names, axes))
    assert run(sources, tmp_path / "out.h5", "--axes", axes) == 0
    assert_holds(tmp_path / "out.h5", drawn(dtype, names))
    assert f"q (2, 33, 4, 8), k (2, 21, 2, 8), v (2, 21, 2, 5), dout (2, 33, 4, 5), {dtype}" in capsys.readouterr().out
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "pt", "h5"])
def test_without_batch_and_other_names(tmp_path, kind):
    tensors = {name: array[0] for name, array in drawn().items()}
    sources = save(kind, tmp_path, {f"layers.0.{name}": array for name, array in tensors.items()})
    slash = "layers/0/" if kind == "h5" else "layers.0."
    assert run(sources, tmp_path / "out.h5", "--names", ",".join(f"{name} = {slash}{name}" for name in "qkv")) == 0
    assert_holds(tmp_path / "out.h5", {name: array[None] for name, array in tensors.items()})


def layers(*numbers):
    """Tensors of some layers, all different, by names as of a model's dump."""
    return {f"layers.{n}.{name}": array + np.float32(n) for n in numbers for name, array in drawn().items()}


def assert_has_layers(path, numbers, **others):
    with h5py.File(path) as file:
        assert set(file) == set(map(str, numbers))
        for n in numbers:
            assert set(file[str(n)]) == {*"qkv", *others}
            assert all(np.array_equal(file[f"{n}/{name}"], array + np.float32(n)) for name, array in drawn().items())
            assert all(np.array_equal(file[f"{n}/{name}"], array) for name, array in others.items())


EVERY_LAYER = "q=layers.*.q,k=layers.*.k,v=layers.*.v"


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "pt", "h5"])
def test_a_group_for_each_layer(tmp_path, capsys, kind):
    """In the order of their numbers; a tensor whose name has no * is in all of them."""
    cuts = np.array([0, 5, 66])
    names = EVERY_LAYER.replace(".", "/") if kind == "h5" else EVERY_LAYER
    sources = save(kind, tmp_path, layers(10, 2, 0) | {"boundaries": cuts})
    assert run(sources, tmp_path / "out.h5", "--names", f"{names},cu_seqlens=boundaries") == 0
    assert_has_layers(tmp_path / "out.h5", [0, 2, 10], cu_seqlens=cuts)
    each = "3 problems, each with q (2, 33, 4, 8), k (2, 21, 2, 8), v (2, 21, 2, 5), cu_seqlens (3,), float32, "
    assert f"out.h5: {each}" in capsys.readouterr().out
    problems, _ = read_problems(tmp_path / "out.h5")
    assert list(problems) == ["0", "2", "10"]


def test_a_group_for_each_file(tmp_path, capsys):
    sources = []
    for n in (0, 1):
        sources.append(tmp_path / f"{n}.npz")
        np.savez(sources[-1], **{name: array + np.float32(n) for name, array in drawn().items()})
    assert run(sources, tmp_path / "out.h5", "--each-file") == 0
    assert_has_layers(tmp_path / "out.h5", [0, 1])
    np.savez(sources[1], **{name: array[:, :20] for name, array in drawn().items()}, other=np.zeros(3))
    assert run(sources, tmp_path / "out.h5", "--each-file") == 0
    assert "; 1 problem, with q (2, 20, 4, 8), k (2, 20, 2, 8)" in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    same_name = tmp_path / "other" / "0.npz"
    same_name.write_bytes(sources[0].read_bytes())
    assert run([*sources, same_name], tmp_path / "out.h5", "--each-file") == 1
    assert "convert: FILES has two files called 0; with --each-file their names must" in capsys.readouterr().err
    np.savez(sources[1], q=drawn()["q"], v=drawn()["v"])
    assert run(sources, tmp_path / "out.h5", "--each-file") == 1
    assert f"FILES has {str(sources[1])!r}, which has no tensor 'k', and --names gives no" in capsys.readouterr().err


def test_groups_of_the_layers_of_each_file(tmp_path):
    sources = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for path, numbers in zip(sources, [(0, 1), (1, 2)]):
        np.savez(path, **layers(*numbers))
    assert run(sources, tmp_path / "out.h5", "--each-file", "--names", EVERY_LAYER) == 0
    problems, _ = read_problems(tmp_path / "out.h5")
    assert list(problems) == ["a/0", "a/1", "b/1", "b/2"]


@pytest.mark.parametrize(
    "tensors, names, says",
    [
        (
            {"layers.3.q": drawn()["q"]},
            EVERY_LAYER,
            "FILES has no tensor 'layers.3.k'; did you mean 'layers.3.q'?; it has",
        ),
        (
            {},
            "q=layer.*.q,k=layer.*.k,v=layer.*.v",
            "no tensor that q=layer.*.q of --names stands for; it has\n  layers.1.q",
        ),
        ({}, "q=*.*.q", "--names has q=*.*.q; a name may have one * and no more"),
        (
            {"layers.2/.q": np.zeros(3)},
            EVERY_LAYER,
            "in whose name * stands for '2/'; no group of OUT can be called so",
        ),
        ({"layers.1.v": np.zeros((2, 9, 2, 5), "f4")}, EVERY_LAYER, "in.safe:/1'; its shapes do not fit"),
    ],
)
def test_layers_that_are_not_whole(tmp_path, capsys, tensors, names, says):
    (source,) = save("npz", tmp_path, layers(1) | tensors)
    assert run([source.rename(tmp_path / "in.safe")], tmp_path / "out.h5", "--names", names) == 1
    assert says in capsys.readouterr().err
    assert not list(tmp_path.glob("*out.h5*"))


def test_nested_in_lists_and_alone(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.tensor(array) for name, array in drawn().items()}
    torch.save({"step": 3, "layers": [{"q": tensors["q"].requires_grad_()}]}, tmp_path / "a.pt")
    torch.save(tensors["k"], tmp_path / "keys.pt")
    torch.save([tensors["v"].swapaxes(1, 2).contiguous().swapaxes(1, 2)], tmp_path / "b.pt")
    sources = [tmp_path / name for name in ("a.pt", "keys.pt", "b.pt")]
    assert run(sources, tmp_path / "out.h5", "--names", "q=layers.0.q,k=keys,v=0") == 0
    assert_holds(tmp_path / "out.h5", drawn())


def test_bfloat16_and_documents_of_hdf5(tmp_path):
    cuts = np.array([0, 30, 67], np.int32)
    source = write_input(tmp_path / "in.h5", dtype="bfloat16", backward=True, cu_seqlens=cuts, other=np.zeros(3))
    assert run([source], tmp_path / "out.h5") == 0
    with h5py.File(source) as given:
        expected = {name: given[name][...].astype(ml_dtypes.bfloat16) for name in SHAPES}
    assert_holds(tmp_path / "out.h5", expected | {"cu_seqlens": cuts.astype(np.int64)})


@pytest.mark.parametrize("order", ["F", "big"])
def test_other_orders_of_memory(tmp_path, order):
    tensors = {
        name: np.asfortranarray(array) if order == "F" else array.astype(">f4") for name, array in drawn().items()
    }
    for kind in ("npy", "npz"):
        assert run(save(kind, tmp_path, tensors), tmp_path / "out.h5") == 0
        with h5py.File(tmp_path / "out.h5") as file:
            assert all(np.array_equal(file[name][...], array) for name, array in tensors.items())


def test_only(tmp_path):
    sources = save("npz", tmp_path, drawn())
    assert run(sources, tmp_path / "out.h5", "--only", "k,v") == 0
    assert_holds(tmp_path / "out.h5", {name: array for name, array in drawn().items() if name != "q"})


def test_replaces_itself_never(tmp_path, capsys):
    source = write_input(tmp_path / "in.h5")
    before = source.read_bytes()
    assert run([source], source) == 1
    assert "must be another file" in capsys.readouterr().err and source.read_bytes() == before


@pytest.mark.parametrize("kind", ["npz", "safetensors", "pt", "h5"])
def test_a_missing_name_lists_what_there_is(tmp_path, capsys, kind):
    sources = save(kind, tmp_path, {"quer": drawn()["q"], "k": drawn()["k"]})
    assert run(sources, tmp_path / "out.h5", "--names", "q=query") == 1
    said = capsys.readouterr().err
    assert "no tensor 'query'; did you mean 'quer'?; it has\n" in said
    assert "\n  quer (2, 33, 4, 8) float32\n" in said and "\n  k (2, 21, 2, 8) float32\n" in said
    assert run(sources, tmp_path / "out.h5") == 1
    assert "no tensor 'q', and --names gives no name for q" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out.h5*"))


@pytest.mark.parametrize(
    "tensors, options, says",
    [
        (
            {"v": np.zeros((2, 22, 2, 5), "f4")},
            [],
            "its shapes do not fit: q (2, 33, 4, 8), k (2, 21, 2, 8), v (2, 22, 2",
        ),
        ({"v": np.zeros((2, 21, 2, 5), "f8")}, [], "dtypes float32, float32, float64"),
        ({"v": np.zeros((2, 21, 2, 5), "i4")}, [], "in.npz', (2, 21, 2, 5) in int32; v must have 3 or 4"),
        ({"k": np.zeros((2, 21), "f4")}, [], "in.npz', (2, 21) in float32; k must have 3 or 4 dimensions"),
        ({"cu_seqlens": np.zeros(3)}, [], "cu_seqlens must have 1 or 2 dimensions and be of int32"),
        (dict.fromkeys("kv", np.zeros((2, 21, 3, 8), "f4")), [], "in.npz'; kv_heads is 3; it must divide"),
        ({}, ["--only", "k,v", "--names", "q=k"], "--names names q, which --only k,v leaves out"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, capsys, tensors, options, says):
    assert run(save("npz", tmp_path, drawn() | tensors), tmp_path / "out.h5", *options) == 1
    assert says in capsys.readouterr().err
    assert not list(tmp_path.glob("*out.h5*"))


@pytest.mark.parametrize("names", ["q", "q=", "=x", "x=q", "q=a,q=b", ""])
def test_names_that_say_nothing(capsys, names):
    with pytest.raises(SystemExit):
        main(["convert", "a", "b", "--names", names])
    assert "is not one of q=NAME, k=NAME" in capsys.readouterr().err


def test_one_name_in_two_files(tmp_path, capsys):
    for name in ("a", "b"):
        write_input(tmp_path / f"{name}.h5")
    assert run([tmp_path / "a.h5", tmp_path / "b.h5"], tmp_path / "out.h5") == 1
    assert f"FILES has 'q' in {str(tmp_path / 'a.h5')!r} and in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, says",
    [
        (b"hello", "it is none of .npy"),
        (b"", "it is none of .npy"),
        (b"PK\3\4broken", "cannot be read"),
        (b"\x93NUMPY\1\0broken", "cannot be read"),
        (b"\x89HDF\r\n\x1a\n", "cannot be read"),
        (None, "there is no such file"),
    ],
)
def test_what_is_no_such_file(tmp_path, capsys, content, says):
    if content is not None:
        (tmp_path / "in").write_bytes(content)
    assert run([tmp_path / "in"], tmp_path / "out.h5") == 1
    said = capsys.readouterr().err
    assert says in said and f"FILES is {str(tmp_path / 'in')!r}" in said and "Traceback" not in said
    assert not (tmp_path / "out.h5").exists()


@pytest.mark.parametrize("kind", ["npz", "packed.npz", "safetensors", "pt", "old.pth", "h5"])
def test_a_damaged_file(tmp_path, capsys, kind):
    (path,) = save(kind, tmp_path, drawn())
    path.write_bytes(path.read_bytes()[:2000])
    assert run([path], tmp_path / "out.h5") == 1
    assert f"FILES is {str(path)!r}" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out.h5*"))


def test_code_in_a_torch_file_is_not_run(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    torch.save({"q": np.polynomial.Polynomial([1])}, tmp_path / "in.pt")
    assert run([tmp_path / "in.pt"], tmp_path / "out.h5") == 1
    assert "it holds more than tensors" in capsys.readouterr().err


@pytest.mark.parametrize("package, content", [("torch", b"\x80\2"), ("safetensors", b"\2" + bytes(7) + b"{}")])
def test_a_missing_package_is_named(tmp_path, capsys, monkeypatch, package, content):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "in").write_bytes(content)
    assert run([tmp_path / "in"], tmp_path / "out.h5") == 1
    assert f"needs the package {package}, which is not installed: pip install {package}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "shape, limit", [((3, 4, 5), 60), ((3, 4, 5), 20), ((3, 4, 5), 19), ((3, 4, 5), 3), ((7,), 2), ((2, 0, 3), 5)]
)
def test_pieces(shape, limit):
    array = np.arange(np.prod(shape)).reshape(shape)
    pieces = [array[index].ravel() for index in tensor_files.pieces(shape, limit)]
    assert np.array_equal(np.concatenate([*pieces, []]), array.ravel())
    assert all(len(piece) <= limit for piece in pieces)


@pytest.mark.parametrize("kind", ["npy", "packed.npz"])
def test_larger_than_memory(tmp_path, kind):
    """200 MB of tensors by a process that holds much less of its own; a mapped file's pages are the system's."""
    tensor = np.zeros((1, 8, 32768, 64), np.float32)
    sources = save(kind, tmp_path, dict.fromkeys("qkv", tensor))
    code = (
        "import re, sys; from mpiattn.cli import main\n"
        "import h5py, numpy, tqdm\n"
        "peak = []\n"
        "from mpiattn.files import hdf5; write = hdf5.write\n"
        "def noted(*given):\n"
        "    write(*given)\n"
        "    peak.append(int(re.search(r'RssAnon:\\s*(\\d+)', open('/proc/self/status').read())[1]))\n"
        "hdf5.write = noted\n"
        "before = int(re.search(r'RssAnon:\\s*(\\d+)', open('/proc/self/status').read())[1])\n"
        "assert main(sys.argv[1:]) == 0\n"
        "print(max(peak) - before)"
    )
    command = [sys.executable, "-c", code, "convert", *map(str, sources), str(tmp_path / "x.h5"), "--axes", "bhsd"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=launch.patience(100), check=True)
    assert int(outcome.stdout.split()[-1]) * 1024 < 80e6
