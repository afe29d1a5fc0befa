"""The decoder back-ends of a loader, their lanes, and the sinks that match their output.

A lane is a decoder, or a worker process with one, that one thread uses at a time: a CPU back-end has one per thread, a
GPU back-end as many as suit the device. A sink is the memory of a batch that decoders write one stream's frames to.
All lanes take clips from one queue in order, so several back-ends decode the same frames in the same order as one;
colours differ within the tolerance that each back-end states.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Final

import torch

from fastvid.decode.backends import Backend, backend
from fastvid.decode.request import Decoder, DevicePlanes, DeviceRgb, Levels, Planes, Rgb
from fastvid.errors import FastvidError, MissingDependency, UsageError
from fastvid.format.schema import FLOW, Codec
from fastvid.load.batch.assemble import Assembler
from fastvid.load.batch.canvas import (
    CanvasMemory,
    DepthSink,
    DevicePlanesSink,
    DeviceRgbSink,
    FlowSink,
    OpenSink,
    PlanesSink,
    RgbSink,
)
from fastvid.load.batch.spec import Spec, VideoSpec
from fastvid.load.device import LoaderStream
from fastvid.load.memory import BufferPool, SharedBufferPool
from fastvid.load.options import Workers
from fastvid.load.order.mixture import parts_of
from fastvid.load.workers.clip_worker import ClipWorker, Lanes
from fastvid.load.workers.processes import ProcessLane
from fastvid.runtime.processes import available_cores

_log = logging.getLogger(__name__)

Lane = ClipWorker | ProcessLane
"""Makes clips, for one decode thread at a time."""

_ON_DEVICE: Final = frozenset({DevicePlanes, DeviceRgb})

_DEFAULT: Final = "pyav"
"""Decodes every codec on every machine."""

_NVDEC: Final = frozenset({Codec.H264, Codec.HEVC, Codec.VP9, Codec.AV1})
"""Codecs that ``decoder="auto"`` decodes by "nvdec" for batches on a GPU."""


def choose_backends(decoder: str | Backend, spec: Spec, device: torch.device) -> tuple[Backend, ...]:
    """Return the back-ends that `decoder` names; "+" joins several, for example "pyav+dali-gpu".

    Raises MissingDependency if one cannot run here, on the GPU of `device` if it needs one.
    """
    if decoder == "auto":
        decoder = _automatic(spec, device)
    chosen = (decoder,) if isinstance(decoder, Backend) else tuple(backend(name) for name in decoder.split("+"))
    if len({one.name for one in chosen}) < len(chosen):
        raise UsageError(f"decoder {decoder!r} names a back-end twice")
    for one in chosen:
        reason = one.why_unavailable(device.index)
        if reason is not None:
            raise MissingDependency(reason)
    return chosen


def _automatic(spec: Spec, device: torch.device) -> str:
    rules = spec.rules
    # Views are cut out of planes on the host, and depth and flow are decoded there.
    if device.type != "cuda" or rules.views or rules.depth or FLOW in rules.streams:
        return _DEFAULT
    try:
        firsts = [part.shard(0) for part in parts_of(spec.dataset)]
        codecs = {shard.info(0, stream).codec for shard in firsts for stream in rules.streams}
    except FastvidError:  # the shard cannot be read: the error is raised when its clips are read
        return _DEFAULT
    if not codecs <= _NVDEC:
        return _DEFAULT
    reason = backend("nvdec").why_unavailable(device.index)
    if reason is not None:
        _log.info("decoder %s instead of nvdec: %s", _DEFAULT, reason)
    return "nvdec" if reason is None else _DEFAULT


def merge(chosen: Sequence[Backend]) -> Backend:
    """Combine back-ends into one that supports the codecs common to all; it is used only as a description."""
    if len(chosen) == 1:
        return chosen[0]
    name, install = "+".join(one.name for one in chosen), " ".join(one.install for one in chosen)
    codecs = frozenset.intersection(*(one.codecs for one in chosen))
    return Backend(name, "", chosen[-1].device, codecs, install)


def on_device(one: Backend) -> bool:
    """Return whether a back-end leaves its decoded frames in GPU memory."""
    return not _ON_DEVICE.isdisjoint(one.load().outputs)


class Decoders:
    """What makes the batches of a `Spec`: its back-ends with a lane for each thread, their sinks, and the assembler.

    `together`: whether neighbouring clips may show the same sample; its packets are then decoded once for all of them.
    """

    def __init__(
        self, spec: Spec, stream: LoaderStream, chosen: Sequence[Backend], workers: Workers, together: bool
    ) -> None:
        self._spec, self._workers = spec, workers
        self._video = video = VideoSpec.of(spec, stream)
        num_threads = workers.num_threads or available_cores()
        self.backend, self.assembler = merge(chosen), Assembler(spec, video)
        device, name = stream.device, self.backend.name
        outputs = frozenset.intersection(*(frozenset(one.load().outputs) for one in chosen))
        if spec.rules.depth and Levels not in outputs:
            raise UsageError(f"decoder {name!r} does not decode depth", hint="use 'pyav'")
        if FLOW in spec.rules.streams and Planes not in outputs:
            raise UsageError(f"decoder {name!r} does not write planes, which flow needs", hint="use 'pyav'")
        if any(one.device != device.type for one in chosen if on_device(one)):
            raise UsageError(f"decoder {name!r} leaves frames on a GPU, but the loader's device is {str(device)!r}")
        for one in chosen if workers.kind == "process" else ():
            if on_device(one):
                raise UsageError(f"decoder {one.name!r} leaves frames on a GPU and cannot run in worker processes")
        # Keep as many free buffers for reuse as batches are in memory at a time.
        self._shared = SharedBufferPool(workers.prefetch + 1) if workers.kind == "process" else None
        pool = self._shared or BufferPool(workers.prefetch + 1)  # for the parts of a batch other than its video
        sinks = [self._sinks(stream, chosen) for stream in spec.rules.streams]
        self.memory = CanvasMemory(sinks, stream, pool, BufferPool(num_threads))
        self.join = together and Planes in outputs
        on_cpu = sum(not on_device(one) for one in chosen)
        self.lanes: list[Lanes] = []  # of each decode thread
        for one in chosen:
            if on_device(one):
                lanes = workers.device_lanes or one.lanes(num_threads, device.index)
            else:
                lanes = max(1, num_threads // on_cpu)
            self.lanes += [Lanes(partial(self._open_lane, one))] * lanes

    def close(self) -> None:
        """Close the decoders."""
        for lanes in self.lanes:
            lanes.close()

    def _open_lane(self, one: Backend) -> Lane:
        """Open a lane with its own decoder, in the thread that uses it."""
        if self._shared is not None:
            return ProcessLane(one, self._workers.clip_timeout, self._shared)
        # Pass the loader's GPU: a new thread's current device is GPU 0.
        index = self._video.stream.device.index
        decoder: Decoder = one.open(device_id=index) if one.device == "cuda" else one.open()
        return ClipWorker(decoder)

    def _sinks(self, stream: str, chosen: Sequence[Backend]) -> list[OpenSink]:
        rules, video = self._spec.rules, replace(self._video, collate="stack")  # of measurements
        if stream in rules.depth:
            distances = torch.from_numpy(rules.depth[stream].millimetres())
            return [partial(DepthSink, video, table=cache(partial(distances.to, video.stream.device)))]
        if stream == FLOW:
            return [partial(FlowSink, video)]
        return self._rgb(chosen)

    def _rgb(self, chosen: Sequence[Backend]) -> list[OpenSink]:
        stage, video = self.assembler.stage, self._video
        if stage is not None:
            video = stage.decoded
        on_host = [frozenset(one.load().outputs) for one in chosen if not on_device(one)]
        sinks: list[OpenSink] = []
        if on_host:
            outputs = frozenset.intersection(*on_host)
            # For a CPU batch, the decoder's thread converts to RGB fastest, while the planes are in its cache. For a
            # GPU, planes are copied, because they have half the bytes of RGB.
            if Planes in outputs and (video.stream.device.type != "cpu" or Rgb not in outputs):
                sinks.append(partial(PlanesSink, video))
            else:
                sinks.append(partial(RgbSink, video, batches=self._shared or BufferPool(self._workers.prefetch + 1)))
        written = [one.load().outputs for one in chosen if on_device(one)]
        if any(DevicePlanes in outputs for outputs in written):
            sinks.append(partial(DevicePlanesSink, video))
        if any(DevicePlanes not in outputs for outputs in written):
            sinks.append(partial(DeviceRgbSink, video))
        return sinks
