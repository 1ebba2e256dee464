"""netCDF's attributes of datasets: numbers are unpacked by every command, and missing ones counted."""

import h5py
import numpy as np
import pytest
import warm
from files import datasets, write_input

from mpiattn.files.numbers import Numbers

SHAPE = {"seqlen": 37, "heads": 2, "kv_heads": 1, "head_dim": 8}


def stored(path, array, fillvalue=None, **attributes):
    """An open dataset of these elements and attributes."""
    file = h5py.File(path, "w")
    data = file.create_dataset("x", data=np.asarray(array), fillvalue=fillvalue)
    data.attrs.update(attributes)
    return data


def numbers_of(data):
    """All numbers of a dataset, and how many are missing."""
    numbers = Numbers(data)
    array = numbers.read((0,) * data.ndim, data.shape)
    assert array.dtype.name == numbers.dtype and array.dtype.isnative
    return array, numbers.take_missing()[0]


SHORT = np.array([-3, 0, 7, 32767], np.int16)
f4, f8, i1, i2 = np.float32, np.float64, np.int8, np.int16


@pytest.mark.parametrize(
    "elements, attributes, right, dtype",
    [
        (SHORT, {"scale_factor": f8(0.5)}, SHORT * 0.5, "float64"),
        (SHORT, {"scale_factor": f4(0.01), "add_offset": f4(3)}, SHORT * float(f4(0.01)) + 3, "float32"),
        (SHORT, {"add_offset": f4(3)}, SHORT + 3.0, "float32"),
        (SHORT, {"scale_factor": np.array([0.5])}, SHORT * 0.5, "float64"),
        (SHORT, {"scale_factor": "0.5"}, SHORT * 0.5, "float64"),
        (SHORT, {"scale_factor": i2(2)}, SHORT * 2.0, "float64"),
        (SHORT.astype(">i2"), {"scale_factor": f4(2)}, SHORT * 2.0, "float32"),
        (np.array([-1, 1], i1), {"scale_factor": f4(1), "_Unsigned": "true"}, [255, 1], "float32"),
        (np.array([-1, 1], i1), {"scale_factor": f4(1), "_Unsigned": "false"}, [-1, 1], "float32"),
        (np.array([1.5, 2], f4), {"scale_factor": f4(2)}, [3, 4], "float32"),
        (np.array([1.5, 2], f4), {"scale_factor": f8(2)}, [3, 4], "float64"),
        (np.array([1.5, 2], ">f8"), {"add_offset": f4(2)}, [3.5, 4], "float64"),
        (np.array([1.5, 2], "f2"), {"scale_factor": f4(2)}, [3, 4], "float32"),
    ],
)
def test_unpacked(tmp_path, elements, attributes, right, dtype):
    array, missing = numbers_of(stored(tmp_path / "x.nc", elements, **attributes))
    np.testing.assert_array_equal(array, np.asarray(right, dtype))
    assert (array.dtype.name, missing) == (dtype, 0)


FLOATS = np.array([1, -9999, 1e20, np.nan, 0.1], f4)


@pytest.mark.parametrize(
    "elements, attributes, missing",
    [
        (FLOATS, {"_FillValue": f4(-9999)}, [1]),
        (FLOATS, {"_FillValue": f8(1e20)}, [2]),
        (FLOATS, {"_FillValue": i2(-9999)}, [1]),
        (FLOATS, {"_FillValue": "-9999"}, [1]),
        (FLOATS, {"_FillValue": f4(np.nan)}, [3]),
        (FLOATS, {"missing_value": np.array([1, 1e20], f4)}, [0, 2]),
        (FLOATS, {"missing_value": f4(np.nan), "_FillValue": f4(-9999)}, [1, 3]),
        (FLOATS, {"valid_range": np.array([-10, 1e10], f4)}, [1, 2]),
        (FLOATS, {"valid_min": 0.1}, [1]),  # which is a little more than the element 0.1 is
        (FLOATS, {"valid_max": 1e10}, [2]),
        (SHORT, {"_FillValue": i2(7), "scale_factor": 0.5}, [2]),
        (SHORT, {"_FillValue": np.int32(7), "scale_factor": 0.5}, [2]),
        (SHORT, {"_FillValue": np.int32(7 + 2**16), "scale_factor": 0.5}, []),
        (SHORT, {"_FillValue": f8(np.nan), "scale_factor": 0.5}, []),
        (SHORT, {"_FillValue": f8(1e300), "scale_factor": 0.5}, []),
        (SHORT, {"valid_range": np.array([-3, 7], i2), "scale_factor": 0.5}, [3]),
        (SHORT, {"valid_max": 3.5, "scale_factor": 0.5}, [3]),  # of the numbers, as their dtype says
        (SHORT, {"valid_max": 1.0, "scale_factor": -1.0}, [0]),
        (SHORT, {"valid_max": np.int32(100000), "scale_factor": 0.5}, []),
        (np.array([-1, -2, 3], i1), {"_FillValue": i1(-1), "scale_factor": 1.0, "_Unsigned": "true"}, [0]),
        (np.array([-1, -2, 3], i1), {"valid_max": i1(-2), "scale_factor": 1.0, "_Unsigned": "true"}, [0]),
    ],
)
def test_missing(tmp_path, elements, attributes, missing):
    data = stored(tmp_path / "x.nc", elements, **attributes)
    array, count = numbers_of(data)
    whole = elements.view(np.uint8) if "_Unsigned" in attributes else elements
    right = whole.astype(array.dtype) * float(attributes.get("scale_factor", 1))
    right[missing] = np.nan
    np.testing.assert_array_equal(array, right)
    assert count == len(missing)


