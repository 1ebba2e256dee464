"""The machine model behind predicted times: links inside and between nodes, and the speed of blocks."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import ArgumentError
from ..schedule.reduction import ALGORITHMS
from ..system.closest import of_choices

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

Amount = TypeVar("Amount", float, "NDArray[np.float64]")

# Work of a block in units of a forward one, which takes two matrix products; a backward one takes five.
PRODUCTS = {"forward": 1.0, "backward": 2.5}


class Link(NamedTuple):
    """The link between two ranks.

    latency: seconds per message, in addition to its bytes.
    bandwidth: bytes a second that a rank sends while it receives at the same rate and all other ranks do the same.
    overlap: share of a transfer that proceeds while the rank computes; below 1 if the cores have to move the bytes.
    """

    latency: float
    bandwidth: float
    overlap: float = 1.0

    def seconds(self, nbytes: Amount, messages: float = 1) -> Amount:
        """Seconds of a transfer of `nbytes` bytes in `messages` messages."""
        return messages * self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """A cluster of equal nodes with equal ranks, from which times of plans are predicted.

    Parameters
    ----------
    name : str
        Name of the machine.
    inside, between : Link
        Links of two ranks on one node and on two nodes: (latency in seconds, bandwidth in bytes a second, overlap).
        overlap is the share of a transfer that proceeds while the rank computes, default 1.
    flops : dict of str to float
        By dtype, floating-point operations a second of block attention.  A block has 2 (head_dim + value_dim) for every
        attended pair and head forward, and 2.5 times as many backward.
    ranks_per_node : int, default 1
        Ranks (GPUs) of a node.
    node_bandwidth : float, default None
        Bytes a second that all ranks of a node together send to other nodes.  None if each rank has its own card.
    backward : float, default 1.0
        Speed of backward blocks in units of `flops`.
    launch : float, default 50e-6
        Seconds of a block in addition to its work.
    edge : float, default 0.0
        Keys that a query takes time for in a launch beside those that it sees there: rows are packed, and tiles are
        computed whole.  Half of it where no mask hides a key.  In float32; see `edge_keys` for other dtypes.
    merging : float, default 2e9
        Bytes a second of partials that a rank merges into its own.
    collective : float, default 1.0
        Time of MPI's collectives in units of the time of pairwise messages with the same bytes.
    combining : dict, default {}
        By algorithm that combines partials ("allreduce", "butterfly", "levels"), pairs (bytes of a partial, measured
        seconds / seconds predicted from the links), bytes increasing.  The factor of a missing algorithm is 1.
    assumes : str, default ""
        Where the figures come from, in words.

    Raises
    ------
    ArgumentError
        On this rank alone.
    """

    name: str
    inside: Link
    between: Link
    flops: dict[str, float] = field(hash=False)
    ranks_per_node: int = 1
    node_bandwidth: float | None = None
    backward: float = 1.0
    launch: float = 50e-6
    edge: float = 0.0
    merging: float = 2e9
    collective: float = 1.0
    combining: dict[str, Sequence[tuple[float, float]]] = field(default_factory=dict, hash=False)
    assumes: str = ""

    def __post_init__(self) -> None:
        numbers = {
            "ranks_per_node": self.ranks_per_node,
            "backward": self.backward,
            "merging": self.merging,
            "collective": self.collective,
            **{f"flops of {dtype}": rate for dtype, rate in self.flops.items()},
        }
        for side in ("inside", "between"):
            link = getattr(self, side)
            numbers[f"{side}.bandwidth"] = link.bandwidth
            _check(f"{side}.latency", link.latency, link.latency >= 0, "at least 0")
            _check(f"{side}.overlap", link.overlap, 0 <= link.overlap <= 1, "from 0 to 1")
        if self.node_bandwidth is not None:
            numbers["node_bandwidth"] = self.node_bandwidth
        for name, number in numbers.items():
            _check(name, number, number > 0, "positive")
        _check("launch", self.launch, self.launch >= 0, "at least 0")
        _check("edge", self.edge, self.edge >= 0, "at least 0")
        for algorithm, points in self.combining.items():
            sizes = [nbytes for nbytes, factor in points if nbytes > 0 and factor > 0]
            if algorithm not in ALGORITHMS or len(sizes) < len(points) or sorted(set(sizes)) != sizes:
                raise ArgumentError(
                    f"combining of the machine has {algorithm!r}: {points!r}; it may have {', '.join(ALGORITHMS)}, "
                    "each with pairs [bytes, factor], both positive, in order of bytes"
                )
        if not self.flops:
            raise ArgumentError("the machine has no flops; it needs those of one dtype at least")

    def compute(self, flops: Amount, dtype: str, direction: str = "forward") -> Amount:
        """Seconds of blocks, from the operations that they take forward.

        If the speed of float16 or bfloat16 is unknown, that of the other is used, else that of float32.  Otherwise an
        unknown speed is half the lowest known one.

        Parameters
        ----------
        flops : float or ndarray
            Floating-point operations of the forward pass, also if direction is "backward".
        dtype : str
            dtype of the inputs.
        direction : str, default "forward"
            "forward" or "backward".

        Returns
        -------
        float or ndarray of the shape of flops
            Seconds.
        """
        backward = direction == "backward"
        return flops * PRODUCTS[direction] / (self._speed(dtype) * (self.backward if backward else 1))

    def _speed(self, dtype: str) -> float:
        speed = self.flops.get(dtype)
        if speed is None:
            wider = {"float16": ("bfloat16", "float32"), "bfloat16": ("float16", "float32")}.get(dtype, ())
            known = [self.flops[other] for other in wider if other in self.flops]
            speed = known[0] if known else min(self.flops.values()) / 2
        return speed

    def edge_keys(self, dtype: str) -> float:
        """`edge` in keys of a dtype: more where products are faster than in float32, since packing rows is not.

        Parameters
        ----------
        dtype : str
            dtype of the inputs.

        Returns
        -------
        float
        """
        return self.edge * max(1.0, self._speed(dtype) / self._speed("float32"))

    def paced(self, flops: float) -> Machine:
        """A copy of the machine with one speed of blocks for every dtype and pass.

        Parameters
        ----------
        flops : float
            Floating-point operations a second.

        Returns
        -------
        Machine
        """
        return replace(
            self, flops=dict.fromkeys(("float16", "bfloat16", "float32", "float64"), flops), backward=1.0, edge=0.0
        )

    def __str__(self) -> str:
        speeds = ", ".join(f"{rate / 1e9:g} in {dtype}" for dtype, rate in self.flops.items())
        links = [(self.between, "between nodes")]
        if self.ranks_per_node > 1:
            links.insert(0, (self.inside, f"inside a node of {self.ranks_per_node} ranks"))
        rates = [
            f"{link.bandwidth / 1e9:.3g} GB/s and {link.latency * 1e6:.3g} us a message {where}"
            + ("" if link.overlap == 1 else f" ({link.overlap:.0%} of it beside blocks)")
            for link, where in links
        ]
        shared = "" if self.node_bandwidth is None else f" ({self.node_bandwidth / 1e9:.3g} GB/s a node)"
        return f"Gflop/s: {speeds}; {self.launch * 1e6:.3g} us a block; {', '.join(rates)}{shared}"

    def with_ranks(self, ranks_per_node: int) -> Machine:
        """A copy of the machine with another number of ranks per node.

        Parameters
        ----------
        ranks_per_node : int

        Returns
        -------
        Machine
        """
        return replace(self, ranks_per_node=ranks_per_node)

    def as_dict(self) -> dict[str, Any]:
        """The machine as a dict that JSON can hold.

        Returns
        -------
        dict
        """
        return {**asdict(self), "inside": self.inside._asdict(), "between": self.between._asdict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any], name: str = "machine") -> Machine:
        """The machine of a dict from `as_dict`.

        Parameters
        ----------
        data : dict
        name : str, default "machine"
            What error messages call it.

        Returns
        -------
        Machine

        Raises
        ------
        ArgumentError
            On this rank alone.
        """
        known = {member.name for member in fields(cls)}
        try:
            unknown = set(data) - known
            if unknown:
                raise ArgumentError(f"{name} has {', '.join(sorted(unknown))}; it may have {', '.join(sorted(known))}")
            return cls(**{**data, "inside": Link(**data["inside"]), "between": Link(**data["between"])})
        except ArgumentError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ArgumentError(f"{name} is not a machine: {error}") from None


def _check(name: str, value: float, right: bool, may_be: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not right:
        raise ArgumentError(f"{name} of the machine is {value!r}; it must be {may_be}")


EDGE = 128.0  # a tile of keys; as measured of the back end cpu with windows of 16 to 1024 keys, with AVX-512

# One core, and its share of a 100 Gb/s link.
DEFAULT = Machine(
    "default",
    inside=Link(2e-6, 5e9, overlap=0.0),
    between=Link(10e-6, 3e9),
    flops={"float32": 60e9, "float64": 30e9},
    edge=EDGE,
    assumes="one core a rank and its share of a 100 Gb/s link; run `mpiattn tune` to measure yours",
)

# Links, from datasheets: 400 Gb/s are 50 GB/s each way, NVLink 4 has 450 GB/s each way.  Messages of megabytes are
# assumed to reach 80 % of both.
# Collectives pass host memory, at 20 GB/s.
# Blocks in half types, as measured of the back end cuda on an H200, whose multiprocessors are an H100's
# (kernels/README.md, Measured): head dim 128, 8k and 16k tokens, full and causal, 318 to 333 TFLOP/s forward, 202 to
# 237 backward.
# float32 is not measured.  The kernels multiply it by FMAs, and 60 % of the datasheet's 67 TFLOP/s are assumed.
HALF, SINGLE = 330e12, 40e12
H100 = Machine(
    "h100",
    inside=Link(10e-6, 360e9),
    between=Link(15e-6, 40e9),
    ranks_per_node=8,
    flops={"float16": HALF, "bfloat16": HALF, "float32": SINGLE},
    backward=0.68,
    launch=10e-6,
    edge=SINGLE / HALF * EDGE,  # a tile of keys in half types
    merging=1e12,
    collective=18.0,
    assumes="nodes of 8 H100 joined by NVLink, one 400 Gb/s card a GPU, 80 % of the rates of the "
    "datasheets; blocks of half types as fast as measured on one H200. Links and float32 are not measured",
)

# The same where messages pass host memory: a GPU's copies to the host and back, and MPI's copy there, take turns with
# those of the node's other ranks for the host's memory.
H100_STAGED = replace(
    H100,
    name="h100-staged",
    inside=Link(30e-6, 20e9),
    between=Link(35e-6, 20e9),
    collective=1.0,
    assumes="nodes of 8 H100 whose messages pass host memory at 20 GB/s; blocks of half types as fast as measured on "
    "one H200. Links and float32 are not measured",
)

BUILT_IN = {machine.name: machine for machine in (DEFAULT, H100, H100_STAGED)}


def load(path: Machine | str | os.PathLike[str]) -> Machine:
    """The `Machine` of a JSON file or of a built-in name; a `Machine` is returned as it is.  Raises ArgumentError."""
    if isinstance(path, Machine):
        return path
    try:
        name = os.fspath(path)  # open() would take an int for a file descriptor
        if name in BUILT_IN:
            return BUILT_IN[name]
        with open(name) as file:
            data = json.load(file)
    except (OSError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{error}"
        raise ArgumentError(
            f"machine is {path!r}; it may be {', '.join(BUILT_IN)} or a file that `mpiattn tune` wrote ({reason})"
            f"{of_choices(str(path), BUILT_IN)}"
        ) from None
    return Machine.from_dict(data, f"machine {path!r}")
