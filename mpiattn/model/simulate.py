"""Simulates a schedule on a machine model: begin and end of every step and transfer on every rank.  No MPI.

A rank posts transfers in the order of the schedule, as the executor does: those of the current step at once, later ones
while fewer than two are in flight.  A transfer begins when both ends have posted it and both links are free, since a
link serves one transfer at a time.  A step ends when its blocks are done and its transfers complete and merged.  All
ranks are simulated together, each with the work and transfers that the mask leaves it.
"""

import numpy as np

from ..schedule.kinds import GATHERED, IN_COLUMNS, KINDS
from ..schedule.route import leg_of
from ..schedule.timeline import Moved, StepTimes, Timeline
from ..schedule.travels import token_bytes

COPYING = 2.0  # bytes copied in the time in which one byte is merged


def nodes_of(ranks, machine):
    """The node of every rank if each node is filled before the next: int64 (ranks,)."""
    return np.arange(ranks) // machine.ranks_per_node


def simulate(schedule, problem, load, machine, nodes=None):
    """The predicted `Timeline` of a pass; its times are arrays (ranks,).

    load: the `model.workload.Load` of the schedule's mesh, the work and transfers of every rank.
    nodes: the node of every rank of the mesh; default `machine.ranks_per_node` consecutive ranks on each.
    """
    return _Run(schedule, problem, load, machine, nodes).timeline()


