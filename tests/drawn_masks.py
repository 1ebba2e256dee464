"""Masks of several intervals, drawn at random: `DRAW[kind](rng)` is (mask, seqlen, seqlen_k)."""

import numpy as np

from mpiattn import masks


def draw_neighborhood(rng):
    axes = rng.randint(1, 3)
    shape = [rng.randint(1, (40, 9, 6)[axes - 1]) for _ in range(axes)]
    edge = rng.choice(["shifted", "clipped"])
    cyclic = [rng.random() < 0.4 for _ in shape]
    causal = [not axis and rng.random() < 0.3 for axis in cyclic]
    dilation = [min(size, rng.choice([1, 1, 1, 2, 3])) for size in shape]
    kernel = [
        2 * size if free else size // step if rng.random() < 0.2 else rng.randint(1, size // step)
        for size, step, free in zip(shape, dilation, (edge == "clipped" and rng.random() < 0.2 for _ in shape))
    ]
    kernel = [min(k, size // step) if c else k for k, size, step, c in zip(kernel, shape, dilation, cyclic)]
    return masks.neighborhood(shape, kernel, dilation, causal, cyclic, edge), *[int(np.prod(shape))] * 2


def draw_sphere(rng):
    rows = rng.randint(1, 9)
    lengths = [rng.choice([4, 20]) for _ in range(rows)] if rng.random() < 0.5 else [rng.randint(1, 18)] * rows
    latitudes = None
    if rng.random() < 0.5:
        latitudes = np.sort([rng.uniform(-1.6, 1.6) for _ in range(rows)])[:: rng.choice([1, -1])].clip(
            -np.pi / 2, np.pi / 2
        )
        latitudes = None if (np.diff(latitudes) == 0).any() else latitudes
    radius = rng.choice([np.pi / rows, rng.uniform(0.01, 1), rng.uniform(0.01, 1.01 * np.pi)])
    return masks.sphere(lengths, radius, latitudes), *[sum(lengths)] * 2


def lengths(rng):
    return rng.randint(0, 40), rng.randint(0, 40)


def draw_window(rng):
    return masks.window(*(rng.choice([None, rng.randint(0, 30)]) for _ in range(2))), *lengths(rng)


def draw_blocks(rng):
    size, (seqlen, seqlen_k) = rng.randint(1, 9), lengths(rng)
    seen = np.array([[rng.random() < 0.5 for _ in range(-(-seqlen_k // size))] for _ in range(-(-seqlen // size))])
    matrix = seen.reshape(-(-seqlen // size), -(-seqlen_k // size)).astype(bool)
    pairs = [(int(i), int(j)) for i, j in np.argwhere(matrix)]
    rng.shuffle(pairs)
    assert masks.blocks(size, pairs) == masks.blocks(size, matrix)
    return masks.blocks(size, pairs), seqlen, seqlen_k


def draw_ranges(rng):
    seqlen, seqlen_k = lengths(rng)
    entries = [
        (
            *sorted(rng.randint(0, seqlen) for _ in range(2)),
            *sorted(rng.randint(0, seqlen_k) for _ in range(2)),
            rng.choice(["full", "causal", "inverse_causal", "bidirectional_causal", "inv_causal", "bi_causal"]),
        )
        for _ in range(rng.choice([1, 2, 5, 12]))
    ]
    return masks.ranges(entries), seqlen, seqlen_k


def draw_tree(rng):
    parents = [rng.randint(-1, i - 1) if rng.random() < 0.6 else i - 1 for i in range(rng.randint(0, 20))]
    return masks.tree(parents), *(len(parents) + rng.choice([0, rng.randint(0, 9)]) for _ in range(2))


def draw_shared(rng):
    question, answers = rng.randint(0, 9), [rng.randint(0, 9) for _ in range(rng.randint(0, 4))]
    return masks.share_question(question, answers), *[question + sum(answers)] * 2


def draw_given(rng):
    seqlen, seqlen_k = lengths(rng)
    begin, end = np.zeros((2, 4, seqlen), int)
    for query in range(seqlen):
        ends = sorted(rng.randint(0, seqlen_k) for _ in range(8))
        order = rng.sample(range(4), 4)
        begin[order, query], end[order, query] = ends[::2], ends[1::2]
    if rng.random() < 0.5:
        return masks.function(lambda at: (begin[:, at], end[:, at]), seqlen), seqlen, seqlen_k
    return masks.intervals(begin.tolist(), end), seqlen, seqlen_k


DRAW = {
    "Neighborhood": draw_neighborhood,
    "Sphere": draw_sphere,
    "Window": draw_window,
    "Global": lambda rng: (masks.global_tokens(rng.randint(0, 50)), *lengths(rng)),
    "Chunked": lambda rng: (masks.chunked(rng.randint(1, 50)), *lengths(rng)),
    "Blocks": draw_blocks,
    "Ranges": draw_ranges,
    "Tree": draw_tree,
    "ShareQuestion": draw_shared,
    "Given": draw_given,
}
