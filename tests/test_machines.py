"""The store of machines: an entry is used for launches of its kind only, and a broken store does no harm."""

import json
import os
import warnings
from dataclasses import replace

import pytest

from mpiattn.errors import ArgumentError, FileError
from mpiattn.model import store
from mpiattn.model.machine import DEFAULT, H100, Link, Machine
from mpiattn.model.store import Entry, Key

KEY = Key("Processor", 2, "openblas 0.3", 1, "numpy 2.4", "MPICH Version: 5.0.2", 4, False, 128)
MACHINE = replace(
    DEFAULT,
    name="measured",
    inside=Link(3e-6, 7e9, 0.25),
    flops={"float32": 50e9},
    ranks_per_node=4,
    node_bandwidth=2e9,
    combining={"butterfly": [[4128, 1.5], [66048, 2.0]]},
)


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(store.VARIABLE, raising=False)


def entry(key=KEY, machine=MACHINE):
    return Entry(key, machine, "2030-01-02T03:04:05Z", {"launch": {"typical": 1e-4}})


def write(text):
    os.makedirs(os.path.dirname(store.path()), exist_ok=True)
    with open(store.path(), "w") as file:
        file.write(text)


def data(**changes):
    return {"format": store.FORMAT, "entries": [entry().as_dict()], **changes}


def without(name, within=None):
    """The store's text with one field of an entry, or of a part of it, left out."""
    edited = data()
    del (edited["entries"][0][within] if within else edited["entries"][0])[name]
    return json.dumps(edited)


def test_round_trip():
    assert store.store(entry()) is False
    assert store.read() == [entry()]
    assert store.resolve(KEY) == (MACHINE, f"measured 2030-01-02T03:04:05Z with head_dim 128, {store.path()}")
    other = entry(KEY._replace(cores=3), replace(MACHINE, launch=1.0))
    assert store.store(other) is False
    assert store.store(entry(machine=DEFAULT)) is True  # in place of the first
    assert store.read() == [other, entry(machine=DEFAULT)]
    assert os.listdir(os.path.dirname(store.path())) == ["machines.json"]


@pytest.mark.parametrize("field", [field for field in Key._fields if field != "head_dim"])
def test_another_launch_gets_the_default(field):
    """A launch of another kind gets the default machine with its own ranks per node."""
    store.store(entry())
    key = KEY._replace(**{field: 7 if isinstance(getattr(KEY, field), int) else "another"})
    machine, where = store.resolve(key)
    assert machine == DEFAULT.with_ranks(key.ranks_per_node) and where.startswith("default, since")
    machine, where = store.resolve(key, assumed=H100)  # that of the back end
    assert machine == H100.with_ranks(key.ranks_per_node) and where.startswith("h100, since")


def test_the_nearest_head_dim():
    for head_dim in (32, 128):
        store.store(entry(KEY._replace(head_dim=head_dim), replace(MACHINE, launch=float(head_dim))))
    for head_dim, nearest in ((1, 32), (32, 32), (63, 32), (65, 128), (512, 128)):
        assert store.resolve(KEY._replace(head_dim=head_dim))[0].launch == nearest


def test_no_store_is_no_trouble():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.resolve(KEY)[0] == DEFAULT.with_ranks(4)


BROKEN = {
    "text": "not JSON",
    "binary": "\udcff\x00",
    "list": "[]",
    "deep": "[" * 100_000,
    "old": json.dumps(data(format=0)),
    "no entries": json.dumps(data(entries=None)),
    "entries of another kind": json.dumps(data(entries=[1, "two", None])),
    "no samples": without("samples"),
    "no cores": without("cores", "key"),
    "no flops": without("flops", "machine"),
    "head_dim": json.dumps(data()).replace('"head_dim": 128', '"head_dim": 0'),
    "a link that is none": json.dumps(data()).replace('"latency": 3e-06', '"latency": "fast"'),
    "a algorithm that is none": json.dumps(data()).replace('"butterfly"', '"flight"'),
    "sizes that fall": json.dumps(data()).replace("4128", "70000"),
    "combining that is none": json.dumps(data()).replace("[4128, 1.5]", "1.5"),
    "combining without a factor": json.dumps(data()).replace("[4128, 1.5]", "[4128]"),
    "more than there is": json.dumps(data()).replace('"launch": 5e-05', '"launch": 5e-05, "colour": 1'),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_store_is_ignored_with_a_warning(name):
    os.makedirs(os.path.dirname(store.path()))
    with open(store.path(), "wb") as file:
        file.write(BROKEN[name].encode(errors="surrogateescape"))
    with pytest.warns(RuntimeWarning, match="machines.json is not used: .*run `mpiattn tune` again") as warned:
        assert store.resolve(KEY)[0] == DEFAULT.with_ranks(4)
    assert len(warned) == 1
    store.store(entry())  # and replaced, but not lost
    assert store.resolve(KEY)[0] == MACHINE
    with open(f"{store.path()}.old", "rb") as file:
        assert file.read() == BROKEN[name].encode(errors="surrogateescape")


def test_one_broken_entry_does_not_spoil_the_others():
    write(json.dumps(data(entries=[{}, entry().as_dict()])))
    with pytest.warns(RuntimeWarning, match="is not used in part"):
        assert store.resolve(KEY)[0] == MACHINE


def test_a_store_that_cannot_be_read():
    os.makedirs(store.path())
    with pytest.warns(RuntimeWarning, match="it cannot be read"):
        assert store.resolve(KEY)[0] == DEFAULT.with_ranks(4)
    with pytest.raises(FileError, match=r"the store of machines is .*it is a folder"):
        store.store(entry())


def test_what_is_named_goes_first(tmp_path, monkeypatch):
    store.store(entry())
    file = tmp_path / "machine.json"
    other = replace(MACHINE, name="other", ranks_per_node=9)
    file.write_text(json.dumps(other.as_dict()))
    assert store.resolve(KEY, "h100") == (H100, "'h100', as given")
    assert store.resolve(KEY, file)[0] == other
    assert store.resolve(KEY, other) == (other, "as given")
    monkeypatch.setenv(store.VARIABLE, str(file))
    assert store.resolve(KEY) == (other, f"MPIATTN_MACHINE={file}")
    assert store.resolve(KEY, "h100")[0] == H100  # the argument before the variable
    monkeypatch.setenv(store.VARIABLE, "no such")
    with pytest.raises(
        ArgumentError, match=r"MPIATTN_MACHINE is 'no such'; .* it may be default, h100, h100-staged or a file"
    ):
        store.resolve(KEY)
    with pytest.raises(
        ArgumentError, match="machine is 3; it may be None, a Machine, default, h100, h100-staged or a file"
    ):
        store.resolve(KEY, 3)
    assert isinstance(store.resolve(KEY, "default")[0], Machine)
