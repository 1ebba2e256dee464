"""Judges what the ranks did together: results, links, files."""

from statistics import fmean, median

from ..system.words import number
from .report_item import FAIL, PASS, WARN, Item, ranks_text

SHOWN = 3  # wrong cases and slow links that are named
LEAST_RATE = 1e8  # bytes per second between nodes; suitable networks have at least ten times as much
SLOW = 1 / 4  # a link is slow below this share of the median of its kind


def results(cases):
    """Every case is right.  cases: from `mpiattn.check.results.gather`."""
    wrong = [case for case in cases if not case["passed"]]
    if not wrong:
        return Item("results", PASS, f"{len(cases)} small problems, forward and backward, agree with float64")
    shown = "; ".join(f"{case['case']}: {case['text']}" for case in wrong[:SHOWN])
    more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return Item(
        "results",
        FAIL,
        f"{len(wrong)} of {len(cases)} small problems are wrong: {shown}{more}",
        "do not trust this installation: run `mpiattn check` on one rank, to tell errors of NumPy from errors "
        "of MPI, then `mpiattn check --full`, and report their output",
    )


def links(measured, ranks, crowded):
    """Every link is about as fast as the others of its kind.  measured: from `mpiattn.check.links.gather`.

    ranks: their facts.  crowded: whether ranks share cores; links are then not compared.
    """
    if not measured:
        return Item("links", PASS, "none: one rank")
    texts, slow, advice = [], [], []
    for between in (False, True):
        alike = [link for link in measured if link["between"] == between]
        if not alike:
            continue
        rates = [rate_of(link) for link in alike]
        where = "between nodes" if between else "inside a node"
        texts.append(
            f"{where}: {1e6 * median(link['latency'] for link in alike):.3g} us, {gigabytes(median(rates))} "
            f"(mean {gigabytes(fmean(rates))}, {gigabytes(min(rates))} to {gigabytes(max(rates))})"
        )
        if between and median(rates) < LEAST_RATE:
            texts[-1] += f", less than {gigabytes(LEAST_RATE)}"
            advice.append(
                "MPI may have chosen the wrong network: check which one it uses (FI_PROVIDER or UCX_TLS for "
                "MPICH, OMPI_MCA_pml and OMPI_MCA_btl for Open MPI)"
            )
        if not crowded:
            slow += [link for link in alike if rate_of(link) < SLOW * median(rates)]
    for link in slow[:SHOWN]:
        a, b = link["from"], link["to"]
        texts.append(
            f"slow: rank {a} ({ranks[a]['host']}) to rank {b} ({ranks[b]['host']}), {gigabytes(rate_of(link))}"
        )
    if slow:
        more = f" ({number(len(slow), 'slow link')} in all)" if len(slow) > SHOWN else ""
        advice.append(f"see what else uses these nodes and links, or leave them out{more}")
    if crowded:
        texts.append("links are not compared, because ranks share cores")
    return Item("links", WARN if advice else PASS, "; ".join(texts), "; ".join(advice))


def rate_of(link):
    """Bytes per second of a link's long messages, at the fastest size."""
    return max(link["rates"].values())


def gigabytes(rate):
    """A rate as text."""
    return f"{rate / 1e9:.3g} GB/s"


def files(written, ranks):
    """Files can be written in the folder, and all ranks read them.  written: from `mpiattn.check.folder.gather`."""
    name, writers = f"{written['folder']!r}", "all ranks" if written["parallel"] else "rank 0"
    h5py = f"h5py {'has' if written['parallel'] else 'without'} MPI"
    if written["written"]:
        return Item(
            "files",
            FAIL,
            f"{writers} cannot write in {name}: {written['written']} ({h5py})",
            "name a writable folder with --folder; on a file system without locks, set HDF5_USE_FILE_LOCKING=FALSE",
        )
    missing = {rank: why for rank, why in enumerate(written["read"]) if why}
    if not missing:
        return Item("files", PASS, f"{writers} wrote a file in {name} ({h5py}), all read it")
    hosts = sorted({ranks[rank]["host"] for rank in missing})
    why = "; ".join(sorted(set(missing.values())))
    return Item(
        "files",
        FAIL,
        f"{writers} wrote a file in {name} that {ranks_text(list(missing))} on {', '.join(hosts)} cannot read: {why}",
        "name a folder on a file system that all nodes share: --folder",
    )
