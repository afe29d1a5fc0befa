"""The decoder back-ends of a loader, their lanes, and the sinks that match their output."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from fastvid.decode.backends import Backend
from fastvid.decode.request import DevicePlanes, Levels, Planes, Rgb
from fastvid.errors import UsageError
from fastvid.format.planes import DepthScale
from fastvid.load.batch.canvas import DepthSink, DepthSpec, Finisher, FlowSink, FlowSpec, TransformStage
from fastvid.load.batch.sinks import (
    DevicePlanesSink,
    DeviceRgbSink,
    OpenSink,
    PlanesSink,
    RgbMemory,
    RgbSink,
    VideoSpec,
)
from fastvid.load.clips.clip import BatchRow, as_clips
from fastvid.load.memory import BufferPool, SharedBufferPool
from fastvid.load.options import Workers
from fastvid.load.workers import auto
from fastvid.load.workers.lanes import AUTO, Lanes, choose_backends, merge, on_device, open_lane, split_lanes
from fastvid.runtime.processes import World

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchShape:
    """Contents of a batch."""

    product: VideoSpec
    dtype: torch.dtype
    streams: tuple[str, ...]
    flow_stack: int
    views: bool  # whether each row is several clips of one sample
    clips_per_video: int  # neighbouring rows that show the same sample
    planned: bool
    stage: TransformStage | None = None
    depth: Mapping[str, DepthScale] = field(default_factory=dict)

    @property
    def depths(self) -> list[str]:
        """The streams of a sample that show depth."""
        return [stream for stream in self.streams if stream in self.depth]

    @property
    def numbers(self) -> torch.dtype:
        """Data type of flow and depth."""
        return self.dtype if self.dtype.is_floating_point else torch.float32

    @property
    def together(self) -> bool:
        """Whether neighbouring clips show the same sample."""
        return self.views or self.clips_per_video > 1


class ActiveBackends:
    """The back-ends in use, once chosen."""

    def __init__(
        self,
        shape: BatchShape,
        num_threads: int,
        workers: Workers,
    ) -> None:
        self.backend, self.chosen, self.join = AUTO, False, False
        self.lanes: list[Lanes] = []
        self.finisher: Finisher
        self._shape, self._num_threads = shape, num_threads
        self._workers = workers
        # As many free batches are kept for reuse.
        self._memory = SharedBufferPool(workers.prefetch + 1) if workers.kind == "process" else None
        # Of what belongs to a batch besides its video.
        self.pool = self._memory or BufferPool(workers.prefetch + 1)
        self._shared = False  # whether batches are in shared memory

    @property
    def decides(self) -> bool:
        """Whether worker processes can plan clips: each row, of a known shape, is decoded directly into its batch."""
        shape = self._shape
        known = shape.planned or shape.product.shape is not None
        return self._shared and not shape.together and shape.streams == ("rgb",) and known

    def use(self, chosen: Sequence[Backend]) -> None:
        """Use these back-ends from now on."""
        shape, name = self._shape, merge(chosen).name
        planes = all(Planes in one.load().outputs for one in chosen)
        if shape.depths and not all(Levels in one.load().outputs for one in chosen):
            raise UsageError(f"decoder {name!r} does not decode depth", hint="use 'pyav'")
        if "flow" in shape.streams and not planes:
            raise UsageError(f"decoder {name!r} does not write planes, which flow needs", hint="use 'pyav'")
        device = shape.product.stream.device
        if any(one.device != device.type for one in chosen if on_device(one)):
            raise UsageError(f"decoder {name!r} leaves frames on a GPU, but the loader's device is {str(device)!r}")
        for one in chosen if self._memory is not None else ():
            if on_device(one):
                raise UsageError(f"decoder {one.name!r} leaves frames on a GPU and cannot run in worker processes")
        self._shared = False
        sinks = [self._sinks(stream, chosen) for stream in shape.streams]
        self.finisher = Finisher(sinks, threads=self._num_threads, stream=shape.product.stream)
        self.join = shape.together and planes
        lanes = {
            one.name: Lanes(partial(open_lane, one, device, self._workers.clip_timeout, self._memory)) for one in chosen
        }
        self.lanes = [
            lanes[one.name] for one in split_lanes(chosen, self._num_threads, self._workers.device_lanes, device)
        ]
        self.backend = merge(chosen)

    def decide(self, rows: Sequence[BatchRow | None], world: World) -> None:
        """Measure and use the fastest back-ends, the same on all ranks; see `fastvid.load.workers.auto.agree`."""
        clips = [clip for clip in as_clips(rows) if clip is not None]
        # Decoding views one by one costs several times as much, so require planes to cut them from.
        needs_planes = self._shape.views or "flow" in self._shape.streams
        kinds: frozenset[type] = frozenset({Planes}) if needs_planes else frozenset()
        kinds |= {Levels} if self._shape.depths else frozenset()
        stream = self._shape.product.stream
        verdict = auto.agree(clips, world, stream, self._num_threads, kinds)
        _log.info("decoder %s: %s", verdict.name, verdict.reason)
        self.use(choose_backends(verdict.name, stream.device))
        self.chosen = True

    def restore(self, name: str) -> None:
        """Use the back-ends chosen in an earlier run if they are available; otherwise leave the choice open."""
        device = self._shape.product.stream.device
        if auto.check(name, device):
            self.use(choose_backends(name, device))
            self.chosen = True

    def close(self) -> None:
        """Close the decoders."""
        for lanes in self.lanes:
            lanes.close()

    def _sinks(self, stream: str, chosen: Sequence[Backend]) -> list[OpenSink]:
        if stream in self._shape.depth:
            return self._depth(self._shape.depth[stream])
        return self._flow() if stream == "flow" else self._rgb(chosen)

    def _depth(self, scale: DepthScale) -> list[OpenSink]:
        product = self._shape.product
        depth = DepthSpec(scale, product.shape, product.layout, self._shape.numbers, product.stream)
        return [partial(DepthSink, depth)]

    def _flow(self) -> list[OpenSink]:
        shape, product, numbers = self._shape, self._shape.product, self._shape.numbers
        flow = FlowSpec(product.shape, shape.flow_stack, product.layout, numbers, product.stream, product.channels_last)
        return [partial(FlowSink, flow)]

    def _rgb(self, chosen: Sequence[Backend]) -> list[OpenSink]:
        stage = self._shape.stage
        product = self._shape.product if stage is None else stage.decoded
        on_host = [one for one in chosen if not on_device(one)]
        sinks: list[OpenSink] = []
        if on_host:
            outputs = frozenset.intersection(*(frozenset(one.load().outputs) for one in on_host))
            # On the host, the decoder's thread converts fastest, from its cache. To a device planes are half the bytes
            # of RGB.
            if Planes in outputs and (product.stream.device.type != "cpu" or Rgb not in outputs):
                sinks.append(partial(PlanesSink, product))
            else:
                self._shared = self._memory is not None
                batches = self._memory or BufferPool(self._workers.prefetch + 1)
                threads = len(on_host) * self._num_threads
                sinks.append(partial(RgbSink, RgbMemory(product, batches, threads=threads)))
        written = [one.load().outputs for one in chosen if on_device(one)]
        if any(DevicePlanes in outputs for outputs in written):
            sinks.append(partial(DevicePlanesSink, product))
        if any(DevicePlanes not in outputs for outputs in written):
            sinks.append(partial(DeviceRgbSink, product))
        return sinks
