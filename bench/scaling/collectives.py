"""Predict the time of an all-reduce by alpha-beta models of the usual algorithms. Pure functions, no torch.

A link has a latency (seconds before a message's first byte) and a bandwidth (bytes per second). Each number is one
float or an array of draws of shape [S]; results broadcast.

Ring and tree follow the cost model of NCCL's tuner (NVIDIA/nccl src/graph/tuning.cc, commit 01afd20): a ring takes
2(n-1) steps, of which 2(m-1) cross between the m nodes; a tree takes 2((n/m - 1) + log2 m) steps. Per gradient byte a
ring moves 2(n-1)/n bytes through each rank (Patarasuk and Yuan 2009), a double binary tree 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastvid.errors import UsageError

Value: TypeAlias = "float | NDArray[np.float64]"


@dataclass(frozen=True)
class NetworkLink:
    """Bandwidth and latency of one kind of connection, in one direction."""

    bytes_per_second: Value
    latency_seconds: Value = 0.0

    def __post_init__(self) -> None:
        require_positive("bytes_per_second", self.bytes_per_second)
        require_not_negative("latency_seconds", self.latency_seconds)


@dataclass(frozen=True)
class Topology:
    """Placement of ranks on nodes, and the links between them."""

    gpus_per_node: int
    intra: NetworkLink
    inter: NetworkLink

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise UsageError(f"gpus_per_node is {self.gpus_per_node}, must be at least 1")

    def nodes(self, ranks: int) -> int:
        """Return the number of nodes for `ranks` ranks; nodes are filled in order."""
        return -(-ranks // self.gpus_per_node)


def ring(ranks: int, size: float, topology: Topology) -> Value:
    """Return the seconds of one ring over all ranks, ordered by node; the slowest hop sets the bandwidth."""
    nodes = topology.nodes(ranks)
    crossing = 2 * (nodes - 1)
    inside = 2 * (ranks - 1) - crossing
    latency = crossing * topology.inter.latency_seconds + inside * topology.intra.latency_seconds
    return latency + 2 * (ranks - 1) / ranks * size * _slowest_hop(ranks, nodes, topology)


def tree(ranks: int, size: float, topology: Topology) -> Value:
    """Return the seconds of a double binary tree between nodes with a chain inside each node."""
    if ranks == 1:
        return 0.0
    nodes = topology.nodes(ranks)
    inside = 2 * (min(ranks, topology.gpus_per_node) - 1)
    crossing = 2 * math.ceil(math.log2(nodes))
    latency = crossing * topology.inter.latency_seconds + inside * topology.intra.latency_seconds
    return latency + 2 * size * _slowest_hop(ranks, nodes, topology)


def hierarchical(ranks: int, size: float, topology: Topology) -> Value:
    """Return the seconds of reduce-scatter inside nodes, all-reduce between nodes, all-gather inside nodes.

    The all-reduce between nodes is the faster of ring and tree; the GPUs of a node share its network link, and each
    sends its part of the gradient.
    """
    nodes = topology.nodes(ranks)
    local = min(ranks, topology.gpus_per_node)
    inside = ring(local, size, topology)
    between = Topology(1, topology.intra, topology.inter)
    return inside + np.minimum(ring(nodes, size, between), tree(nodes, size, between))


def fastest(ranks: int, size: float, topology: Topology) -> Value:
    """Return the seconds of the faster of ring and tree for this size, as NCCL chooses."""
    return np.minimum(ring(ranks, size, topology), tree(ranks, size, topology))


ALGORITHMS: Final[dict[str, Callable[[int, float, Topology], Value]]] = {
    "auto": fastest,
    "hierarchical": hierarchical,
    "ring": ring,
    "tree": tree,
}


def all_reduce_seconds(ranks: int, size: float, topology: Topology, algorithm: str = "auto") -> Value:
    """Return the seconds to all-reduce `size` bytes over `ranks` ranks.

    `ranks`: number of ranks, >= 1; 0 seconds for one rank. `size`: bytes of the buffer.
    """
    if algorithm not in ALGORITHMS:
        raise UsageError(f"unknown all-reduce algorithm {algorithm!r}", hint=f"use one of {', '.join(ALGORITHMS)}")
    if ranks < 1:
        raise UsageError(f"ranks is {ranks}, must be at least 1")
    return ALGORITHMS[algorithm](ranks, size, topology)


@dataclass(frozen=True)
class AllReducePoint:
    """A measured all-reduce: `size` bytes over `ranks` ranks connected by one kind of link took `seconds`."""

    ranks: int
    size: float
    seconds: float


def fit_link(points: Sequence[AllReducePoint]) -> NetworkLink:
    """Fit a link to measured ring all-reduces, minimising the relative error.

    A ring's time is linear in latency and in 1 / bandwidth, so this is a least-squares fit of two unknowns, with each
    row divided by its measured time. A negative latency is replaced by 0.
    """
    usable = [point for point in points if point.ranks > 1]
    if len({point.size for point in usable}) < 2:
        raise UsageError(
            f"{len(usable)} all-reduce points with two or more ranks do not determine latency and bandwidth",
            hint="measure at least two sizes, such as 64 KiB and 25 MiB",
        )
    steps = np.array([2.0 * (point.ranks - 1) for point in usable])
    moved = np.array([2.0 * (point.ranks - 1) / point.ranks * point.size for point in usable])
    seconds = np.array([point.seconds for point in usable])
    if np.any(seconds <= 0):
        raise UsageError(f"an all-reduce time is {seconds.min()} s, must be above 0")
    rows = np.stack([steps, moved], axis=1) / seconds[:, None]
    latency, per_byte = (float(unknown) for unknown in np.linalg.lstsq(rows, np.ones(len(usable)), rcond=None)[0])
    if latency < 0:
        column = rows[:, 1]
        latency, per_byte = 0.0, float(column.sum() / (column**2).sum())
    if per_byte <= 0:
        raise UsageError(
            "cannot fit a bandwidth: measured all-reduce times do not grow with size",
            hint="measure a size that takes several times the latency, such as 25 MiB or more",
        )
    return NetworkLink(1.0 / per_byte, latency)


def require_positive(name: str, value: Value) -> None:
    """Raise UsageError unless every draw of `value` is above 0."""
    if not np.all(np.asarray(value) > 0):
        raise UsageError(f"{name} is {np.min(value)}, must be above 0")


def require_not_negative(name: str, value: Value) -> None:
    """Raise UsageError unless every draw of `value` is 0 or more."""
    if not np.all(np.asarray(value) >= 0):
        raise UsageError(f"{name} is {np.min(value)}, must not be negative")


def _slowest_hop(ranks: int, nodes: int, topology: Topology) -> Value:
    """Return the seconds per byte of the slowest link in use."""
    hops: list[Value] = []
    if ranks > nodes:
        hops.append(1.0 / np.asarray(topology.intra.bytes_per_second))
    if nodes > 1:
        hops.append(1.0 / np.asarray(topology.inter.bytes_per_second))
    slowest: Value = 0.0
    for hop in hops:
        slowest = np.maximum(slowest, hop)
    return slowest
