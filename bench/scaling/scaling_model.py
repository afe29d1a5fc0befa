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

Each number is one float or an array of draws of shape [S]. Units are in the names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bench.scaling.cluster import ClusterModel, SyncSpec
from bench.scaling.collectives import Value, all_reduce_seconds
from fastvid.errors import UsageError


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


def efficiency(cluster: ClusterModel, gpus: int, base_gpus: int, strategy: SyncSpec, algorithm: str = "auto") -> Value:
    """Return the clips/s per GPU on `gpus` GPUs relative to `base_gpus` GPUs, with the same strategy."""
    rates = [predict_step(cluster, n, strategy, algorithm).clips_per_second / n for n in (gpus, base_gpus)]
    return rates[0] / rates[1]


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
