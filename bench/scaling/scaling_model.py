"""The scaling model: clips per second, efficiency and time to train on n GPUs, predicted from measured parts. No torch.

One synchronous step on n GPUs takes

    step = max(data, compute + wait + exposed)

- ``data``: what the loader needs for the step's clips, running ahead in the background: the slowest of decoding,
  bandwidth of a node, bandwidth and request rate of the storage that all nodes share, and request latency.
- ``compute``: forward, backward and update of the average GPU.
- ``wait``: for the slowest of n GPUs. Step times are taken as normal with a relative standard deviation of
  sqrt(gpu_spread^2 + step_jitter^2 / K): a difference between GPUs that lasts the whole run, and one that is drawn
  anew at every step and so averages out over the K local steps of K-AVG. The expected maximum of n is exact.
- ``exposed``: communication that no computation hides. ``ddp`` all-reduces gradient buckets one after the other, each
  once it is ready, gradient bytes appearing evenly over the backward pass. ``kavg`` averages all parameters every K
  steps with nothing to hide behind, so its step costs 1/K of that all-reduce.

What the model leaves out: partial last batches, start-up, evaluation and checkpoints, gradient traffic that slows
storage traffic on the same wire, GPU memory, and accuracy, which large batches and large K can cost.

Every number may be one float or an array of draws of shape [S]. Units are in the names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bench.scaling.cluster import Cluster, Strategy
from bench.scaling.collectives import Value, all_reduce_seconds
from fastvid.errors import UsageError


@dataclass(frozen=True)
class Step:
    """One step, split. ``step = max(data, compute + wait + exposed)``; all in seconds.

    Args:
        data: Loader time of a step; `data_stall` is what of it the other parts do not hide.
        compute: The average GPU's computation.
        wait: For the slowest GPU.
        communication: All-reduces of a step, hidden or not.
        exposed: The part of it that nothing hides.
        clips: Clips of all GPUs per step.
    """

    data: Value
    compute: Value
    wait: Value
    communication: Value
    exposed: Value
    clips: int

    @property
    def seconds(self) -> Value:
        """The step."""
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
        """The step if one of the three bottlenecks cost nothing.

        Args:
            bottleneck: ``data``, ``communication`` or ``compute``. Without computation nothing hides communication.
        """
        if bottleneck == "data":
            return self.compute + self.wait + self.exposed
        if bottleneck == "communication":
            return np.maximum(self.data, self.compute + self.wait)
        assert bottleneck == "compute", bottleneck
        return np.maximum(self.data, self.communication)


def predict_step(cluster: Cluster, gpus: int, strategy: Strategy, algorithm: str = "auto") -> Step:
    """One step on `gpus` GPUs.

    Args:
        cluster: The inputs.
        gpus: Number of GPUs, >= 1; nodes are filled one after the other.
        strategy: ``ddp`` or ``kavg``.
        algorithm: All-reduce algorithm, a name of `bench.scaling.collectives.ALGORITHMS`.
    """
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
    return Step(data, compute, wait, communication, exposed, all_clips)


def train_seconds(cluster: Cluster, step: Step) -> Value:
    """Seconds of all epochs at the throughput of `step`."""
    return np.asarray(cluster.workload.clips_per_epoch) * cluster.workload.epochs / step.clips_per_second


def efficiency(cluster: Cluster, gpus: int, base_gpus: int, strategy: Strategy, algorithm: str = "auto") -> Value:
    """Clips per second and GPU on `gpus` GPUs relative to `base_gpus` GPUs, both with the same strategy."""
    rates = [predict_step(cluster, n, strategy, algorithm).clips_per_second / n for n in (gpus, base_gpus)]
    return rates[0] / rates[1]


def calibrate(cluster: Cluster, measured_seconds: Value, gpus: int, algorithm: str = "auto") -> Cluster:
    """The cluster whose predicted ``ddp`` step of `compute.clips` clips on each of `gpus` GPUs equals a measured one.

    The step includes waiting and exposed communication on those GPUs, so the computation is what is left. The step
    grows with `compute.seconds`, which is found by bisection.

    Raises:
        UsageError: The measured step is shorter than its data path or its communication alone.
    """
    target = np.asarray(measured_seconds, dtype=np.float64)
    low, high = np.zeros_like(target), target
    ddp = Strategy("ddp")
    workload = replace(cluster.workload, clips_per_gpu=cluster.compute.clips, global_batch=0)

    def step(seconds: Value) -> Step:
        compute = replace(cluster.compute, seconds=seconds)
        return predict_step(replace(cluster, workload=workload, compute=compute), gpus, ddp, algorithm)

    idle = step(low)
    if np.any(np.maximum(idle.data, idle.exposed) > target):
        raise UsageError(
            f"a step of {np.min(target):.4g} s on {gpus} GPUs is shorter than its data path "
            f"({np.max(idle.data):.4g} s) or its all-reduces ({np.max(idle.exposed):.4g} s) by the other inputs"
        )
    for _ in range(60):  # halves the interval to below one unit in the last place of a float
        middle = (low + high) / 2
        short = np.asarray(step(middle).seconds_without("data")) < target
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return replace(cluster, compute=replace(cluster.compute, seconds=(low + high) / 2))


def _overlapped(cluster: Cluster, gpus: int, busy: Value, algorithm: str) -> tuple[Value, Value]:
    """Seconds of all bucket all-reduces, and seconds by which the last one outlasts a backward pass within `busy`."""
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
