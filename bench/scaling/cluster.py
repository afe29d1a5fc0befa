"""Inputs of the scaling model: workload, gradients, computation of one GPU, data path, strategy.

Each number is one float or an array of draws of shape [S]. Units are in the names.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from bench.scaling.collectives import Topology, Value, require_not_negative, require_positive
from fastvid.errors import UsageError

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
        require_positive("clips_per_epoch", self.clips_per_epoch)
        require_positive("epochs", self.epochs)
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
        for name in ("parameters", "bytes_per_parameter", "bucket_bytes", "first_bucket_bytes"):
            require_positive(name, getattr(self, name))
        require_positive("averaged_bytes_per_parameter", self.averaged_bytes_per_parameter)

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
        require_not_negative("compute seconds", self.seconds)
        require_positive("compute clips", self.clips)
        for name in ("fixed_seconds", "gpu_spread", "step_jitter"):
            require_not_negative(name, getattr(self, name))
        require_positive("backward_fraction", self.backward_fraction)
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
        for name in ("cores_per_node", "engines_per_gpu", "bytes_per_clip", "request_latency_seconds"):
            require_not_negative(name, getattr(self, name))
        for name in ("clips_per_core_second", "clips_per_engine_second", "requests_per_clip", "requests_in_flight"):
            require_positive(name, getattr(self, name))
        for name in ("node_bytes_per_second", "shared_bytes_per_second", "shared_requests_per_second"):
            require_positive(name, getattr(self, name))

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
