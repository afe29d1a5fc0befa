"""Scaling model: predict clips/s, efficiency and time to train on n GPUs from measured parts. No torch.

One synchronous step on n GPUs takes

    step = max(data, compute + wait + exposed)

- ``data``: time of the loader for the step's clips, prefetched in the background: the maximum over decoding, bandwidth
  of a node, bandwidth and request rate of the shared storage, and request latency.
- ``compute``: forward, backward and update of the average GPU.
- ``wait``: time until the slowest of n GPUs is done. Step times are modelled as normal with a relative standard
  deviation of sqrt(gpu_spread^2 + step_jitter^2 / K): differences between GPUs are constant during the run, and jitter
  is independent for each step, so it averages out over the K local steps of K-AVG. The expected maximum of n is exact.
- ``exposed``: communication that does not overlap computation. ``ddp`` all-reduces gradient buckets in sequence, each
  as soon as it is ready; gradient bytes appear evenly over the backward pass. ``kavg`` averages all parameters every K
  steps without overlap, so each step costs 1/K of that all-reduce.

Not modelled: partial last batches, start-up, evaluation, checkpoints, contention of gradient and storage traffic on the
same network, GPU memory, and the accuracy that large batches and large K can cost.

All-reduces are predicted by alpha-beta models of the usual algorithms: a link has a latency (seconds before a message's
first byte) and a bandwidth. Ring and tree follow the cost model of NCCL's tuner (NVIDIA/nccl src/graph/tuning.cc,
commit 01afd20): a ring takes 2(n-1) steps, of which 2(m-1) cross between the m nodes; a tree takes
2((n/m - 1) + log2 m) steps. Per gradient byte a ring moves 2(n-1)/n bytes through each rank (Patarasuk and Yuan 2009),
a double binary tree 2.

Each number is one float or an array of draws of shape [S]. Units are in the names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
        _require(self, "bytes_per_second", not_negative="latency_seconds")


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


def _require(part: object, positive: str, not_negative: str = "") -> None:
    """Raise UsageError unless every draw of the fields of these names is above 0, or 0 or more."""
    for name in (positive + " " + not_negative).split():
        value, free = np.asarray(getattr(part, name)), name in not_negative.split()
        if not np.all(value >= 0 if free else value > 0):
            raise UsageError(f"{name} is {np.min(value)}, must {'not be negative' if free else 'be above 0'}")


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


INFINITE = math.inf


@dataclass(frozen=True)
class Workload:
    """The training workload. Exactly one of the two batch sizes must be above 0.

    `global_batch`: strong scaling: batch of all GPUs together; each GPU gets at most the rounded-up share.
    """

    clips_per_epoch: Value
    epochs: Value
    clips_per_gpu: int = 0
    global_batch: int = 0

    def __post_init__(self) -> None:
        _require(self, "clips_per_epoch epochs")
        if (self.clips_per_gpu > 0) == (self.global_batch > 0) or min(self.clips_per_gpu, self.global_batch) < 0:
            raise UsageError(
                f"clips_per_gpu is {self.clips_per_gpu} and global_batch is {self.global_batch}",
                hint="set exactly one of them above 0",
            )

    def clips(self, gpus: int) -> tuple[int, int]:
        """Return the clips per step of the GPU with the largest share, and of all GPUs."""
        if self.clips_per_gpu:
            return self.clips_per_gpu, self.clips_per_gpu * gpus
        if gpus > self.global_batch:
            raise UsageError(f"{gpus} GPUs cannot share a global batch of {self.global_batch} clips")
        return -(-self.global_batch // gpus), self.global_batch


@dataclass(frozen=True)
class Gradients:
    """Sizes of the gradients and parameters that are communicated.

    `bytes_per_parameter`: 4 for float32, 2 for 16-bit gradients. `averaged_bytes_per_parameter`: bytes that K-AVG
    averages: 4 for the parameters alone, 8 with the momentum.
    """

    parameters: int
    bytes_per_parameter: int = 4
    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int = 2**20
    averaged_bytes_per_parameter: int = 4

    def __post_init__(self) -> None:
        sizes = "bytes_per_parameter bucket_bytes first_bucket_bytes averaged_bytes_per_parameter"
        _require(self, f"parameters {sizes}")

    def buckets(self) -> list[int]:
        """Return the bytes of each bucket, in the order in which the backward pass fills them."""
        left = self.parameters * self.bytes_per_parameter
        sizes: list[int] = []
        while left > 0:
            sizes.append(min(left, self.bucket_bytes if sizes else self.first_bucket_bytes))
            left -= sizes[-1]
        return sizes

    @property
    def averaged_bytes(self) -> int:
        """Bytes that one K-AVG round all-reduces."""
        return self.parameters * self.averaged_bytes_per_parameter


@dataclass(frozen=True)
class Compute:
    """Time of one step on an average GPU, without data loading and communication.

    `clips`: the batch size at which `seconds` was measured. `fixed_seconds`: the part of `seconds` that does not
    depend on the batch size. `backward_fraction`: share of `seconds` in which gradients appear, (0, 1]. 2/3 if
    backward costs two forwards.
    """

    seconds: Value
    clips: int
    fixed_seconds: Value = 0.0
    backward_fraction: Value = 2 / 3
    gpu_spread: Value = 0.0
    step_jitter: Value = 0.0

    def __post_init__(self) -> None:
        _require(self, "clips backward_fraction", not_negative="seconds fixed_seconds gpu_spread step_jitter")
        if np.any(np.asarray(self.backward_fraction) > 1):
            raise UsageError(f"backward_fraction is {np.max(self.backward_fraction)}, must be at most 1")

    def step_seconds(self, clips: int) -> Value:
        """Return the seconds of a step with `clips` clips."""
        scaled = np.maximum(np.asarray(self.seconds) - self.fixed_seconds, 0.0)
        return np.minimum(self.fixed_seconds, self.seconds) + scaled * (clips / self.clips)

    def wait_fraction(self, gpus: int, k: int) -> Value:
        """Return the slowest GPU's extra time over k steps without a barrier, as a fraction of the average time."""
        spread = np.sqrt(np.asarray(self.gpu_spread) ** 2 + np.asarray(self.step_jitter) ** 2 / k)
        return spread * expected_maximum(gpus)


