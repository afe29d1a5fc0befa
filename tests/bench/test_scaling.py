"""Properties that the scaling model must have for all inputs."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.scaling.model import (
    ALGORITHMS,
    AllReducePoint,
    ClusterModel,
    Compute,
    DataPath,
    Gradients,
    NetworkLink,
    SyncSpec,
    Topology,
    Workload,
    all_reduce_seconds,
    calibrate,
    fit_link,
    predict_step,
    ring,
    train_seconds,
)
from fastvid.errors import UsageError

DDP = SyncSpec("ddp")
FREE = NetworkLink(math.inf, 0.0)
seconds = st.floats(1e-3, 10.0)
latency = st.floats(0.0, 1e-3)
bandwidth = st.floats(1e8, 1e12)
gpu_counts = st.integers(1, 10_000)
algorithms = st.sampled_from(sorted(ALGORITHMS))
sync = st.builds(lambda k: SyncSpec("kavg", k), st.integers(1, 64)) | st.just(DDP)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterModel:
    links = [NetworkLink(draw(bandwidth), draw(latency)) for _ in range(2)]
    data = DataPath(
        cores_per_node=draw(st.integers(0, 128)),
        clips_per_core_second=draw(st.floats(1.0, 1e3)),
        engines_per_gpu=draw(st.integers(0, 7)),
        clips_per_engine_second=draw(st.floats(1.0, 1e3)),
        bytes_per_clip=draw(st.floats(1e3, 1e6)),
        requests_per_clip=draw(st.floats(1.0, 8.0)),
        node_bytes_per_second=draw(bandwidth),
        shared_bytes_per_second=draw(bandwidth),
        shared_requests_per_second=draw(st.floats(1e3, 1e7)),
        request_latency_seconds=draw(st.floats(0.0, 0.1)),
        requests_in_flight=draw(st.integers(1, 1000)),
    )
    compute = Compute(
        seconds=draw(seconds),
        clips=draw(st.integers(1, 64)),
        fixed_seconds=draw(st.floats(0.0, 0.1)),
        backward_fraction=draw(st.floats(0.1, 1.0)),
        gpu_spread=draw(st.floats(0.0, 0.1)),
        step_jitter=draw(st.floats(0.0, 0.1)),
    )
    workload = Workload(1e5, 10, clips_per_gpu=draw(st.integers(1, 64)))
    gradients = Gradients(draw(st.integers(1, 10**9)))
    return ClusterModel(workload, gradients, compute, Topology(draw(st.integers(1, 16)), *links), data)


def at_least(big: object, small: object) -> bool:
    """Return whether big >= small up to rounding."""
    return bool(np.all(np.asarray(big) >= np.asarray(small) * (1 - 1e-9)))


@given(clusters(), gpu_counts, sync, algorithms, st.floats(1.0, 100.0))
def test_a_faster_part_never_makes_the_step_slower(cluster, gpus, strategy, algorithm, factor):
    before = predict_step(cluster, gpus, strategy, algorithm).seconds
    topology, data = cluster.topology, cluster.data
    faster = [
        replace(
            cluster, topology=replace(topology, **{end: replace(link, bytes_per_second=link.bytes_per_second * factor)})
        )
        for end, link in (("intra", topology.intra), ("inter", topology.inter))
    ]
    faster += [
        replace(cluster, data=replace(data, **{name: getattr(data, name) * factor}))
        for name in (
            "clips_per_core_second",
            "clips_per_engine_second",
            "node_bytes_per_second",
            "shared_bytes_per_second",
            "shared_requests_per_second",
        )
    ]
    faster += [
        replace(cluster, topology=replace(topology, inter=replace(topology.inter, latency_seconds=0.0))),
        replace(cluster, data=replace(data, request_latency_seconds=0.0)),
        replace(cluster, compute=replace(cluster.compute, seconds=cluster.compute.seconds / factor)),
        replace(cluster, compute=replace(cluster.compute, gpu_spread=0.0)),
    ]
    for other in faster:
        assert at_least(before, predict_step(other, gpus, strategy, algorithm).seconds)


@given(clusters(), gpu_counts, sync, algorithms)
def test_the_parts_add_up_to_the_step(cluster, gpus, strategy, algorithm):
    step = predict_step(cluster, gpus, strategy, algorithm)
    assert np.isclose(step.compute + step.wait + step.exposed + step.data_stall, step.seconds, rtol=1e-12)
    assert step.data_stall >= 0
    rounding = 1e-12 * step.seconds
    assert -rounding <= step.exposed <= step.communication + rounding
    for bottleneck in ("data", "communication", "compute"):
        assert at_least(step.seconds, step.seconds_without(bottleneck))


@given(clusters(), gpu_counts, sync, algorithms, st.sampled_from([1e-3, 60.0]), st.sampled_from([1e-6, 8.0]))
def test_results_do_not_depend_on_the_units_of_time_and_data(cluster, gpus, strategy, algorithm, second, byte):
    # Times in units of 1 / second, bytes read in units of 1 / byte: a formula that mixes units changes its result.
    # Gradient bytes are whole numbers, so their unit is tested on one all-reduce.
    def link(old: NetworkLink, byte: float) -> NetworkLink:
        return NetworkLink(old.bytes_per_second * byte / second, old.latency_seconds * second)

    data, compute, topology = cluster.data, cluster.compute, cluster.topology
    other = replace(
        cluster,
        compute=replace(compute, seconds=compute.seconds * second, fixed_seconds=compute.fixed_seconds * second),
        topology=Topology(topology.gpus_per_node, link(topology.intra, 1.0), link(topology.inter, 1.0)),
        data=replace(
            data,
            clips_per_core_second=data.clips_per_core_second / second,
            clips_per_engine_second=data.clips_per_engine_second / second,
            bytes_per_clip=data.bytes_per_clip * byte,
            node_bytes_per_second=data.node_bytes_per_second * byte / second,
            shared_bytes_per_second=data.shared_bytes_per_second * byte / second,
            shared_requests_per_second=data.shared_requests_per_second / second,
            request_latency_seconds=data.request_latency_seconds * second,
        ),
    )
    before, after = (predict_step(any_units, gpus, strategy, algorithm) for any_units in (cluster, other))
    assert np.isclose(after.seconds, before.seconds * second, rtol=1e-9)
    scaled = Topology(topology.gpus_per_node, link(topology.intra, byte), link(topology.inter, byte))
    assert np.isclose(
        all_reduce_seconds(gpus, 1e8 * byte, scaled, algorithm),
        all_reduce_seconds(gpus, 1e8, topology, algorithm) * second,
        rtol=1e-9,
    )


@given(st.integers(1, 10_000), st.integers(1, 16), bandwidth, bandwidth)
def test_a_ring_moves_two_n_minus_one_over_n_of_its_bytes(ranks, per_node, inside, between):
    topology = Topology(per_node, NetworkLink(inside), NetworkLink(between))
    used = [inside] * (ranks > topology.nodes(ranks)) + [between] * (topology.nodes(ranks) > 1)
    expected = 2 * (ranks - 1) / ranks * 1e9 / min(used, default=math.inf)
    assert np.isclose(ring(ranks, 1e9, topology), expected, rtol=1e-12)


def test_a_hierarchy_crosses_the_network_once_per_node_and_not_once_per_gpu():
    # 4 nodes of 8: inside, 2 * 7/8 of the bytes; between nodes, 2 * 3/4 of the bytes over the link that 8 GPUs share.
    topology = Topology(8, NetworkLink(8e9), NetworkLink(2e9))
    assert np.isclose(all_reduce_seconds(32, 1e9, topology, "hierarchical"), 2 * 7 / 8 / 8 + 2 * 3 / 4 / 2)


def test_all_buckets_except_the_last_overlap_the_backward_pass():
    # Backward takes 0.8 s; four buckets of 0.25 GB take 0.1 s each over 2 ranks, ready every 0.2 s.
    cluster = ClusterModel(
        Workload(1e5, 1, clips_per_gpu=8),
        Gradients(250_000_000, bucket_bytes=250_000_000, first_bucket_bytes=250_000_000),
        Compute(1.0, 8, backward_fraction=0.8),
        Topology(1, FREE, NetworkLink(2.5e9)),
    )
    step = predict_step(cluster, 2, DDP)
    assert np.isclose(step.communication, 0.4)
    assert np.isclose(step.exposed, 0.1)
    slow = replace(cluster, topology=Topology(1, FREE, NetworkLink(0.5e9)))  # 0.5 s each: they queue after the first
    assert np.isclose(predict_step(slow, 2, DDP).exposed, 0.2 + 4 * 0.5 - 0.8)


def test_gpus_share_their_nodes_resources_and_all_share_the_storage():
    # 3 nodes of 4 GPUs, 10 clips each: 40 clips a node, 120 in all; every part alone, in seconds.
    def data(**path: float) -> float:
        cluster = ClusterModel(
            Workload(1e5, 1, clips_per_gpu=10),
            Gradients(1),
            Compute(0.0, 10),
            Topology(4, FREE, FREE),
            DataPath(**path),
        )
        return float(predict_step(cluster, 12, DDP).data)

    assert np.isclose(data(cores_per_node=8, clips_per_core_second=5.0), 40 / 40)
    assert np.isclose(data(engines_per_gpu=7, clips_per_engine_second=2.0), 40 / (4 * 7 * 2))
    both = {"cores_per_node": 8, "clips_per_core_second": 5.0, "engines_per_gpu": 7, "clips_per_engine_second": 2.0}
    assert np.isclose(data(**both), 40 / (40 + 56))
    assert np.isclose(data(bytes_per_clip=1e6, node_bytes_per_second=1e7), 40 * 1e6 / 1e7)
    assert np.isclose(data(bytes_per_clip=1e6, shared_bytes_per_second=1e7), 120 * 1e6 / 1e7)
    assert np.isclose(data(requests_per_clip=2.0, shared_requests_per_second=60.0), 120 * 2 / 60)
    # Little's law: 32 reads in flight at 0.1 s each are 320 reads per second.
    assert np.isclose(data(requests_per_clip=2.0, request_latency_seconds=0.1, requests_in_flight=32), 40 * 2 / 320)
    # The parts overlap, so the slowest counts.
    assert np.isclose(data(bytes_per_clip=1e6, node_bytes_per_second=1e7, shared_bytes_per_second=1e7), 12.0)
    assert data() == 0.0


@given(clusters(), gpu_counts, algorithms)
@settings(max_examples=30)
def test_calibration_recovers_the_computation_time(cluster, gpus, algorithm):
    cluster = replace(cluster, data=DataPath(), workload=Workload(1e5, 1, clips_per_gpu=cluster.compute.clips))
    measured = predict_step(cluster, gpus, DDP, algorithm).seconds
    found = calibrate(cluster, measured, gpus, algorithm)
    assert np.isclose(predict_step(found, gpus, DDP, algorithm).seconds, measured, rtol=1e-9)
    assert np.isclose(found.compute.seconds, cluster.compute.seconds, rtol=1e-6)


@given(st.floats(1e8, 1e10), st.floats(0.0, 1e-4), st.integers(0, 2**32))
def test_fitting_recovers_a_link_from_its_all_reduces(rate, delay, seed):
    topology = Topology(1, FREE, NetworkLink(rate, delay))
    points = [
        AllReducePoint(ranks, size, float(ring(ranks, size, topology)))
        for ranks in (2, 4, 8)
        for size in (2**10, 2**16, 25 * 2**20)
    ]
    found = fit_link(points)
    refound = Topology(1, FREE, found)
    for point in points:
        assert np.isclose(ring(point.ranks, point.size, refound), point.seconds, rtol=1e-6)
    # Noise of 5 % moves the predictions by a few per cent, and never makes a latency negative.
    noise = np.random.default_rng(seed).uniform(0.95, 1.05, len(points))
    noisy = [replace(point, seconds=point.seconds * factor) for point, factor in zip(points, noise, strict=True)]
    link = fit_link(noisy)
    assert link.latency_seconds >= 0
    for point in points:
        assert abs(ring(point.ranks, point.size, Topology(1, FREE, link)) / point.seconds - 1) < 0.15


def test_a_fixed_global_batch_limits_the_number_of_gpus():
    workload = Workload(1e5, 1, global_batch=100)
    assert workload.clips(8) == (13, 100)
    with pytest.raises(UsageError, match="101 GPUs cannot share a global batch of 100"):
        workload.clips(101)
    cluster = ClusterModel(workload, Gradients(1000), Compute(1.0, 100, fixed_seconds=0.5), Topology(8, FREE, FREE))
    # Half of the step does not shrink, so 100 GPUs take 0.505 s instead of 0.01 s.
    assert np.isclose(predict_step(cluster, 100, DDP).compute, 0.5 + 0.5 / 100)
    assert np.isclose(train_seconds(cluster, predict_step(cluster, 100, DDP)), 1000 * 0.505)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workload(1, 1), "set exactly one of them above 0"),
        (lambda: Workload(1, 1, clips_per_gpu=1, global_batch=1), "set exactly one of them above 0"),
        (lambda: NetworkLink(0.0), "bytes_per_second is 0.0, must be above 0"),
        (lambda: NetworkLink(math.nan), "bytes_per_second is nan"),
        (lambda: NetworkLink(1.0, np.array([0.0, -1.0])), "latency_seconds is -1.0"),
        (lambda: Compute(1.0, 8, backward_fraction=1.5), "must be at most 1"),
        (lambda: SyncSpec.parse("kavg:zwei"), "'zwei' is not a number of steps"),
        (lambda: SyncSpec.parse("ddp:2"), "use ddp, or kavg:K"),
        (lambda: all_reduce_seconds(2, 1, Topology(1, FREE, FREE), "star"), "unknown all-reduce algorithm 'star'"),
    ],
)
def test_impossible_inputs_are_refused_with_their_value(make, message):
    with pytest.raises(UsageError, match=message):
        make()
