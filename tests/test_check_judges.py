"""The judgements of `mpiattn check`: every fault that it can report, from facts made up here, and its report."""

import pytest

from mpiattn.check import judge_launch, judge_node, judge_work
from mpiattn.check.report_item import Item, ranks_text
from mpiattn.cli.check import as_text

MPI = {
    "library": "MPI 1",
    "standard": "4.1",
    "thread_level": "MULTIPLE",
    "largest_tag": 2**20,
    "gpu_aware": False,
    "gpu_aware_why": "it says no",
}
VERSIONS = {"mpiattn": "1.0", "Python": "3.11", "NumPy": "2.4", "mpi4py": "4.1", "torch": None}


def job(count, per_node=4, cores=range(8), **changes):
    """The facts of `count` ranks without faults.  changes: name -> a function of the rank."""
    ranks = []
    for rank in range(count):
        node = rank - rank % per_node
        facts = {
            "rank": rank,
            "host": f"n{node // per_node}",
            "node": node,
            "local_rank": rank % per_node,
            "cores": list(cores),
            "memory": {"bytes": 2**32, "limit": "the node's memory"},
            "versions": VERSIONS,
            "mpi": MPI,
            "launched": None,
            "devices": [],
            "blas": {"library": "openblas 0.3", "threads": 2, "settings": {}},
            "device_names": [],
            "no_devices_why": "CuPy is not installed",
            "kernels": "avx2",
            "better_kernels": None,
        }
        ranks.append(facts | {name: change(rank) for name, change in changes.items()})
    return ranks


def blas(threads, library="openblas 0.3", **settings):
    return lambda rank: {"library": library, "threads": threads, "settings": settings}


def says(item, status, *texts):
    """Assert an item's status and texts, and that it has advice if and only if it is not PASS."""
    assert item.status == status, item
    assert bool(item.advice) == (status != "PASS"), item
    for text in texts:
        assert text in item.text + " -> " + item.advice, item


def test_all_is_well():
    ranks = job(6)
    for item in (
        judge_launch.size(ranks),
        judge_launch.versions(ranks),
        judge_launch.mpi(ranks),
        judge_node.binding(ranks),
        judge_node.memory(ranks),
        judge_node.threads(ranks),
        judge_node.kernels(ranks),
        judge_node.devices(ranks),
        judge_node.gpu_aware(ranks, [None] * 6),
    ):
        says(item, "PASS")
    says(judge_launch.size(ranks), "PASS", "6 ranks on 2 nodes, 2 to 4 a node")
    says(judge_launch.size(job(4, launched=lambda rank: 4)), "PASS", "4 ranks on 1 node, 4 a node")


def test_memory():
    def left(*each):
        return {"memory": lambda rank: {"bytes": each[rank], "limit": each[rank] and f"limit {rank}"}}

    says(
        judge_node.memory(job(2, **left(2**31, 2**30))),
        "PASS",
        "1 GiB to 2 GiB for a rank; the least on n0, by limit 1",
    )
    says(judge_node.memory(job(2, **left(2**31, 2**28))), "WARN", "256 MiB", "limit 1", "--mem=0", "fewer ranks")
    says(judge_node.memory(job(2, **left(None, 2**30))), "PASS", "1 GiB for a rank")
    says(judge_node.memory(job(2, **left(None, None))), "PASS", "does not say")


def test_kernels_of_another_processor():
    """As after an installation on a login node of another kind; without any, NumPy computes."""
    ranks = job(6, better_kernels=lambda rank: "avx512" if rank > 3 else None)
    text = "n1 has avx512, and takes avx2, as the other was not compiled"
    says(judge_node.kernels(ranks), "WARN", text, "MPIATTN_BUILD_KERNELS=1")
    says(judge_node.kernels(job(2, kernels=lambda rank: None)), "PASS", "none, NumPy computes")


def test_another_mpi_launched():
    says(
        judge_launch.size(job(1, launched=lambda rank: 4)),
        "FAIL",
        "the launcher started 4 ranks, this MPI sees 1 (MPI 1)",
        "mpiexec belongs to another MPI",
        "srun --mpi",
    )


@pytest.mark.parametrize(
    "name, status", [("mpiattn", "FAIL"), ("mpi4py", "FAIL"), ("Python", "WARN"), ("NumPy", "WARN"), ("torch", "WARN")]
)
def test_versions_differ(name, status):
    ranks = job(6, versions=lambda rank: VERSIONS | {name: "9.9"} if rank > 3 else VERSIONS)
    says(
        judge_launch.versions(ranks),
        status,
        f"{name} is {VERSIONS[name] or 'not installed'} on ranks 0-3 (n0), 9.9 on ranks 4-5 (n1)",
        "one installation",
    )