@dataclass(frozen=True)
class DataPath:
    """Cost of reading and decoding clips. An omitted rate is unlimited.

    `clips_per_core_second`: clips that one core decodes and finishes per second. `clips_per_engine_second`: clips
    that one engine decodes per second. `bytes_per_clip`: bytes read per clip. `shared_requests_per_second`: reads
    per second of all nodes together. `request_latency_seconds`: time from a request to its first byte.
    """

    cores_per_node: int = 0
    clips_per_core_second: Value = INFINITE
    engines_per_gpu: int = 0
    clips_per_engine_second: Value = INFINITE
    bytes_per_clip: Value = 0.0
    requests_per_clip: Value = 1.0
    node_bytes_per_second: Value = INFINITE
    shared_bytes_per_second: Value = INFINITE
    shared_requests_per_second: Value = INFINITE
    request_latency_seconds: Value = 0.0
    requests_in_flight: int = 1

    def __post_init__(self) -> None:
        rates = "node_bytes_per_second shared_bytes_per_second shared_requests_per_second requests_in_flight"
        free = "cores_per_node engines_per_gpu bytes_per_clip request_latency_seconds"
        _require(self, f"clips_per_core_second clips_per_engine_second requests_per_clip {rates}", not_negative=free)

    def seconds(self, node_clips: float, all_clips: float, node_gpus: int) -> dict[str, Value]:
        """Return the seconds that each part needs for one step; parts overlap, so the largest counts."""
        parts: dict[str, Value] = {
            "node_bandwidth": node_clips * np.asarray(self.bytes_per_clip) / self.node_bytes_per_second,
            "shared_bandwidth": all_clips * np.asarray(self.bytes_per_clip) / self.shared_bytes_per_second,
            "shared_requests": all_clips * np.asarray(self.requests_per_clip) / self.shared_requests_per_second,
            "latency": node_clips
            * np.asarray(self.requests_per_clip)
            * self.request_latency_seconds
            / self.requests_in_flight,
        }
        if self.cores_per_node or self.engines_per_gpu:
            rate = _times(self.cores_per_node, self.clips_per_core_second)
            rate = rate + _times(self.engines_per_gpu * node_gpus, self.clips_per_engine_second)
            parts["decode"] = node_clips / rate
        return parts


@dataclass(frozen=True)
class SyncSpec:
    """How replicas synchronise: ``ddp``, or ``kavg`` with K local steps between averages."""

    name: str
    k: int = 1

    def __post_init__(self) -> None:
        if self.name not in ("ddp", "kavg") or self.k < 1 or (self.name == "ddp" and self.k != 1):
            raise UsageError(f"unknown strategy {self}", hint="use ddp, or kavg:K with K of 1 or more")

    @classmethod
    def parse(cls, text: str) -> SyncSpec:
        """Parse a text such as ``ddp`` or ``kavg:8``."""
        name, _, k = text.partition(":")
        if k and not k.isdecimal():
            raise UsageError(f"strategy {text!r}: {k!r} is not a number of steps", hint="write kavg:8, for example")
        return cls(name, int(k) if k else 1)

    def __str__(self) -> str:
        return self.name if self.name == "ddp" else f"{self.name}:{self.k}"


@dataclass(frozen=True)
class ClusterModel:
    """All inputs of the scaling model except the number of GPUs and the strategy."""

    workload: Workload
    gradients: Gradients
    compute: Compute
    topology: Topology
    data: DataPath = DataPath()


@functools.cache
def expected_maximum(count: int) -> float:
    """Return the expected maximum of `count` independent standard normals: 0 for 1, 1.27 for 6, 3.36 for 1,536.

    It is the integral of 1 - F^n over x > 0 minus that of F^n over x < 0, where F is the normal distribution function.
    """
    if count == 1:
        return 0.0
    step = 0.001
    grid = np.arange(0.0, 9.0 + step, step)  # F is 0 or 1 to double precision beyond 9
    below = np.array([0.5 * math.erfc(x / math.sqrt(2.0)) for x in grid]) ** count
    above = 1.0 - np.array([0.5 * math.erfc(-x / math.sqrt(2.0)) for x in grid]) ** count
    tail = above - below
    return float(step * (tail.sum() - (tail[0] + tail[-1]) / 2))


