"""ReFrame tests: `mpiattn check` and `mpiattn bench` through the launcher and the environments of the site.

    reframe -C site.py -c slurm/reframe_check.py -S activate=$PWD/.venv/bin/activate -r
    reframe -C site.py -c slurm/reframe_check.py -S nodes=4 -S ranks_per_node=64 -n MpiattnBench -r --performance-report

They pass where `check` has no FAIL and the results of `bench` are right.  Latency, bandwidth, GFLOP/s and waiting are
logged; what a site has once measured it can give as `reference` in a class that derives from these.
"""

import json
from pathlib import Path

import reframe as rfm
from reframe.core.builtins import run_before, sanity_function, variable
from reframe.utility.sanity import assert_true, make_performance_function

RESULT = "result.json"


class Mpiattn(rfm.RunOnlyRegressionTest):
    """What both have in common: where they run, and their result."""

    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    executable = "python3"
    time_limit = "10m"
    nodes = variable(int, value=2)
    ranks_per_node = variable(int, value=2)
    cores_per_rank = variable(int, value=1)
    activate = variable(str, value="")  # a file to source, where the environment of the site lacks mpiattn
    keep_files = [RESULT]

    @run_before("run")
    def place(self):
        """Ranks, threads and the environment."""
        self.num_tasks = self.nodes * self.ranks_per_node
        self.num_tasks_per_node = self.ranks_per_node
        self.num_cpus_per_task = self.cores_per_rank
        self.env_vars["OMP_NUM_THREADS"] = self.cores_per_rank
        if self.activate:
            self.prerun_cmds = [f". {self.activate}"]

    def result(self):
        """What --json has written; {} if nothing."""
        path = Path(self.stagedir) / RESULT
        return json.loads(path.read_text()) if path.is_file() else {}

    def measured(self, name, value, unit):
        """Log a value."""
        self.perf_variables[name] = make_performance_function(lambda: value, unit)


@rfm.simple_test
class MpiattnCheck(Mpiattn):
    """Launch, MPI, results, links and files."""

    descr = "mpiattn check"
    executable_opts = ["-m", "mpiattn", "check", "--json", RESULT]

    @sanity_function
    def nothing_fails(self):
        """Every rank was there and no item is FAIL."""
        result = self.result()
        failed = [item["name"] for item in result.get("items", []) if item["status"] == "FAIL"]
        ranks = len(result.get("ranks", []))
        return assert_true(
            result.get("passed") is True and ranks == self.num_tasks,
            msg=f"{ranks} of {self.num_tasks} ranks; failed: {', '.join(failed) or 'all'}",
        )

    @run_before("performance")
    def links(self):
        """The slowest link of each kind that there is."""
        for kind, between in (("inside", False), ("between", True)):
            links = [link for link in self.result()["links"] if link["between"] is between]
            if links:
                rate = min(max(link["rates"].values()) for link in links)
                self.measured(f"bandwidth_{kind}_nodes", rate / 1e9, "GB/s")
                self.measured(f"latency_{kind}_nodes", max(link["latency"] for link in links) * 1e6, "us")


@rfm.simple_test
class MpiattnBench(Mpiattn):
    """Attention of a problem that the site chooses, on the tile that `auto` takes."""

    descr = "mpiattn bench"
    problem = variable(str, value="--seqlen 16384 --heads 16 --head-dim 128 --causal")

    @run_before("run")
    def options(self):
        """The problem in words of the command."""
        self.executable_opts = ["-m", "mpiattn", "bench", *self.problem.split(), "--json", RESULT]

    @sanity_function
    def results_are_right(self):
        """A wrong one ends `bench` without a result; here, that some were checked."""
        checked = sum(len(case["checked"]) for case in self.result().get("cases", []))
        return assert_true(checked, msg="no results, or none that was checked: see what `mpiattn bench` printed")

    @run_before("performance")
    def speed(self):
        """Of all ranks together, by direction."""
        for direction, of_pass in self.result()["cases"][0]["passes"].items():
            self.measured(direction, of_pass["gflops_per_second"], "GFLOP/s")
            self.measured(f"waiting_{direction}", 100 * of_pass["waiting"]["mean"], "%")
