"""Tests that need a GPU: `python -m pytest -m gpu`; run_all.py does all that there is to find out on one.

MPIATTN_CUPY=fake has a made-up GPU, on which most of them run too, as a test of the tests; unpooled has each array
allocated by CUDA, so that compute-sanitizer knows where it ends.
"""

import os
import sys

import pytest

if os.environ.get("MPIATTN_CUPY") == "fake":
    import fake_cupy

    sys.modules["cupy"] = fake_cupy
MARK = pytest.mark.gpu


def missing():
    """Why there is no GPU to test, or None."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # a library of CUDA that is not there has no exception of its own
        return f"no GPU that CuPy can use: {error!r:.150}"
    if os.environ.get("MPIATTN_CUPY") == "unpooled":
        cupy.cuda.set_allocator(None)
    return None if count else "CuPy counts 0 GPUs"


WHY = missing()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(MARK)
            if WHY:
                item.add_marker(pytest.mark.skip(reason=WHY))


@pytest.fixture
def backend():
    from mpiattn import backends

    made = backends.get("cuda")
    yield made
    made.close()