def _times(count: int, rate: Value) -> Value:
    return count * np.asarray(rate) if count else np.asarray(0.0)  # 0 * inf would be NaN


@dataclass(frozen=True)
class StepPrediction:
    """The predicted parts of one step, in seconds: ``step = max(data, compute + wait + exposed)``."""

    data: Value
    compute: Value
    wait: Value
    communication: Value
    exposed: Value
    clips: int

    @property
    def seconds(self) -> Value:
        """Duration of the step."""
        return np.maximum(self.data, self.compute + self.wait + self.exposed)

    @property
    def data_stall(self) -> Value:
        """Time in which the GPU waits for clips."""
        return self.seconds - (self.compute + self.wait + self.exposed)

    @property
    def clips_per_second(self) -> Value:
        """Throughput of all GPUs."""
        return self.clips / np.asarray(self.seconds)

    def seconds_without(self, bottleneck: str) -> Value:
        """Return the duration of the step if one of the three bottlenecks were free."""
        if bottleneck == "data":
            return self.compute + self.wait + self.exposed
        if bottleneck == "communication":
            return np.maximum(self.data, self.compute + self.wait)
        assert bottleneck == "compute", bottleneck
        return np.maximum(self.data, self.communication)


def predict_step(cluster: ClusterModel, gpus: int, strategy: SyncSpec, algorithm: str = "auto") -> StepPrediction:
    """Predict one step on `gpus` GPUs."""
    clips, all_clips = cluster.workload.clips(gpus)
    node_gpus = min(gpus, cluster.topology.gpus_per_node)
    data: Value = 0.0
    for part in cluster.data.seconds(clips * node_gpus, all_clips, node_gpus).values():
        data = np.maximum(data, part)
    compute = cluster.compute.step_seconds(clips)
    wait = compute * cluster.compute.wait_fraction(gpus, strategy.k)
    if strategy.name == "ddp":
        communication, exposed = _overlapped(cluster, gpus, compute + wait, algorithm)
    else:
        round_seconds = all_reduce_seconds(gpus, cluster.gradients.averaged_bytes, cluster.topology, algorithm)
        communication = exposed = round_seconds / strategy.k
    return StepPrediction(data, compute, wait, communication, exposed, all_clips)


def train_seconds(cluster: ClusterModel, step: StepPrediction) -> Value:
    """Return the seconds of all epochs at the throughput of `step`."""
    return np.asarray(cluster.workload.clips_per_epoch) * cluster.workload.epochs / step.clips_per_second


def calibrate(cluster: ClusterModel, measured_seconds: Value, gpus: int, algorithm: str = "auto") -> ClusterModel:
    """Set the computation time so that the predicted ``ddp`` step on `gpus` GPUs equals a measured one.

    Each GPU has `compute.clips` clips. The measured step includes waiting and exposed communication; the rest is
    computation. The predicted step grows with `compute.seconds`, which is found by bisection.
    """
    target = np.asarray(measured_seconds, dtype=np.float64)
    low, high = np.zeros_like(target), target
    ddp = SyncSpec("ddp")
    workload = replace(cluster.workload, clips_per_gpu=cluster.compute.clips, global_batch=0)

    def step(seconds: Value) -> StepPrediction:
        compute = replace(cluster.compute, seconds=seconds)
        return predict_step(replace(cluster, workload=workload, compute=compute), gpus, ddp, algorithm)

    idle = step(low)
    if np.any(np.maximum(idle.data, idle.exposed) > target):
        raise UsageError(
            f"the measured step of {np.min(target):.4g} s on {gpus} GPUs is shorter than the predicted data path "
            f"({np.max(idle.data):.4g} s) or all-reduces ({np.max(idle.exposed):.4g} s)",
            hint="check the units and values of [data] and [topology]",
        )
    for _ in range(60):  # halves the interval to below one unit in the last place of a float
        middle = (low + high) / 2
        short = np.asarray(step(middle).seconds_without("data")) < target
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return replace(cluster, compute=replace(cluster.compute, seconds=(low + high) / 2))


def _overlapped(cluster: ClusterModel, gpus: int, busy: Value, algorithm: str) -> tuple[Value, Value]:
    """Return the seconds of all bucket all-reduces, and the seconds from the end of backward to the last one's end."""
    backward = np.asarray(busy) * cluster.compute.backward_fraction
    buckets = cluster.gradients.buckets()
    total = sum(buckets)
    filled, communication, finished = 0, np.asarray(0.0), np.asarray(0.0)
    for size in buckets:
        filled += size
        seconds = all_reduce_seconds(gpus, size, cluster.topology, algorithm)
        communication = communication + seconds
        finished = np.maximum(backward * (filled / total), finished) + seconds
    return communication, finished - backward
