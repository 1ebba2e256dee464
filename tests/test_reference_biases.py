"""The reference of biases and dropout beside the dense oracle of tests/biased.py, which shares no code with it."""

import biased
import numpy as np
import pytest
from dense import draw_all, masks

from mpiattn.backends.numpy.dropout import philox
from mpiattn.problem.problem import Problem
from mpiattn.verify import reference, reference_biases

SHAPE = {"batch": 2, "seqlen": 24, "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6, "dtype": "float64"}


def rules_of(problem, drawn):
    """`PairRules` of whole biases."""
    p, at, at_k = problem, np.arange(problem.seqlen), np.arange(problem.seqlen_k)
    keys = drawn.key_bias
    return reference_biases.PairRules(
        p.heads,
        (p.seqlen, p.seqlen_k),
        None if drawn.bias is None else reference_biases.Block(at, at_k, drawn.bias),
        None if keys is None else reference_biases.Numbers(at_k, keys.reshape((1,) * (3 - keys.ndim) + keys.shape)),
        drawn.alibi_slopes,
        drawn.relative_bias,
        drawn.relative_grid,
        drawn.relative_cyclic,
        drawn.dropout,
        drawn.seed,
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "kinds, more",
    [
        ("bias", {"softcap": 2.0}),
        ("key_bias alibi", {"seqlen_k": 31}),
        ("relative", {"seqlen_k": 17, "causal": True}),
        ("grid", {}),
        ("dropout", {"shared_kv": True, "kv_heads": 1}),
        ("bias key_bias alibi relative dropout", {"window": (9, 4)}),
    ],
)
def test_as_the_dense_oracle(kinds, more, seed):
    problem = Problem(**{**SHAPE, **more})
    p, drawn, inputs = problem, biased.draw(problem, seed, kinds), draw_all(problem, seed, sinks=True)
    *right, of_biases, _ = biased.expected(p, inputs, drawn, **masks(p, {}))
    q, k, v, dout, dlse, sinks = inputs
    v = k[..., : p.value_dim] if v is None else v
    rules, sums = rules_of(p, drawn), {}
    if drawn.bias is not None:
        sums["bias"] = reference_biases.BlockSums(drawn.bias.shape[:2], np.arange(p.seqlen), np.arange(p.seqlen_k))
    if drawn.key_bias is not None:
        shape = drawn.key_bias.shape[:-1]
        sums["key_bias"] = reference_biases.KeySums((1,) * (2 - len(shape)) + shape, np.arange(p.seqlen_k))
    if drawn.alibi_slopes is not None:
        sums["alibi_slopes"] = reference_biases.SlopeSums(rules)
    if drawn.relative_bias is not None:
        sums["relative_bias"] = reference_biases.TableSums(rules)
    how = {"sinks": sinks, **masks(p, {}), "biases": rules}
    got = [*reference.attention(q, k, v, **how)]
    dq, dk, dv, dsinks = reference.backward(dout, q, k, v, dlse=dlse, sums=sums.values(), **how)
    if p.shared_kv:
        dk[..., : p.value_dim] += dv
        dv = None
    for name, array, ref in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), [*got, dq, dk, dv, dsinks], right):
        assert (array is None) == (ref is None)
        if ref is not None:
            np.testing.assert_allclose(array, ref, rtol=1e-10, atol=1e-10, err_msg=name)
    assert set(sums) == set(of_biases)
    for name, ref in of_biases.items():
        np.testing.assert_allclose(sums[name].values[0].reshape(ref.shape), ref, rtol=1e-9, atol=1e-9, err_msg=name)


def test_random_words():
    """The known answer of Random123's own tests for the key and the counter of zeros; else those of the back end."""
    words = reference_biases.random_words(0, 0, 0, 0)
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    seed, row, group = 0xFEDCBA9876543210, np.array([[0], [2**31 - 1]]), np.arange(3)
    counter = [np.asarray(each, np.uint32) for each in (group[None], row, 7, 0)]
    for word, other in zip(reference_biases.random_words(seed, 7, row, group[None]), philox(counter, seed)):
        assert np.array_equal(word, other)


def test_the_shorter_way_round():
    """On a cyclic axis of even length the point opposite is reached backwards."""
    table = np.arange(5.0)[None]
    rules = reference_biases.PairRules(1, (4, 4), table=table, grid=(4,), cyclic=(True,))
    assert (rules.scores(0, 0, np.arange(1), np.arange(4)) == [[2, 3, 0, 1]]).all()
