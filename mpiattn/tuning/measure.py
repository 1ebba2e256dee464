"""The whole measurement: a `Machine`, the samples behind its figures, and which of them are the default's."""

from typing import NamedTuple

from ..model.machine import DEFAULT, Link, Machine
from ..system import host
from ..system.words import number
from . import blocks, collectives, combining, links, overlap
from .samples import Sample

# The share of the time for each part, in order.
SHARES = {
    "blocks": 0.35,
    "merging": 0.05,
    "inside": 0.1,
    "between": 0.15,
    "inside overlap": 0.1,
    "between overlap": 0.1,
    "collective": 0.1,
    "combining": 0.05,
}


class Measured(NamedTuple):
    """machine: with the measured figures.  samples: the `Sample` of every measured figure, by name.  lacking: reasons
    by field of the machine, for figures that this launch cannot show and that are those of the default machine.
    """

    machine: Machine
    samples: dict
    lacking: dict


def measure(job, nodes, backend, dtypes, head_dim, seconds, progress=lambda seconds: None):
    """Measure the machine that these ranks run on, for about `seconds`; collective, the same result on every rank.

    job: a `console.launch.Job`.  nodes: node number of every rank (`comm.mesh.nodes_of`).  dtypes: of blocks, at least
    one.  progress: called with the seconds that have just passed, `seconds` in all.
    """
    peers, samples, lacking = job.peers, {}, {}

    def part(name, measurement, *arguments):
        """One part of the measurement, a phase of the job."""
        figures = job(f"measure {name}", lambda: measurement(*arguments, SHARES[name] * seconds, progress))
        return peers.allgather(figures)[0]  # rank 0's: sums may differ between ranks in the last bit

    computed = part("blocks", blocks.measure, peers, backend, dtypes, head_dim)
    samples |= {
        "launch": computed.launch,
        **{f"flops {dtype}": sample for dtype, sample in computed.flops.items()},
        "backward": computed.backward,
    }
    samples["merging"] = part("merging", blocks.merging, peers, backend, head_dim)
    sides, node = {}, None
    for side, between in (("inside", False), ("between", True)):
        link = part(side, links.measure, peers, nodes, backend, between)
        if link is None:
            sides[side] = getattr(DEFAULT, side)
            lacking[side] = "one node" if between else "no node with two ranks"
            continue
        samples |= {f"{side} latency": link.latency, f"{side} bandwidth": link.bandwidth}
        sides[side] = Link(link.latency.typical, link.bandwidth.typical)
        if link.node:
            samples["node_bandwidth"] = link.node
            node = link.node.typical
    for side, between in (("inside", False), ("between", True)):
        hidden = part(
            f"{side} overlap",
            overlap.measure,
            peers,
            nodes,
            backend,
            between,
            sides[side].bandwidth,
            overlap.BlockSpeed(dtypes[0], head_dim, computed.flops[dtypes[0]].typical),
        )
        if hidden is not None:
            samples[f"{side} overlap"] = hidden
            sides[side] = sides[side]._replace(overlap=hidden.typical)
    slowest = min(sides[side].bandwidth for side in sides if side not in lacking or len(lacking) == 2)
    together = part("collective", collectives.measure, peers, backend, slowest)
    if together is None:
        lacking["collective"] = "one rank"
        together = Sample(DEFAULT.collective, DEFAULT.collective, DEFAULT.collective, 0)
    else:
        samples["collective"] = together
    combined = part("combining", combining.measure, peers, nodes, backend, head_dim, *sides.values())
    if combined is None:
        lacking["combining"] = "one rank"
    else:
        samples |= {
            f"combining {rows} {algorithm}": sample
            for algorithm, by_rows in combined.items()
            for rows, sample in by_rows.items()
        }
    several = max(nodes) + 1
    machine = Machine(
        "measured",
        **sides,
        node_bandwidth=node,
        ranks_per_node=max(map(nodes.count, nodes)),
        flops={dtype: sample.typical for dtype, sample in computed.flops.items()},
        backward=computed.backward.typical,
        launch=computed.launch.typical,
        edge=DEFAULT.edge,
        merging=samples["merging"].typical,
        collective=together.typical,
        combining=combining.factors(combined or {}, head_dim, nodes, *sides.values()),
        assumes=f"measured by mpiattn tune: {number(len(nodes), 'rank')} on {number(several, 'node')}, "
        f"{host.processor()}, {backend.name} back end, head_dim {head_dim}"
        + "".join(f"; {field} of the default ({why})" for field, why in lacking.items()),
    )
    return Measured(peers.allgather(machine)[0], samples, lacking)
