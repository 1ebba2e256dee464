"""Random layouts of many ranges: any division of the tokens, and grids of uneven blocks."""

from itertools import pairwise
from math import prod

from mpiattn import Layout


def ranges(rng, tokens, ranks, most=12):
    """Any division into at most so many pieces; ranks may have none.  rng: a `random.Random`."""
    cuts = sorted({0, tokens, *(rng.randint(0, tokens) for _ in range(rng.randint(0, most - 1)))})
    parts = [[] for _ in range(ranks)]
    for start, stop in pairwise(cuts):
        rng.choice(parts).append((start, stop))
    return Layout.of_ranges(parts)


def _factors(rng, number, axes):
    """Whole numbers with that product."""
    factors = []
    for _ in range(axes - 1):
        factors.append(rng.choice([n for n in range(1, number + 1) if number % n == 0]))
        number //= factors[-1]
    return (*factors, number)


def grid(rng, tokens, ranks):
    """A grid of that many tokens on 1 to 3 axes, of even blocks or of any, in any order of the ranks."""
    axes = rng.randint(1, 3)
    shape = list(_factors(rng, tokens, axes)) if tokens else [rng.randint(0, 3) for _ in range(axes)]
    if tokens == 0:
        shape[rng.randrange(axes)] = 0
    dims = _factors(rng, ranks, axes)
    if rng.random() < 0.5:
        sizes = None
    else:
        cuts = [sorted([0, n, *(rng.randint(0, n) for _ in range(parts - 1))]) for n, parts in zip(shape, dims)]
        sizes = [[stop - start for start, stop in pairwise(of_axis)] for of_axis in cuts]
    order = rng.sample(range(ranks), ranks)
    return Layout.grid(shape, Cart(dims, order) if rng.random() < 0.5 else dims, sizes)


class Cart:
    """What a layout asks of a Cartesian communicator, whose rank i has place order[i] in C order."""

    def __init__(self, dims, order=None):
        self.dims, self.order = dims, order or range(prod(dims))

    def Get_size(self):
        return prod(self.dims)

    def Get_topo(self):
        return list(self.dims), [0] * len(self.dims), self.Get_coords(0)

    def Get_coords(self, rank):
        place, number = [], self.order[rank]
        for parts in reversed(self.dims):
            number, at = divmod(number, parts)
            place.append(at)
        return place[::-1]


def either(rng, tokens, ranks):
    """A layout of one of these two."""
    return rng.choice([ranges, grid])(rng, tokens, ranks)
