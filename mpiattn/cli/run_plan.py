"""The plan of `mpiattn run`: it foresees what the run itself allocates, too."""

import math

import numpy as np

from ..model import memory
from ..model.space import DIRECTIONS
from ..plan.mesh_attention import MeshAttention
from ..problem.problem import ITEMSIZE


class RunPlan(MeshAttention):
    """A plan that is made before IN is read, and counts this rank's chunks of IN and of OUT as memory to come.

    biases: {name: (shape, dtype)} of the gradients of the run's biases, which are as large as these.
    """

    def __init__(self, comm, biases, **options):
        self._bias_gradients = biases
        super().__init__(comm, **options)

    def _in_words(self):
        return "the run", "--max-memory {}"

    def _beside(self, decision):
        p, backward = decision.problem, "backward" in DIRECTIONS[self._asked.options.direction]
        lengths = [np.array(layout.lengths) for layout in decision.layouts_by_rank()]
        nbytes = memory.outer_bytes(p, lengths, backward, strided=True)
        if "dbias" in self._bias_gradients:  # every rank has its tile, and the planes may divide sequences or heads
            shape, dtype = self._bias_gradients["dbias"]
            tile = decision.choice.tile
            parts = tile.ranks if shape[0] * shape[1] > 1 else tile.chunks
            nbytes = nbytes + math.prod(shape) * (p.itemsize + backward * ITEMSIZE[dtype]) // parts
        return nbytes
