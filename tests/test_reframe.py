"""slurm/reframe_check.py reads what the commands write.  A few words stand for ReFrame, which tests don't take."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import launch
import pytest
import warm

pytestmark = pytest.mark.workshop


class Regression:
    """Of ReFrame's, what is asked of it."""

    def __init__(self):
        self.perf_variables, self.env_vars = {}, {}


@pytest.fixture
def checks(monkeypatch):
    """The module's names."""
    words = {
        "reframe": {"RunOnlyRegressionTest": Regression, "simple_test": lambda test: test},
        "reframe.core.builtins": {
            "run_before": lambda stage: lambda hook: hook,
            "sanity_function": lambda function: function,
            "variable": lambda kind, value: value,
        },
        "reframe.utility.sanity": {
            "assert_true": lambda holds, msg: (bool(holds), msg),
            "make_performance_function": lambda function, unit: (function(), unit),
        },
    }
    for name in {*words, "reframe.core", "reframe.utility"}:
        module = ModuleType(name)
        vars(module).update(words.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("reframe_check", launch.SLURM / "reframe_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return SimpleNamespace(**vars(module))


def test_check(checks, tmp_path):
    test = checks.MpiattnCheck()
    test.stagedir, test.nodes, test.activate = tmp_path, 1, ".venv/bin/activate"
    test.place()
    assert (test.num_tasks, test.num_tasks_per_node, test.prerun_cmds) == (2, 2, [". .venv/bin/activate"])
    assert test.nothing_fails() == (False, "0 of 2 ranks; failed: all")
    words = [tmp_path / word if word == checks.RESULT else word for word in test.executable_opts[2:]]
    warm.command(2, [*words, "--folder", tmp_path])
    assert test.nothing_fails()[0]
    test.links()
    units = {"bandwidth_inside_nodes": "GB/s", "latency_inside_nodes": "us"}
    assert {name: unit for name, (_, unit) in test.perf_variables.items()} == units
    assert 0.001 < test.perf_variables["bandwidth_inside_nodes"][0] < 1000
    test.num_tasks = 4
    assert test.nothing_fails() == (False, "2 of 4 ranks; failed: all")


def test_bench(checks, tmp_path):
    test = checks.MpiattnBench()
    test.stagedir, test.problem = tmp_path, "--seqlen 64 --heads 2 --head-dim 8 --runs 1"
    test.options()
    assert not test.results_are_right()[0]
    warm.command(2, [tmp_path / word if word == checks.RESULT else word for word in test.executable_opts[2:]])
    assert test.results_are_right()[0]
    test.speed()
    assert {name: unit for name, (_, unit) in test.perf_variables.items()} == {
        "forward": "GFLOP/s",
        "waiting_forward": "%",
    }
    assert 0 <= test.perf_variables["waiting_forward"][0] <= 100 and test.perf_variables["forward"][0] > 0
