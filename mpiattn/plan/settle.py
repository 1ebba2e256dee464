"""What a plan settles before it makes anything: whether the ranks agree on the problem, and what they choose for it."""

import functools
from dataclasses import asdict, dataclass, replace

from ..comm.agreement import agree_on, agreement
from ..comm.exchange import MAX_MESSAGE, check_max_message
from ..comm.peers import check_timeout
from ..comm.transport import check_transport, make_backend, one_of
from ..model import cost, search
from ..model.machine import DEFAULT, Machine
from ..model.simulate import simulate
from ..model.tuned import machine_for
from ..model.workload import Load, block_pairs
from ..problem.problem import Problem
from ..schedule.tile import parse_tile


@dataclass(frozen=True)
class Options:
    """How to attend, as `MeshAttention` documents it."""

    tile: str = "auto"
    layout: str = "auto"
    schedule: str = "auto"
    route: str = "auto"
    direction: str = "forward"
    backend: str = "auto"
    transport: str = "auto"
    max_message: int = MAX_MESSAGE
    max_memory: int = None
    machine: Machine = None
    overlap: bool = True
    timeout: float = None

    def checked(self, problem, ranks):
        """With tile and layout as values; raises ArgumentError."""
        check_timeout(self.timeout)
        one_of("direction", self.direction, tuple(search.DIRECTIONS))
        one_of("schedule", self.schedule, (*cost.SCHEDULES, "auto"))
        one_of("overlap", self.overlap, (True, False))
        check_transport(self.backend, self.transport)
        search.routes(self.route, problem, DEFAULT)
        check_max_message(self.max_message)
        return replace(self, tile=parse_tile(self.tile, ranks), layout=search.layouts(self.layout, problem, ranks))


@dataclass(frozen=True)
class Plan:
    """What was chosen, the same on every rank.

    order: the ranks in the order of the mesh, None for their own.  nodes: the node of every rank of the mesh.
    fastest: predicted seconds of the best choice without a limit of memory.
    """

    problem: Problem
    choice: search.Choice
    machine: Machine
    order: tuple
    nodes: list
    fastest: float
    overlap: bool

    def schedule(self, direction="forward"):
        """The schedule of a pass."""
        c = self.choice
        return cost.build(c.schedule, c.a, c.b, c.route, self.problem, self.machine, direction, self.nodes, c.ahead,
                          self.overlap)

    def predicted(self, direction="forward"):
        """The predicted `mpiattn.schedule.timeline.Timeline` of a pass, of all ranks of the mesh."""
        c = self.choice
        load = Load(block_pairs(self.problem.mask, *c.layouts), *(one.lengths for one in c.layouts), c.a, c.b)
        return simulate(self.schedule(direction), self.problem, load, self.machine, self.nodes)

    def layouts_by_rank(self):
        """The layouts of queries and of keys by the rank of the caller's communicator."""
        if self.order is None:
            return self.choice.layouts
        place = tuple(self.order.index(rank) for rank in range(len(self.order)))
        return tuple(replace(layout, order=place) for layout in self.choice.layouts)


def settle(home, peers, shape, options):
    """(Plan, back end) for a problem of `shape`, the keywords of `Problem`; collective.

    Raises ArgumentError, the same on every rank.
    """
    ranks = peers.size
    with agreement(peers, call="making a plan"):
        problem, asked = Problem(**shape), Options(**options)
        checked = asked.checked(problem, ranks)
    agree_on(peers, {**asdict(problem), **{name: getattr(checked, name) for name in options},
                     "backend": asked.backend})
    backend = make_backend(peers, home.nodes, asked.backend, asked.transport)
    # pieces that the caller has cut are his to hold; else the mesh goes by nodes
    order = home.order if isinstance(asked.layout, str) else None
    nodes = [home.nodes[rank] for rank in order or range(ranks)]
    found = None
    with agreement(peers, only=0):                # time and memory for it grow with the square of the ranks
        if peers.rank == 0:
            machine = machine_for(home.nodes, backend, problem.head_dim, asked.machine)
            if backend.emulated_flops:
                machine = machine.paced(backend.emulated_flops)
            found = _choose(problem, checked, machine, order, nodes)
    return peers.allgather(found)[0], backend


def _choose(problem, checked, machine, order, nodes):
    """The best Plan that checked options leave."""
    evaluate = functools.partial(
        search.evaluate, problem, len(nodes), checked.route, pairs=checked.layout, direction=checked.direction,
        kinds=cost.SCHEDULES if checked.schedule == "auto" else (checked.schedule,), machine=machine, nodes=nodes,
        shapes=checked.tile and [checked.tile], overlap=checked.overlap)
    free = evaluate()
    choices = free if checked.max_memory is None else evaluate(max_memory=checked.max_memory)
    search.check_memory(choices, checked.max_memory)
    return Plan(problem, choices[0], machine, order, nodes, min(one.seconds for one in free), checked.overlap)


def resized(plan, shape, options):
    """The Plan of the same choice for another `shape`; arguments as of `settle`.  Not collective, nothing is searched.

    Raises ArgumentError.
    """
    problem, chosen = Problem(**shape), plan.choice
    layouts = tuple(replace(layout, seqlen=tokens)
                    for layout, tokens in zip(chosen.layouts, (problem.seqlen, problem.seqlen_k)))
    checked = replace(Options(**options), tile=(chosen.a, chosen.b), layout=[layouts], schedule=chosen.schedule,
                      route=chosen.route)
    return _choose(problem, checked, plan.machine, plan.order, plan.nodes)
