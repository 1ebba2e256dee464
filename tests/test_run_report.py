"""What `mpiattn run` says of the ranks' work, from made-up figures."""

import pytest

from mpiattn.cli import report


@pytest.mark.parametrize(
    "pairs, expected",
    [
        ([100, 100], "100"),
        ([100, 100.05], "100 to 100.05"),
        ([90, 110], "90 to 110; the most are 10.0 % more than the mean"),
        ([0, 0, 300], "0 to 300; the most are 3 times the mean"),
    ],
)
def test_pairs(pairs, expected):
    assert report._pairs([{"pairs": count} for count in pairs]) == expected


@pytest.mark.parametrize(
    "ratio, expected",
    [(1.001, ", about as much"), (0.25, ", 75.0 % saved"), (1.5, ", 1.5 times as much"), (0.999, ", about as much")],
)
def test_bytes_beside_ring(ratio, expected):
    assert report._beside(ratio) == expected