def test_libraries_differ():
    ranks = job(3, mpi=lambda rank: MPI | {"library": f"MPI {1 + rank // 2}"})
    says(judge_launch.versions(ranks), "FAIL", "MPI is MPI 1 on ranks 0-1 (n0), MPI 2 on rank 2 (n0)")


def test_mpi_can_do_too_little():
    says(judge_launch.mpi(job(2, mpi=lambda rank: MPI | {"thread_level": "FUNNELED"})), "PASS")
    says(
        judge_launch.mpi(job(2, mpi=lambda rank: MPI | {"thread_level": ("MULTIPLE", "SINGLE")[rank]})),
        "WARN",
        "thread level SINGLE",
        "FUNNELED is needed",
        "MPI4PY_RC_THREAD_LEVEL",
    )
    says(judge_launch.mpi(job(2, mpi=lambda rank: MPI | {"largest_tag": 99})), "WARN", "tags up to 99", "32767")


def test_ranks_share_cores():
    assert not judge_node.crowded(job(8))
    says(
        judge_node.binding(job(8, cores=range(3))),
        "WARN",
        "ranks 0-3 share 3 cores of n0",
        "of n1",
        "at most as many ranks",
    )
    tight = job(4, cores=range(8)) + job(0)
    tight[1]["cores"] = tight[3]["cores"] = [5]
    says(judge_node.binding(tight), "WARN", "ranks 1, 3 share 1 core of n0", "-bind-to core", "--cpu-bind")
    assert judge_node.crowded(tight)
    tight[3]["cores"] = [6]
    says(judge_node.binding(tight), "PASS", "1 to 8 cores that a rank may use, 8 a node")


@pytest.mark.parametrize(
    "library, variable",
    [
        ("openblas 0.3", "OPENBLAS_NUM_THREADS"),
        ("mkl 2024.0", "MKL_NUM_THREADS"),
        ("blis 1", "BLIS_NUM_THREADS"),
        ("flexiblas 3", "OMP_NUM_THREADS"),
        (None, "OMP_NUM_THREADS"),
    ],
)
def test_too_many_threads(library, variable):
    says(
        judge_node.threads(job(6, blas=blas(3, library))),
        "WARN",
        "3 of BLAS in a rank, 12 on 8 cores of n0",
        f"{variable}=2",
    )
    says(judge_node.threads(job(4, blas=blas(2, library))), "PASS")
    says(judge_node.threads(job(4, cores=[0], blas=blas(1, library))), "PASS")  # that is for `binding` to say


def test_unknown_threads():
    says(judge_node.threads(job(2, blas=blas(None))), "WARN", "no variable limits them", "OPENBLAS_NUM_THREADS=4")
    says(judge_node.threads(job(2, blas=blas(None, OMP_NUM_THREADS="1"))), "PASS", "OMP_NUM_THREADS")


@pytest.mark.parametrize(
    "answer, claim, status, advice",
    [
        ("yes", True, "PASS", ""),
        ("yes", False, "WARN", "MPIR_CVAR_ENABLE_GPU=1"),
        ("no", True, "FAIL", "fails with one"),
        ("no", False, "WARN", "go through host memory"),
        ("unknown", True, "WARN", "why the probe cannot run"),
        ("unknown", False, "WARN", "why the probe cannot run"),
    ],
)
def test_gpu_aware(answer, claim, status, advice):
    ranks = job(2, mpi=lambda rank: MPI | {"gpu_aware": claim})
    probes = [{"answer": answer, "text": "tried"}, None]
    says(judge_node.gpu_aware(ranks, probes), status, f"{answer}: tried", advice)
    says(judge_node.gpu_aware(ranks, [None, None]), "PASS", "no devices")


def test_the_worst_node_counts():
    ranks, good = job(8), {"answer": "yes", "text": "fine"}
    says(judge_node.gpu_aware(ranks, [good, None, {"answer": "no", "text": "crashed"}]), "WARN", "no: crashed")


