"""The launches of a block: one for each list of intervals, of the rows that see a key of it."""

from functools import partial

import numpy as np

from ..schedule.kinds import IN_COLUMNS


def launch_lists(computation, q, kv, launches, reduced, after, meanwhile=None, biases=None, chunks=None):
    """Launch a block as often as its interval lists ask for; returns the last event.

    computation: a pass of `mpiattn.engine.passes`.  q, kv: arrays of the queries and of the keys.
    launches: of `AlikeCalls.intervals`.  reduced: {reduced kind: the sums that it adds to}.
    after, meanwhile: as in `mpiattn.backends.base`.
    biases: the `Biases`, or None.  chunks: what it was asked for, of a block with biases.
    """
    (rows, fields), *others = launches
    if rows is None and not others and biases is None:  # as of most blocks
        return computation.launch(q, kv, fields, reduced, after, meanwhile)
    for number, (rows, fields) in enumerate(launches):
        of_launch, queries, sums = meanwhile, q, reduced
        if meanwhile and len(launches) > 1:

            def of_launch(share, number=number):
                meanwhile((number + share) / len(launches))

        if rows is not None:
            queries = tuple([array[rows] for array in q])
            sums = {
                kind: arrays if kind in IN_COLUMNS else tuple([array[rows] for array in arrays])
                for kind, arrays in reduced.items()
            }
        launch = computation.launch
        if biases is not None:
            launch = partial(biases.launch, computation, chunks, rows)
        event = launch(queries, kv, fields, sums, after, of_launch)
        if isinstance(rows, np.ndarray):  # the launch had copies
            for kind in sums:
                for array, part in zip(reduced[kind], sums[kind]) if kind not in IN_COLUMNS else ():
                    array[rows] = part
    return event
