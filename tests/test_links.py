"""Inputs whose datasets lie in other files: behind links and in virtual datasets; and those that nobody has written."""

import os

import h5py
import numpy as np
import pytest
import warm
from files import assert_right, write_input

from mpiattn.cli import main
from mpiattn.files import presence

NUMBERS = np.random.default_rng(9).standard_normal(100_000).astype(np.float32)  # more than all of the linked datasets


def master(folder, link):
    """A file with numbers of its own, and q, k and v behind links."""
    write_input(folder / "data.h5", seqlen=64, heads=2, kv_heads=2, head_dim=16)
    with h5py.File(folder / "master.h5", "w") as file:
        file["numbers"] = NUMBERS
        for name in "qkv":
            link(file, name)
    return folder / "master.h5"


def external(file, name, path="data.h5"):
    file[name] = h5py.ExternalLink(path, name)


def soft_then_external(file, name):
    file[f"there/{name}"] = h5py.ExternalLink("data.h5", name)
    file[name] = h5py.SoftLink(f"/there/{name}")


def soft(file, name):
    with h5py.File(os.path.join(os.path.dirname(file.filename), "data.h5")) as data:
        file[f"there/{name}"] = data[name][...]
    file[name] = h5py.SoftLink(f"/there/{name}")


def virtual(file, name, path="data.h5"):
    folder = os.path.dirname(file.filename)
    with h5py.File(os.path.join(folder, "data.h5")) as data:
        layout = h5py.VirtualLayout(data[name].shape, data[name].dtype)
        layout[...] = h5py.VirtualSource(path, name, data[name].shape)
    file.create_virtual_dataset(name, layout, fillvalue=0)


def test_a_virtual_dataset_of_scattered_parts(tmp_path):
    """Its selections are of blocks at any distances; all of them together are all of it, or not."""
    numbers = np.arange(24, dtype=np.float32).reshape(6, 4)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = numbers
    for rows, missing in (([0, 1, 3], [2, 4, 5]), ([0, 1, 3], [2, 4])):
        layout = h5py.VirtualLayout((6, 4), np.float32)
        for some in (rows, missing):
            layout[some] = h5py.VirtualSource(tmp_path / "data.h5", "x", (6, 4))[some]
        with h5py.File(tmp_path / "in.h5", "w") as file:
            file.create_virtual_dataset("x", layout)
        with h5py.File(tmp_path / "in.h5") as file:
            if len(missing) == 3:
                presence.opened(file, "x")
                assert np.array_equal(file["x"][:], numbers)
            else:
                with pytest.raises(presence.AbsentError, match="4 elements are in no part"):
                    presence.opened(file, "x")


LINKS = [external, soft_then_external, soft, virtual]


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.__name__)
def test_run_follows_links(tmp_path, link):
    """Also where the bytes at the same offset of the file itself are other numbers."""
    source = master(tmp_path, link)
    outcome = warm.command(2, ["run", source, tmp_path / "out.h5", "--causal", "--verify"])
    assert "passed" in outcome.stdout
    assert_right(tmp_path / "data.h5", tmp_path / "out.h5", causal=True)


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.__name__)
def test_convert_follows_links(tmp_path, link, capsys):
    source = master(tmp_path, link)
    assert main(["convert", str(source), str(tmp_path / "out.h5")]) == 0
    with h5py.File(tmp_path / "data.h5") as data, h5py.File(tmp_path / "out.h5") as out:
        for name in "qkv":
            assert (data[name][...] == out[name][...]).all()


def test_a_cache_is_read_from_where_it_lies(tmp_path):
    """By `decode`, whose cache is loaded at the offsets of k and v."""
    source = master(tmp_path, external)
    rng = np.random.default_rng(1)
    with h5py.File(tmp_path / "queries.h5", "w") as file:
        file["q"] = rng.standard_normal((1, 1, 2, 16)).astype(np.float32)
    for name in ("master.h5", "data.h5"):
        words = "decode", tmp_path / name, tmp_path / "queries.h5", tmp_path / f"of-{name}"
        warm.command(2, words)
    with h5py.File(tmp_path / "of-master.h5") as linked, h5py.File(tmp_path / "of-data.h5") as direct:
        assert (linked["out"][...] == direct["out"][...]).all()
    assert source.exists()


