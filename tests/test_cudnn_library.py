"""The graphs of `cuda+cudnn` as cuDNN itself takes them, where it is installed; none of this needs a GPU."""

import ast
import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import cudnn_plans
import fake_cudnn
import launch
import pytest

from mpiattn.backends.cuda import cudnn_backend

INSTALLED = Path(sysconfig.get_path("purelib"), "nvidia", "cudnn", "lib")
pytestmark = [
    pytest.mark.workshop,
    pytest.mark.skipif(importlib.util.find_spec("cudnn") is None, reason="needs nvidia-cudnn-frontend"),
]

SCRIPT = """
import cudnn, inspect
def text(thing):
    return (getattr(thing, "__doc__", "") or "").replace("\\n", " ")
print({name: text(getattr(cudnn, name)) for name in dir(cudnn)})
kinds = {kind: getattr(cudnn, kind) for kind in ("pygraph", "tensor")}
print({f"{kind}.{name}": text(getattr(of, name)) for kind, of in kinds.items() for name in dir(of)})
of_python = {name: inspect.signature(getattr(cudnn.pygraph, name)) for name in ("tensor", "execute")}
print({f"pygraph.{name}": [*of.parameters] for name, of in of_python.items()})
print({name: [*getattr(cudnn, name).__members__] for name in ("data_type", "heur_mode", "diagonal_alignment")})
"""


@pytest.mark.draw(1)
@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED.is_dir() or not shutil.which("cc"), reason="needs cuDNN and a C compiler")
@pytest.mark.parametrize("capability", cudnn_plans.CAPABILITIES)
def test_cudnn_has_plans(tmp_path, capability):
    """For all that the back end asks of it, on three kinds of GPU; and for no larger dims."""
    cudnn_plans.stubs("cc", tmp_path, capability)
    environment = launch.environment() | {"LD_LIBRARY_PATH": os.pathsep.join(map(str, (tmp_path, INSTALLED)))}
    outcome = subprocess.run(
        [sys.executable, launch.TESTS / "cudnn_plans.py", str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=launch.patience(200),
    )
    assert not outcome.returncode, outcome.stderr
    answers = ast.literal_eval(outcome.stdout.splitlines()[-1])
    largest = {
        "forward": cudnn_backend.LARGEST_DIM,
        "backward": cudnn_backend.LARGEST_BACKWARD_DIM.get(capability // 10, 128),
    }
    refused = {graph[0]: why for graph, why in answers.items() if why and graph[2] <= largest[graph[0]]}
    assert not refused
    if capability == 80:
        assert "should be less than or equal to 128" in answers["backward", "float16", 256, 256, 37]


def test_the_made_up_cudnn_has_nothing_that_cudnn_lacks():
    """Names and names of arguments; of functions in C, in the first line of their text."""
    lines = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=launch.patience(100)
    ).stdout.splitlines()
    names, members, arguments, enums = map(ast.literal_eval, lines)
    for kind, values in enums.items():
        assert {each.name for each in getattr(fake_cudnn, kind)} <= set(values)
    hidden = {"contextmanager", "install", "tensor", "at"}
    for name, made_up in vars(fake_cudnn).items():
        if name in hidden or getattr(made_up, "__module__", "") != fake_cudnn.__name__:
            continue
        assert name in names, name
        if not inspect.isclass(made_up):
            for argument in inspect.signature(made_up).parameters:
                assert not names[name] or argument in names[name] or argument == "handle", (name, argument)
    for kind in (fake_cudnn.pygraph, fake_cudnn.tensor):
        for name, method in vars(kind).items():
            if name.startswith("_") or name in hidden or not callable(method):
                continue
            full = f"{kind.__name__}.{name}"
            assert full in members, full
            known = arguments.get(full) or members[full]
            for argument in list(inspect.signature(method).parameters)[1:]:
                assert argument in known or len(inspect.signature(method).parameters) == 2, (full, argument)
