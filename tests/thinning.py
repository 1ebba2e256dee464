"""Combinations of test parameters, few of which run by default."""

from itertools import product

import pytest


def thinned(*lists, default=()):
    """All combinations of the lists' entries; with each combination of the first ones, one of the last runs by default.

    It is another one from combination to combination and has the marks `default`; the others are marked slow.
    """
    return [
        pytest.param(
            *(entries[i] for entries, i in zip(lists, places)),
            marks=[pytest.mark.slow] if sum(places) % len(lists[-1]) else default,
        )
        for places in product(*(range(len(entries)) for entries in lists))
    ]


def every(step, entries):
    """Tuples of a test's arguments, of which the first of each `step` runs by default; the others are marked slow.

    zip(entries) makes such tuples of single arguments.
    """
    return [pytest.param(*entry, marks=[pytest.mark.slow] if i % step else []) for i, entry in enumerate(entries)]
