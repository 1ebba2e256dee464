"""The whole check: gathers facts from all ranks, then judges them; every rank has the same result."""

from ..comm.peers import time_limit
from ..system import gpu_probe
from . import folder, judge_launch, judge_node, judge_work, links, rank_facts, results
from .report_item import by_node


def steps(ranks):
    """How many steps `survey` reports as done."""
    return 4 + len(results.cases(ranks))


def survey(job, where, timeout, progress=lambda done: None):
    """Check everything; returns (items, facts) on every rank; collective.

    job: a `console.launch.Job`.  where: the folder for a small file.  timeout: seconds that a rank waits for others.
    progress: called with the number of steps just done.
    """
    peers = job.peers

    def phase(name, work):
        facts = job(name, work)
        progress(1)
        return facts

    ranks = phase("look at the ranks", lambda: rank_facts.gather(peers))
    probes = phase("probe devices", lambda: _probes(peers, ranks, timeout))
    cases = job("compute", lambda: results.gather(peers, timeout, progress))
    rates = phase("measure links", lambda: links.gather(peers, ranks))
    file = phase("write a file", lambda: folder.gather(peers, where))
    items = [
        judge_launch.size(ranks),
        judge_launch.versions(ranks),
        judge_launch.mpi(ranks),
        judge_node.binding(ranks),
        judge_node.memory(ranks),
        judge_node.threads(ranks),
        judge_node.kernels(ranks),
        judge_node.devices(ranks),
        judge_node.gpu_aware(ranks, probes),
        judge_work.results(cases),
        judge_work.links(rates, ranks, judge_node.crowded(ranks)),
        judge_work.files(file, ranks),
    ]
    return items, {"ranks": ranks, "probes": probes, "cases": cases, "links": rates, "files": file}


def _probes(peers, ranks, timeout):
    """By rank, the probe's result on the first rank of every node that sees devices; None for the others."""
    asked = {min(seeing) for node in by_node(ranks) if (seeing := [rank["rank"] for rank in node if rank["devices"]])}
    limit = min(gpu_probe.TIMEOUT, time_limit(timeout) / 2)  # less than the others' time limit for waiting
    return peers.allgather(gpu_probe.probe(timeout=limit) if peers.rank in asked else None)