MISSING = {
    "external": (external, "'q' is a link to 'q' of the file 'data.h5', which is not there"),
    "behind a soft one": (soft_then_external, "'there/q' is a link to 'q' of the file 'data.h5', which is not there"),
    "virtual": (virtual, "'q' is virtual: a part of it is 'q' of the file 'data.h5', which is not there"),
}


@pytest.mark.parametrize("command", ["run", "convert"])
@pytest.mark.parametrize("case", MISSING)
def test_a_source_that_is_not_there(tmp_path, case, command, capsys):
    """HDF5 reads zeros in place of a virtual dataset's; all commands name the file."""
    link, text = MISSING[case]
    source = master(tmp_path, link)
    (tmp_path / "data.h5").unlink()
    if command == "convert":
        assert main(["convert", str(source), str(tmp_path / "out.h5")]) != 0
        said = capsys.readouterr().err
    else:
        outcome = warm.command(2, ["run", source, tmp_path / "out.h5"], check=False)
        assert outcome.returncode
        said = outcome.stderr
    assert said.count(text) == 1, said
    assert not (tmp_path / "out.h5").exists()


def test_a_link_to_a_name_that_the_file_does_not_have(tmp_path, capsys):
    source = master(tmp_path, external)
    with h5py.File(tmp_path / "data.h5", "r+") as file:
        del file["q"]
    assert main(["convert", str(source), str(tmp_path / "out.h5")]) != 0
    assert "'q' is a link to 'q' of the file 'data.h5', which has none" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "convert"])
def test_what_nobody_has_written(tmp_path, command, capsys):
    """HDF5 would read zeros."""
    source = write_input(tmp_path / "in.h5")
    with h5py.File(source, "r+") as file:
        shape = file["q"].shape
        del file["q"]
        file.create_dataset("q", shape, "float32")
    if command == "convert":
        assert main(["convert", str(source), str(tmp_path / "out.h5")]) != 0
        said = capsys.readouterr().err
    else:
        said = warm.command(2, ["run", source, tmp_path / "out.h5"], check=False).stderr
    assert said.count("nothing was ever written to its dataset 'q'") == 1, said


def test_links_that_lead_back(tmp_path, capsys):
    """A group that holds itself is listed once."""
    source = master(tmp_path, external)
    with h5py.File(source, "r+") as file:
        file["again"] = h5py.SoftLink("/")
    assert main(["convert", str(source), str(tmp_path / "out.h5")]) == 0


def test_boundaries_beyond_what_an_integer_holds(tmp_path):
    source = write_input(tmp_path / "in.h5")
    with h5py.File(source, "r+") as file:
        file["cu_seqlens"] = np.array([0, 2**63], np.uint64)
    words = "run", source, tmp_path / "out.h5", "--documents", "cu_seqlens"
    outcome = warm.command(2, words, check=False)
    assert f"it holds {2**63}, it must hold numbers up to {2**63 - 1}" in outcome.stderr, outcome.stderr


@pytest.mark.parametrize("command", ["convert", "generate", "run", "decode"])
def test_a_file_that_is_no_hdf5_is_not_replaced(tmp_path, command, capsys):
    """`convert q.npy k.npy v.npy`, with OUT forgotten, would replace v.npy."""
    source = write_input(tmp_path / "in.h5")
    other = tmp_path / "v.npy"
    np.save(other, NUMBERS)
    before = other.read_bytes()
    words = {
        "convert": ["convert", str(source), str(other)],
        "generate": ["generate", str(other), "--seqlen", "9", "--heads", "1", "--head-dim", "8"],
        "run": ["run", str(source), str(other)],
        "decode": ["decode", str(source), str(source), str(other)],
    }[command]
    if command in ("convert", "generate"):
        assert main(words) != 0
        said = capsys.readouterr().err
    else:
        outcome = warm.command(2, words, check=False)
        assert outcome.returncode
        said = outcome.stderr
    name = "FILE" if command == "generate" else "OUT"
    assert said.count(f"it was taken for {name}") == 1 and str(other) in said, said
    assert other.read_bytes() == before


def test_an_empty_file_may_be_replaced(tmp_path):
    """As `mktemp` makes one."""
    (tmp_path / "out.h5").touch()
    assert main(["generate", str(tmp_path / "out.h5"), *"--seqlen 9 --heads 1 --head-dim 8".split()]) == 0