class _Run:
    def __init__(self, schedule, problem, load, machine, nodes):
        self.schedule, self.load, self.machine = schedule, load, machine
        self.ranks = load.pairs.shape[2]
        self.nodes = nodes_of(self.ranks, machine) if nodes is None else np.asarray(nodes)
        self.sides = (False, True) if (self.nodes != self.nodes[0]).any() else (False,)  # links inside, between nodes
        self.token_bytes = nbytes = token_bytes(problem, schedule.direction)
        self.messages = {name: len(kind.arrays_of(problem)) for name, kind in KINDS[schedule.direction].items()}
        transfers = {(t.kind, t.collective) for step in schedule.steps for t in step.transfers}
        self.moved = {
            (kind, collective): load.moved(kind, schedule.route, collective) * nbytes[kind]
            for kind, collective in transfers
        }
        self.direction, self.dtype, self.flops = schedule.direction, problem.dtype, problem.flops_per_pair
        edge, launched = machine.edge_keys(problem.dtype), load.pairs > 0
        if schedule.packed:
            self.fused = self._seconds(load.fused_pairs(edge), launched.any(axis=(0, 1)))  # (ranks,)
        else:
            self.blocks = self._seconds(load.timed_pairs(edge), launched)  # (a, b, ranks)
        zero = np.zeros(self.ranks)
        self.free_from = {side: [zero.copy(), zero.copy()] for side in ("out", "in")}  # links inside and between
        self.posted, self.last_two = zero, [zero, zero]  # so far: latest post, two latest ends

    def _seconds(self, pairs, launched):
        """Seconds of blocks with so many timed pairs.  launched: whether there are any."""
        launching = self.machine.launch * self.load.lists * launched
        return self.machine.compute(self.flops * pairs, self.dtype, self.direction) + launching

    def timeline(self):
        begins, steps, moves = [], [], []
        now = np.zeros(self.ranks)
        for number, step in enumerate(self.schedule.steps):
            begins.append(now)
            computed = now + self._computing(step)
            ended, unhidden, merging = computed, 0, 0
            for t in step.transfers:
                posted = self._post(t, begins)
                begun, arrived, done, rest, received = (self._collective if t.collective else self._pairs)(t, posted)
                ended, unhidden = np.maximum(ended, done), unhidden + rest
                if t.kind not in GATHERED:
                    merging = merging + received / self.machine.merging
                if t.collective:
                    merging = merging + self._placing(t.kind, received)
                self.last_two = sorted_two(*self.last_two, done)
                moves.append(Moved(t.kind, 0 if t.collective else t.hops[0], number, begun, arrived))
            ended = np.maximum(ended, computed + unhidden) + merging
            steps.append(StepTimes(now, computed, ended))
            now = ended
        return Timeline(self.schedule.direction, tuple(steps), tuple(moves), float(now.max()))

    def _placing(self, kind, received):
        """Seconds of copying chunks to their places in the arena of a collective, and keys in order of position."""
        column = kind in IN_COLUMNS
        own = self.token_bytes[kind] * self.load.lengths[column][self.load.chunks[column][0]]
        copied = own if kind in GATHERED else np.zeros(self.ranks)
        if column and not self.load.ordered:
            copied = copied + own + received
        return copied / (COPYING * self.machine.merging)

    def _computing(self, step):
        if step.fused:
            return self.fused
        return sum((self.blocks[block] for block in step.blocks), np.zeros(self.ranks))

    def _post(self, transfer, begins):
        """When every rank posts a transfer: in order, in its step at the latest, ahead with at most one in flight."""
        ahead = np.maximum(begins[transfer.earliest], self.last_two[0])
        self.posted = np.maximum(self.posted, np.minimum(begins[-1], ahead))
        return self.posted

    def _sources(self, transfer, hop):
        """The rank from which every rank receives in a hop."""
        kind, extent = transfer.kind, self.schedule.tile.extent(transfer.kind)
        ahead = leg_of(kind, hop, extent, self.schedule.route, transfer.collective).ahead
        return self.load.chunks[kind in IN_COLUMNS][ahead % extent]

    def _links(self, sources):
        """By receiver: whether its source is on another node; latency, bytes a second and overlap of their link."""
        inside, between = self.machine.inside, self.machine.between
        crossing = self.nodes[sources] != self.nodes
        if True not in self.sides:
            return crossing, inside.latency, inside.bandwidth, inside.overlap
        rate = np.where(crossing, between.bandwidth, inside.bandwidth)
        if self.machine.node_bandwidth is not None and crossing.any():
            for ends in (self.nodes[sources], self.nodes):  # leaving a node, entering one
                sharing = np.bincount(ends[crossing], minlength=self.nodes.max() + 1)[ends]
                rate = np.where(crossing, np.minimum(rate, self.machine.node_bandwidth / np.maximum(sharing, 1)), rate)
        return (
            crossing,
            np.where(crossing, between.latency, inside.latency),
            rate,
            np.where(crossing, between.overlap, inside.overlap),
        )

    def _free(self, end, ranks, crossing):
        """When the links of some ranks are free, those to other nodes or those inside."""
        inside, between = self.free_from[end]
        return np.where(crossing, between[ranks], inside[ranks]) if True in self.sides else inside[ranks]

    def _pairs(self, transfer, posted):
        """Times of a transfer between pairs.

        Returns its begin and arrival by receiver, the time when each rank has received and sent, the seconds that
        blocks cannot hide, and the bytes received.
        """
        (hop,) = transfer.hops
        sources = self._sources(transfer, hop)
        nbytes = self.moved[transfer.kind, False][hop]
        nbytes = nbytes if transfer.kind in GATHERED else nbytes[sources]
        crossing, latency, rate, overlap = self._links(sources)
        out, into = self._free("out", sources, crossing), self._free("in", slice(None), crossing)
        moves, lasting = nbytes > 0, nbytes / rate
        begun = np.maximum(np.maximum(posted, posted[sources]), np.maximum(out, into))
        leaves = begun + lasting
        for between in self.sides:
            busy = moves & (crossing == between)
            self.free_from["out"][between][sources[busy]] = leaves[busy]
            self.free_from["in"][between][busy] = leaves[busy]
        arrived = leaves + self.messages[transfer.kind] * latency
        done, unhidden = (np.where(moves, times, 0) for times in (arrived, (1 - overlap) * lasting))
        sent, unhidden_sent = np.zeros(self.ranks), np.zeros(self.ranks)
        sent[sources], unhidden_sent[sources] = done, unhidden
        begun, arrived = (np.where(moves, times, np.nan) for times in (begun, arrived))
        return begun, arrived, np.maximum(done, sent), np.maximum(unhidden, unhidden_sent), nbytes

    def _collective(self, transfer, posted):
        """The same for a collective, which lasts until its slowest rank has received everything."""
        column, reduced = transfer.kind in IN_COLUMNS, transfer.kind not in GATHERED
        extent, nbytes = self.schedule.tile.extent(transfer.kind), self.moved[transfer.kind, True]
        shape, axis = (self.schedule.tile.b, self.schedule.tile.a), 0 if column else 1
        seconds, latencies, received = np.zeros((2, self.ranks)), np.zeros(self.ranks), np.zeros(self.ranks)
        for hop in range(1, extent):
            sources = self._sources(transfer, hop)
            incoming = nbytes[hop][sources] if reduced else nbytes[hop]
            crossing, latency, rate, _ = self._links(sources)
            seconds[crossing.astype(int), np.arange(self.ranks)] += incoming / rate
            latencies += np.where(incoming > 0, latency, 0)
            received += incoming
        lasting = (self.machine.collective * (seconds.max(axis=0) + latencies)).reshape(shape)
        free = np.max([posted, *self.free_from["out"], *self.free_from["in"]], axis=0)  # it occupies all links
        begun = np.broadcast_to(free.reshape(shape).max(axis=axis, keepdims=True), shape)
        done = begun + np.broadcast_to(lasting.max(axis=axis, keepdims=True), shape)
        begun, done = begun.reshape(-1), done.reshape(-1)
        self.free_from = {side: [done.copy(), done.copy()] for side in self.free_from}
        moves = received > 0
        return np.where(moves, begun, np.nan), np.where(moves, done, np.nan), done, 0, received


def sorted_two(earlier, latest, new):
    """The two latest of three times, in order."""
    return [np.maximum(earlier, np.minimum(latest, new)), np.maximum(latest, new)]
