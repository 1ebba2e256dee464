"""Judges what the ranks did together: results, links, files."""

from statistics import fmean, median

from .report_item import FAIL, PASS, WARN, Item, count, ranks_text

SHOWN = 3                  # cases and links that are named
LEAST_RATE = 1e8           # bytes a second between nodes: any network for such work has ten times as much
SLOW = 1 / 4               # of the median of links of its kind


def results(cases):
    """Every case right; cases: as of `mpiattn.check.results.gather`."""
    wrong = [case for case in cases if not case["passed"]]
    if not wrong:
        return Item("results", PASS, f"{len(cases)} small problems, forward and backward, agree with float64")
    shown = "; ".join(f"{case['case']}: {case['text']}" for case in wrong[:SHOWN])
    more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return Item("results", FAIL, f"{len(wrong)} of {len(cases)} small problems are wrong: {shown}{more}",
                "do not trust this installation: run `mpiattn check` on one rank, to tell NumPy's part from MPI's, "
                "then `mpiattn check --full`, and report what they say")


def links(found, ranks, crowded):
    """Links of the speed of their kind; found: as of `mpiattn.check.links.gather`.

    ranks: their facts.  crowded: whether ranks share cores; links are then no measure of each other.
    """
    if not found:
        return Item("links", PASS, "one rank, so none")
    told, slow, advice = [], [], []
    for between in (False, True):
        some = [link for link in found if link["between"] == between]
        if not some:
            continue
        rates = [rate_of(link) for link in some]
        where = "between nodes" if between else "inside a node"
        told.append(f"{where}: {1e6 * median(link['latency'] for link in some):.3g} us, {gigabytes(median(rates))} "
                    f"(mean {gigabytes(fmean(rates))}, {gigabytes(min(rates))} to {gigabytes(max(rates))})")
        if between and median(rates) < LEAST_RATE:
            told[-1] += f", less than {gigabytes(LEAST_RATE)}"
            advice.append("MPI may have taken the wrong network: look into which it uses (FI_PROVIDER or UCX_TLS for "
                          "MPICH, OMPI_MCA_pml and OMPI_MCA_btl for Open MPI)")
        if not crowded:
            slow += [link for link in some if rate_of(link) < SLOW * median(rates)]
    for link in slow[:SHOWN]:
        a, b = link["from"], link["to"]
        told.append(f"slow: rank {a} ({ranks[a]['host']}) to rank {b} ({ranks[b]['host']}), {gigabytes(rate_of(link))}")
    if slow:
        more = f" ({count(len(slow), 'slow link')} in all)" if len(slow) > SHOWN else ""
        advice.append(f"see what else uses these nodes and links, or leave them out{more}")
    if crowded:
        told.append("ranks share cores, so links are not compared")
    return Item("links", WARN if advice else PASS, "; ".join(told), "; ".join(advice))


def rate_of(link):
    """Bytes a second of a link's long messages, at their best size."""
    return max(link["rates"].values())


def gigabytes(rate):
    """A rate for people."""
    return f"{rate / 1e9:.3g} GB/s"


def files(found, ranks):
    """A folder that takes files and shows them to all; found: as of `mpiattn.check.folder.gather`."""
    name, how = f"{found['folder']!r}", "all ranks" if found["parallel"] else "rank 0"
    h5py = f"h5py {'has' if found['parallel'] else 'without'} MPI"
    if found["written"]:
        return Item("files", FAIL, f"{how} cannot write in {name}: {found['written']} ({h5py})",
                    "name a folder that takes files: --folder; where the system knows no locks, set "
                    "HDF5_USE_FILE_LOCKING=FALSE")
    missing = {rank: why for rank, why in enumerate(found["read"]) if why}
    if not missing:
        return Item("files", PASS, f"{how} wrote a file in {name} ({h5py}), all read it")
    hosts = sorted({ranks[rank]["host"] for rank in missing})
    why = "; ".join(sorted(set(missing.values())))
    return Item("files", FAIL, f"what {how} wrote in {name} is not read by {ranks_text(list(missing))} on "
                               f"{', '.join(hosts)}: {why}",
                "name a folder on a file system that all nodes share: --folder")
