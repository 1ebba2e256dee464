"""mpiattn.torch.attention and mpiattn.jax.attention are called as functions that need no plan are."""

from importlib import import_module

import pytest

from mpiattn.errors import ArgumentError, KeywordError


@pytest.fixture(params=["torch", "jax"])
def library(request):
    """mpiattn.torch or mpiattn.jax, and an array of its."""
    pytest.importorskip(request.param, reason=f"{request.param} is not installed (the extra of that name has it)")
    ones = {"torch": "torch", "jax": "jax.numpy"}[request.param]
    return import_module(f"mpiattn.{request.param}"), import_module(ones).ones((1, 4, 2, 8))


@pytest.mark.parametrize("number", [3, 4])
def test_no_plan_is_given(library, number):
    module, x = library
    with pytest.raises(ArgumentError, match=r"plan is a .*; it must be a MeshAttention: the plan comes first"):
        module.attention(*[x] * number)


def test_an_unknown_keyword_without_a_plan(library):
    module, x = library
    with pytest.raises(KeywordError, match="causal is not an argument of mpiattn"):
        module.attention(x, x, x, causal=True)
