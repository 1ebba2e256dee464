"""What the numbers of a benchmark come to: medians over runs, spread over ranks, speed, waiting, bandwidths.  Pure."""

from dataclasses import dataclass

import numpy as np

from ..model.machine import PRODUCTS
from ..schedule.kinds import OUT, K, Q, V
from ..schedule.travels import held_bytes

EMULATED = "emulated compute"          # what every report of a run says whose blocks took the time of another machine


@dataclass(frozen=True)
class Pass:
    """One pass of one case on all ranks.

    seconds, waiting, sent: (runs, ranks); bytes that were sent.  formula: (ranks,) bytes that should have been.
    ideal: (ranks,) seconds of the rank's blocks at the speed of one rank alone.  flops: of the whole pass.  nbytes: of
    q, k, v, out and, backward, of dout and the gradients.
    """

    seconds: np.ndarray
    waiting: np.ndarray
    sent: np.ndarray
    formula: np.ndarray
    ideal: np.ndarray
    flops: float
    nbytes: int

    @classmethod
    def of(cls, told, problem, name):
        """From what every rank told of a pass."""
        runs = [np.array([rank[what] for rank in told]).T for what in ("seconds", "waiting", "sent")]
        return cls(*runs, *(np.array([rank[what] for rank in told]) for what in ("formula", "ideal")),
                   PRODUCTS[name] * problem.flops, whole_bytes(problem, name))

    def __add__(self, other):
        """One pass after the other."""
        return Pass(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def slowest(self):
        """Seconds of the slowest rank in every run: what a run takes."""
        return self.seconds.max(axis=1)

    @property
    def counted(self):
        """Whether every rank has sent just what the formula says in every run."""
        return bool((self.sent == self.formula).all())

    def summary(self):
        """As numbers for people and programs, those of time over the median of the runs."""
        seconds = float(np.median(self.slowest))
        waiting = np.median(self.waiting / self.seconds, axis=0)
        ideal, sent = float(self.ideal.max()), self.sent.mean(axis=0)
        return {"seconds": {"median": seconds, **_spread(self.slowest)}, "runs": self.slowest.tolist(),
                "ranks": _spread(np.median(self.seconds, axis=0)), "waiting": _spread(waiting),
                "ideal_seconds": ideal, "of_ideal": ideal / seconds, "gflops_per_second": self.flops / seconds / 1e9,
                "sent_bytes": _spread(sent), "formula_bytes": _spread(self.formula), "counted": self.counted,
                "algorithm_bandwidth": self.nbytes / seconds, "bus_bandwidth": float(sent.mean()) / seconds}


def _spread(numbers):
    return {"min": float(numbers.min()), "mean": float(numbers.mean()), "max": float(numbers.max())}


def whole_bytes(problem, name):
    """Bytes of what a pass reads and gives, once each: q, k, v and out; backward dout, dq, dk and dv too."""
    nbytes = problem.seqlen * held_bytes(problem, Q, OUT) + problem.seqlen_k * held_bytes(problem, K, V)
    return nbytes * (2 if name == "backward" else 1)


def passes_of(plan, problem):
    """A plan of `mpiattn.bench.measure.Measured` as passes by name; where both were run, their sum as "both"."""
    found = {name: Pass.of(told, problem, name) for name, told in plan["passes"].items()}
    if len(found) > 1:
        found["both"] = sum(list(found.values())[1:], found["forward"])
    return found
