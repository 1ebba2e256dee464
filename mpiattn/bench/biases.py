"""The biases of a benchmark: ALiBi's usual slopes, and a dense bias that is hashed from positions as tensors are."""

import numpy as np

from ..arguments.arrays import on_host
from ..arguments.biases import BiasArguments
from ..problem.distances import usual_slopes
from ..verify.bias_gradients import BiasGradients, TileGradient
from ..verify.spread_biases import rules_of
from .tensors import Tensors


class BenchBiases:
    """Those of the calls of a plan.  alibi, bias: whether there are slopes, and a dense bias.

    call: arguments of `MeshAttention.forward`, on the plan's device.
    """

    def __init__(self, plan, alibi, bias):
        self._plan, self._slopes, self.call = plan, None, {}
        self._tensors, self._whole = Tensors(plan.problem), bias
        if bias:
            tile = self._tensors.pairs(plan.bias_sequences, plan.bias_heads, *plan.bias_positions)
            self.call["bias"] = plan.give(tile)
        if alibi:
            self._slopes = usual_slopes(plan.problem.heads).astype(plan.problem.partial_dtype)
            self.call["alibi_slopes"] = self._slopes

    @property
    def of_backward(self):
        """More arguments of `MeshAttention.backward`."""
        return {"bias_shared": ()} if self._whole else {}

    def rules(self):
        """`mpiattn.verify.reference_biases.PairRules`; None without biases."""
        if not self.call:
            return None

        def dense(b, h, positions, keys):
            return self._tensors.pairs(slice(b, b + 1), slice(h, h + 1), positions, keys)[0, 0].astype(np.float64)

        arguments = BiasArguments(alibi_slopes=self._slopes)
        return rules_of(self._plan.problem, arguments, dense if self._whole else None, None)

    def verification(self, peers, source, grads):
        """`BiasGradients` of what `backward` returned for biases, None without them."""
        grads, plan, p = dict(zip(self.call, map(on_host, grads), strict=True)), self._plan, self._plan.problem
        if not grads:
            return None
        tile = None
        if self._whole:
            place = plan.bias_sequences, plan.bias_heads, *plan.bias_positions
            tile = TileGradient(grads["bias"], (p.batch, p.heads), *place)
        return BiasGradients(peers, source, tile, slopes=grads.get("alibi_slopes"))
