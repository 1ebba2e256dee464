"""The made-up CuPy beside the real one, where that is installed; it needs no GPU."""

import inspect

import fake_cupy
import pytest


def test_the_made_up_cupy_has_nothing_that_cupy_lacks():
    """Names and names of arguments."""
    cupy = pytest.importorskip("cupy")
    if cupy is fake_cupy:
        pytest.skip("the made-up one is in its place")
    own = {"get_default_memory_pool", "empty", "asarray", "from_dlpack", "take", "RawModule", "ndarray"}
    pairs = [(getattr(fake_cupy, name), getattr(cupy, name)) for name in own]
    pairs += [(getattr(fake_cupy.cuda, name), getattr(cupy.cuda, name)) for name in vars(fake_cupy.cuda)]
    pairs += [(fake_cupy.RawKernel, cupy.RawKernel)]
    pairs += [(fake_cupy.as_strided, cupy.lib.stride_tricks.as_strided)]
    for made_up, real in pairs:
        for name, member in vars(made_up).items() if inspect.isclass(made_up) else ():
            if not name.startswith("_") and name not in HIDDEN.get(made_up.__name__, ()):
                assert hasattr(real, name) or name in (real.__doc__ or ""), f"{real} has no {name}"
                _same_arguments(member, getattr(real, name, None))
        _same_arguments(made_up, real)


HIDDEN = {"ndarray": {"of", "memory", "values"}, "Stream": {"step", "put", "spoil"}, "RawKernel": {"kernel"}}


def _same_arguments(made_up, real):
    """Where the real one's can be told, by its signature or by the first line of its text."""
    if not callable(made_up) or real is None:
        return
    try:
        names = set(inspect.signature(made_up).parameters) - {"self", "args", "kwargs"}
    except (TypeError, ValueError):
        return
    try:
        known = set(inspect.signature(real).parameters)
    except (TypeError, ValueError):
        known = set()
    text = real.__doc__ or ""
    for name in names:
        assert name in known or "args" in known or name in text, f"{real} has no argument {name}"
