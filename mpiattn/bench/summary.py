"""Summaries of a benchmark: medians over runs, spread over ranks, speed, waiting, bandwidths.  Pure functions."""

from dataclasses import dataclass

import numpy as np

from ..model.machine import PRODUCTS
from ..schedule.kinds import OUT, K, Q, V
from ..schedule.travels import held_bytes

EMULATED = "emulated compute"  # the label of every report whose blocks took an emulated time


@dataclass(frozen=True)
class Pass:
    """One pass of one case on all ranks.

    seconds, waiting, sent (bytes): (runs, ranks).  formula: (ranks,) bytes by the formula.  ideal: (ranks,) seconds of
    the rank's blocks at the speed of one rank alone.  flops: of the whole pass.  nbytes: of q, k, v, out and, backward,
    of dout and the gradients.
    """

    seconds: np.ndarray
    waiting: np.ndarray
    sent: np.ndarray
    formula: np.ndarray
    ideal: np.ndarray
    flops: float
    nbytes: int

    @classmethod
    def of(cls, by_rank, problem, name):
        """The Pass of the measurements of every rank, a list of dicts."""
        runs = [np.array([rank[field] for rank in by_rank]).T for field in ("seconds", "waiting", "sent")]
        return cls(
            *runs,
            *(np.array([rank[field] for rank in by_rank]) for field in ("formula", "ideal")),
            PRODUCTS[name] * problem.flops,
            whole_bytes(problem, name),
        )

    def __add__(self, other):
        """This pass followed by the other one."""
        return Pass(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def slowest(self):
        """Seconds of the slowest rank in every run, which is the time of the run."""
        return self.seconds.max(axis=1)

    @property
    def counted(self):
        """Whether every rank has sent exactly the bytes of the formula in every run."""
        return bool((self.sent == self.formula).all())

    def summary(self):
        """The figures of the report; rates use the median of the runs."""
        seconds = float(np.median(self.slowest))
        waiting = np.median(self.waiting / self.seconds, axis=0)
        ideal, sent = float(self.ideal.max()), self.sent.mean(axis=0)
        return {
            "seconds": {"median": seconds, **_spread(self.slowest)},
            "runs": self.slowest.tolist(),
            "ranks": _spread(np.median(self.seconds, axis=0)),
            "waiting": _spread(waiting),
            "ideal_seconds": ideal,
            "of_ideal": ideal / seconds,
            "gflops_per_second": self.flops / seconds / 1e9,
            "sent_bytes": _spread(sent),
            "formula_bytes": _spread(self.formula),
            "counted": self.counted,
            "algorithm_bandwidth": self.nbytes / seconds,
            "bus_bandwidth": float(sent.mean()) / seconds,
        }


def _spread(numbers):
    return {"min": float(numbers.min()), "mean": float(numbers.mean()), "max": float(numbers.max())}


def whole_bytes(problem, name):
    """Bytes of the whole inputs and results of a pass: q, k, v and out; backward also dout, dq, dk and dv."""
    nbytes = problem.seqlen * held_bytes(problem, Q, OUT) + problem.seqlen_k * held_bytes(problem, K, V)
    return nbytes * (2 if name == "backward" else 1)


def passes_of(plan, problem):
    """The passes of a plan of `mpiattn.bench.measure.Measured` by name; if both were run, also their sum, "both"."""
    passes = {name: Pass.of(by_rank, problem, name) for name, by_rank in plan["passes"].items()}
    if len(passes) > 1:
        passes["both"] = sum(list(passes.values())[1:], passes["forward"])
    return passes
