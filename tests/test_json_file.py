"""The helper that writes JSON files."""

import json
import os
import stat

import pytest

from mpiattn.bench.store import write_hdf5
from mpiattn.console.json_file import check_json, write_json
from mpiattn.errors import FileError


def test_json_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "old.json"
    path.write_text("{old}")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match=r"--json is .*old\.json'; it cannot be written: No space left"):
        write_json(str(path), {"new": 1})
    assert path.read_text() == "{old}"
    assert os.listdir(tmp_path) == ["old.json"]


def test_json_replaces_what_a_link_points_to_and_follows_the_umask(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    before = os.umask(0o027)
    try:
        write_json(str(tmp_path / "link.json"), [1])
    finally:
        os.umask(before)
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == [1]
    assert stat.S_IMODE((tmp_path / "real.json").stat().st_mode) == 0o640


@pytest.mark.parametrize(
    "name, write",
    [
        ("--json", lambda path: write_json(path, {"new": 1})),
        ("--json", lambda path: check_json(path)),
        ("--hdf5", lambda path: write_hdf5(path, {"cases": []}, [])),
    ],
)
def test_what_is_something_else_stays(tmp_path, name, write):
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    with pytest.raises(FileError, match=rf"{name} is .*it holds something else; give another name, or remove the file"):
        write(str(path))
    assert path.read_text() == "my notes" and os.listdir(tmp_path) == ["notes.txt"]


def test_json_to_a_device_a_folder_and_nan(tmp_path):
    write_json("/dev/null", [1])
    assert not os.path.isfile("/dev/null")
    with pytest.raises(FileError, match="--json"):
        write_json(str(tmp_path), [1])
    with pytest.raises(ValueError):
        write_json(str(tmp_path / "nan.json"), [float("nan")])
    assert not os.listdir(tmp_path)
