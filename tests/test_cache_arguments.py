"""What callers pass to a cache: truth values are no numbers, since a mask would be taken for them."""

import pytest

from mpiattn import ArgumentError
from mpiattn.arguments.counts import kept_lengths, sequence_numbers, token_counts


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: sequence_numbers([True, False], 2), "sequences is .True, False.; it must be different numbers"),
        (lambda: token_counts([True, True], 2, 9), "counts is .True, True.; it must be a number from 0 to 9"),
        (lambda: kept_lengths([True, True], [5, 5]), "lengths is .True, True.; it must be a number of tokens"),
        (lambda: kept_lengths(True, [5]), "lengths is True; it must be a sequence of whole numbers"),
    ],
)
def test_masks_are_no_numbers(call, says):
    with pytest.raises(ArgumentError, match=says):
        call()
