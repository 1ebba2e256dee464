"""Tiles of datasets of pairs: read and written where their rows and columns are, also between those of others."""

import h5py
import numpy as np
import pytest

from mpiattn.files import pairs
from mpiattn.files.numbers import Numbers

POSITIONS = [range(7), range(3, 20, 4), [9, 2, 3], [5], [], [*range(0, 8, 2), *range(1, 8, 2)], [0, 1, 3, 6, 10]]


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_even_parts(positions):
    positions = np.array(positions, np.int64)
    parts = pairs.even_parts(positions)
    assert [token for part, _ in parts for token in part] == positions.tolist()
    assert all(positions[where].tolist() == list(part) for part, where in parts)


def test_read(tmp_path, monkeypatch):
    monkeypatch.setattr(pairs, "PIECE_BYTES", 400)  # a few rows at a time
    whole = np.random.default_rng(0).standard_normal((2, 3, 20, 20), np.float32)
    with h5py.File(tmp_path / "file.h5", "w") as file:
        file["bias"] = whole
        for rows in POSITIONS:
            for columns in POSITIONS:
                bias = Numbers(file["bias"])
                tile = pairs.read_pairs(bias, slice(1, 2), slice(0, 2), np.array(rows), np.array(columns))
                assert np.array_equal(tile, whole[1:2, 0:2][:, :, list(rows)][..., list(columns)])