def test_devices():
    def seen(*addresses):
        return {"devices": lambda rank: list(addresses), "device_names": lambda rank: ["Fast"] * len(addresses)}

    says(judge_node.devices(job(2)), "PASS", "none (CuPy is not installed)")
    says(judge_node.devices(job(8, **seen("a", "b", "c", "d"))), "PASS", "one for each rank: Fast")
    says(
        judge_node.devices(job(4, **seen("a", "b"))),
        "WARN",
        "ranks 0, 2 share device a of n0",
        "ranks 1, 3 share device b of n0",
        "as many ranks per node as it has devices",
    )
    says(judge_node.devices(job(4, 2, **seen("a", "b", "c"))), "WARN", "1 device of n0 not used; 1 device of n1")
    says(judge_node.devices(job(2, devices=lambda rank: ["a"] * rank)), "WARN", "no device is seen by rank 0 of n0")
    alone = job(3, devices=lambda rank: ["abc"[rank]])  # each was given one that the others do not see
    says(judge_node.devices(alone), "PASS")


def cases(*wrong, of=9):
    return [
        {"case": f"tile {i}", "passed": i not in wrong, "text": "off by 1" if i in wrong else ""} for i in range(of)
    ]


def test_results():
    says(judge_work.results(cases()), "PASS", "9 small problems")
    says(judge_work.results(cases(2)), "FAIL", "1 of 9 small problems are wrong: tile 2: off by 1", "--full")
    says(judge_work.results(cases(*range(5))), "FAIL", "tile 2: off by 1; and 2 more")


def links(count, per_node=4, slow=None, rate=5e9, network=1e9):
    measured = []
    for rank in range(count):
        source = (rank - 1) % count
        between = source // per_node != rank // per_node
        speed = slow.get(rank, 1) if slow else 1
        measured.append(
            {
                "from": source,
                "to": rank,
                "between": between,
                "latency": 1e-5,
                "rates": {1: 1.0, 2: speed * (network if between else rate)},
            }
        )
    return measured


def test_links():
    ranks = job(8, 2)
    says(judge_work.links([], job(1), False), "PASS", "one rank")
    says(
        judge_work.links(links(8, 2), ranks, False),
        "PASS",
        "inside a node: 10 us, 5 GB/s (mean 5 GB/s",
        "between nodes: 10 us, 1 GB/s",
    )
    says(judge_work.links(links(8, 2, network=5e7), ranks, False), "WARN", "less than 0.1 GB/s", "FI_PROVIDER")
    says(judge_work.links(links(8, 2, rate=5e7), ranks, False), "PASS")  # a crowded laptop, no network
    says(
        judge_work.links(links(8, 2, {4: 0.2}), ranks, False),
        "WARN",
        "slow: rank 3 (n1) to rank 4 (n2), 0.2 GB/s",
        "leave them out",
    )
    says(judge_work.links(links(8, 2, {4: 0.3}), ranks, False), "PASS")
    says(judge_work.links(links(8, 2, {4: 0.2}), ranks, True), "PASS", "not compared")
    many = judge_work.links(links(16, 2, dict.fromkeys((1, 2, 3, 4, 5), 0.1)), job(16, 2), False)
    says(many, "WARN", "5 slow links in all")
    assert many.text.count("slow: ") == judge_work.SHOWN


def files(**changes):
    return {"folder": "/data", "parallel": False, "written": None, "read": [None] * 8} | changes


def test_files():
    ranks = job(8)
    says(judge_work.files(files(), ranks), "PASS", "rank 0 wrote a file in '/data' (h5py without MPI)")
    says(judge_work.files(files(parallel=True), ranks), "PASS", "all ranks wrote", "h5py has MPI")
    says(
        judge_work.files(files(written="disk full", read=[]), ranks),
        "FAIL",
        "cannot write in '/data': disk full",
        "--folder",
    )
    says(
        judge_work.files(files(read=[None] * 5 + ["not there"] * 3), ranks),
        "FAIL",
        "that ranks 5-7 on n1 cannot read: not there",
        "that all nodes share",
    )


def test_report():
    assert ranks_text([3]) == "rank 3" and ranks_text([5, 0, 1, 2]) == "ranks 0-2, 5"
    items = [Item("one", "PASS", "word " * 40), Item("second", "FAIL", "bad", "help " * 40)]
    lines = as_text(items, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("PASS  one     word") and lines[1].startswith(" " * 14 + "word")
    assert "FAIL  second  bad" in lines and sum("-> help" in line for line in lines) == 1
    assert lines[-1] == "1 PASS, 0 WARN, 1 FAIL"