@pytest.mark.parametrize("dtype", ["i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])
def test_numbers_that_nobody_wrote(tmp_path, dtype):
    """netCDF's library fills datasets with numbers of its own, and names them nowhere."""
    unwritten = {"i2": -32767, "u2": 65535, "i4": -(2**31) + 1, "u4": 2**32 - 1, "i8": -(2**63) + 2, "u8": 2**64 - 2}
    fill = np.array(unwritten.get(dtype, 9.969209968386869e36), dtype)
    elements = np.array([1, fill, 3], dtype)
    assert numbers_of(stored(tmp_path / "x.nc", elements, fillvalue=fill))[1] == 1
    assert numbers_of(stored(tmp_path / "y.nc", elements))[1] == 0
    assert numbers_of(stored(tmp_path / "z.nc", elements, fillvalue=1))[1] == 0


@pytest.mark.parametrize(
    "attributes",
    [
        {"_FillValue": "none"},
        {"_FillValue": h5py.Empty("f4")},
        {"missing_value": ["a", "b"]},
        {"missing_value": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")])},
        {"valid_range": "0 to 1"},
        {"valid_range": np.array([0.0])},
        {"valid_min": np.array([2.0, 3.0])},
        {"valid_max": 1j},
        {"valid_min": np.float128(-1e300)},
        {"_Unsigned": 7},
        {"units": "m", "long_name": "scale_factor"},
    ],
)
def test_attributes_that_say_nothing(tmp_path, attributes):
    array, missing = numbers_of(stored(tmp_path / "x.nc", FLOATS, **attributes))
    np.testing.assert_array_equal(array, FLOATS)
    assert missing == 0


@pytest.mark.parametrize("value", ["1/8", np.nan, np.array([1.0, 2.0]), h5py.Empty("f4"), 1j])
@pytest.mark.parametrize("name", ["scale_factor", "add_offset"])
def test_a_scale_that_is_no_number(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name} of its dataset '/x' must be one number"):
        Numbers(stored(tmp_path / "x.nc", FLOATS, **{name: value}))


# The commands


def packed(source, result, names="qkv", step=0.01, offset=0.5, **attributes):
    """Write the numbers of a file packed, and replace them by those that were packed."""
    with h5py.File(source, "r+") as plain, h5py.File(result, "w") as file:
        for name in plain:
            if name not in names:
                file[name] = plain[name][...]
                continue
            elements = np.rint((plain[name][...] - offset) / step).astype(np.int16)
            data = file.create_dataset(name, data=elements, chunks=True, compression="gzip")
            data.attrs.update({"scale_factor": f4(step), "add_offset": f4(offset), **attributes})
            plain[name][...] = elements * float(f4(step)) + float(f4(offset))
    return source, result


@pytest.mark.parametrize("n, layout", [(1, "contiguous"), (3, "striped"), (2, "zigzag")])
def test_run(tmp_path, n, layout):
    """Packed numbers give the bits that plain ones give: q, k, v, dout, biases, and all that --verify reads."""
    rng = np.random.default_rng(1)
    biases = {"pair": rng.standard_normal((1, 2, 37, 37), np.float32), "weights": rng.standard_normal(37, np.float32)}
    plain = write_input(tmp_path / "plain.h5", **SHAPE, backward=True, **biases)
    names = ["q", "k", "v", "dout", "pair", "weights"]
    source = packed(plain, tmp_path / "in.nc", names, _FillValue=i2(-32768), valid_range=np.array([-30000, 30000], i2))
    outs = tmp_path / "plain_out.h5", tmp_path / "out.h5"
    options = "--bias pair --key-bias weights --causal --backward --verify --backend numpy --layout".split()
    for given, out in zip(source, outs):
        outcome = warm.command(n, ["run", given, out, *options, layout])
        assert outcome.stdout.count("passed") == 3
    assert datasets(outs[0]) == datasets(outs[1])
    assert "q = 0.01 * element + 0.5, k =" in outcome.stdout  # what is done is said, and kept
    with h5py.File(outs[1]) as made:
        assert made.attrs["unpacked"].count("0.01 * element + 0.5") == len(names)


def test_run_axes(tmp_path):
    """In PyTorch's order."""
    plain = write_input(tmp_path / "plain.h5", **SHAPE)
    with h5py.File(plain, "r+") as file:
        for name in "qkv":
            array = file[name][...].swapaxes(1, 2)
            del file[name]
            file[name] = array
    outs = tmp_path / "plain_out.h5", tmp_path / "out.h5"
    for given, out in zip(packed(plain, tmp_path / "in.nc"), outs):
        warm.command(2, ["run", given, out, "--axes", "bhsd", "--layout", "striped"])
    assert datasets(outs[0]) == datasets(outs[1])


def with_missing(path, where, fill=-9999.0):
    """Make numbers of a file missing.  where: by dataset, indices."""
    with h5py.File(path, "r+") as file:
        for name, indices in where.items():
            file[name].attrs["_FillValue"] = f4(fill)
            for index in indices:
                file[name][index] = fill
    return path


MISSED = {"q": [(0, 5)], "v": [(0, 36, 0, 7), (0, 20, 0, 3)], "pair": [(0, 1, 30, 2)], "weights": [11, 20]}


@pytest.mark.parametrize("n, tile", [(1, "1x1"), (3, "1x3"), (4, "2x1x2")])
@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_missing_numbers_are_counted(tmp_path, n, tile, layout):
    rng = np.random.default_rng(1)
    biases = {"pair": rng.standard_normal((1, 2, 37, 37), np.float32), "weights": rng.standard_normal(37, np.float32)}
    source = write_input(tmp_path / "in.h5", **SHAPE, **biases)
    options = ["--bias", "pair", "--key-bias", "weights", "--layout", layout, "--tile", tile]
    with_missing(source, MISSED)

    def said():
        outcome = warm.command(n, ["run", source, tmp_path / "out.h5", *options], check=False)
        assert outcome.returncode == 1 and not (tmp_path / "out.h5").exists()
        (text,) = [line for line in outcome.stderr.splitlines() if "numbers are missing" in line]
        return text

    tensors = said()
    assert "16 of q, the first is q[0, 5, 0, 0]; 2 of v, the first is v[0, 20, 0, 3]; `--missing nan`" in tensors
    with h5py.File(source, "r+") as file:
        file["q"][0, 5] = file["v"][0, 20] = file["v"][0, 36] = 0
    of_biases = said()
    assert "1 of pair, the first is pair[0, 1, 30, 2]" in of_biases
    assert "2 of weights, the first is weights[11]" in of_biases


@pytest.mark.parametrize("n", [1, 3])
def test_missing_numbers_as_nan(tmp_path, n):
    source, out = with_missing(write_input(tmp_path / "in.h5", **SHAPE), {"q": [(0, 5)]}), tmp_path / "out.h5"
    outcome = warm.command(n, ["run", source, out, "--missing", "nan", "--verify"])
    assert "16 in q, 16 in out" in outcome.stderr and "passed" in outcome.stdout
    with h5py.File(out) as file:
        assert np.flatnonzero(np.isnan(file["out"][0]).all(axis=(1, 2))).tolist() == [5]


@pytest.mark.parametrize("n", [1, 3])
def test_fill_values_that_no_number_has(tmp_path, n):
    """As xarray writes them beside every dataset of floats."""
    source, out = write_input(tmp_path / "in.h5", **SHAPE), tmp_path / "out.h5"
    warm.command(n, ["run", source, tmp_path / "plain.h5"])
    with h5py.File(source, "r+") as file:
        for name in "qkv":
            file[name].attrs["_FillValue"] = f4(np.nan)
    outcome = warm.command(n, ["run", source, out])
    assert not outcome.stderr.count("WARNING: elements")
    assert datasets(out) == datasets(tmp_path / "plain.h5")


@pytest.mark.parametrize("n", [1, 3])
def test_decode(tmp_path, n):
    """Packed CACHE and QUERIES; a missing number is counted once, though every rank has all queries."""
    plain = write_input(tmp_path / "plain.h5", **SHAPE, q=None, cu_seqlens=np.array([0, 20, 37]))
    queries = write_input(tmp_path / "q.h5", **SHAPE, batch=2, k=None, v=None)
    caches, asked = packed(plain, tmp_path / "cache.nc"), packed(queries, tmp_path / "q.nc")
    outs = tmp_path / "plain_out.h5", tmp_path / "out.h5"
    for cache, q, out in zip(caches, asked, outs):
        outcome = warm.command(n, ["decode", cache, q, out, "--full", "--verify"])
        assert "passed" in outcome.stdout
    assert datasets(outs[0]) == datasets(outs[1])

    with_missing(queries, {"q": [(1, 2)]})
    outcome = warm.command(n, ["decode", plain, queries, tmp_path / "none.h5", "--full"], check=False)
    assert "QUERIES is" in outcome.stderr and "16 of q, the first is q[1, 2, 0, 0]" in outcome.stderr
    assert outcome.stderr.count("numbers are missing") == 1
    warm.command(n, ["decode", plain, queries, tmp_path / "nan.h5", "--full", "--missing", "nan"])
    with_missing(plain, {"k": [(0, 9)]})
    outcome = warm.command(n, ["decode", plain, queries, tmp_path / "none.h5", "--full"], check=False)
    assert "CACHE is" in outcome.stderr and "8 of k, the first is k[0, 9, 0, 0]" in outcome.stderr


def test_documents(tmp_path):
    """Boundaries are numbers like others: packed ones are refused, missing ones too."""
    cuts = np.array([0, 20, 37], np.int32)
    source = write_input(tmp_path / "in.h5", **SHAPE, cu_seqlens=cuts)

    def said():
        outcome = warm.command(2, ["run", source, tmp_path / "x.h5", "--documents", "cu_seqlens"], check=False)
        return outcome.stderr

    with h5py.File(source, "r+") as file:
        file["cu_seqlens"].attrs["_FillValue"] = np.int32(-1)
    assert not said()
    with h5py.File(source, "r+") as file:
        file["cu_seqlens"].attrs["_FillValue"] = np.int32(20)
    assert "--documents is 'cu_seqlens'" in said() and "1 of /cu_seqlens, the first is /cu_seqlens[1]" in said()
    with h5py.File(source, "r+") as file:
        file["cu_seqlens"].attrs["scale_factor"] = 0.5
    assert "it holds float64 of shape (3,), it must hold whole numbers" in said()


def test_convert(tmp_path):
    """Writes plain numbers."""
    plain, source = packed(write_input(tmp_path / "plain.h5", **SHAPE), tmp_path / "in.nc")
    warm.command(1, ["convert", source, tmp_path / "out.h5"])
    assert datasets(tmp_path / "out.h5") == datasets(plain)
    with h5py.File(tmp_path / "out.h5") as file:
        assert not any(file[name].attrs for name in "qkv")

    with_missing(plain, {"k": [(0, 3), (0, 9, 0, 1)]})
    outcome = warm.command(1, ["convert", plain, tmp_path / "none.h5"], check=False)
    assert "FILES is" in outcome.stderr and "9 of k, the first is k[0, 3, 0, 0]" in outcome.stderr
    assert not (tmp_path / "none.h5").exists()
    warm.command(1, ["convert", plain, tmp_path / "nan.h5", "--missing", "nan"])
    with h5py.File(tmp_path / "nan.h5") as file:
        assert np.isnan(file["k"][...]).sum() == 9


def test_a_scale_in_words_is_refused(tmp_path):
    source = write_input(tmp_path / "in.h5", **SHAPE)
    with h5py.File(source, "r+") as file:
        file["k"].attrs["scale_factor"] = "1/sqrt(8)"
    for n, command in ((2, "run"), (1, "convert")):
        outcome = warm.command(n, [command, source, tmp_path / "out.h5"], check=False)
        assert "attribute scale_factor of its dataset '/k' must be one number" in outcome.stderr
        assert "Traceback" not in outcome.stderr
