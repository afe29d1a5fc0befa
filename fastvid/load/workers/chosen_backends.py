"""What serves a loader's clips: the back-ends, their lanes, and who makes batches of what they write."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fastvid.decode.backends import Backend
from fastvid.decode.request import Planes, Rgb
from fastvid.errors import UsageError
from fastvid.load.batch.canvas import Finisher
from fastvid.load.batch.flow import FlowSink, FlowSpec
from fastvid.load.batch.sinks import DeviceSink, OpenSink, PlanesSink, RgbMemory, RgbSink, VideoSpec
from fastvid.load.clips.clip import Row, decided
from fastvid.load.memory.buffers import BufferPool, SharedBufferPool
from fastvid.load.workers import auto
from fastvid.load.workers.lanes import AUTO, Lanes, choose_backends, merge, on_device, open_lane, split_lanes
from fastvid.runtime.world import World

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchShape:
    """What a batch consists of.

    Attributes:
        product: A clip's tensor.
        dtype: Of its values, for optical flow.
        streams: The streams of each sample.
        flow_stack: Flow pictures of each frame.
        views: Whether each row is several clips of one sample.
        repeats: Whether neighbouring rows show one sample.
    """

    product: VideoSpec
    dtype: torch.dtype
    streams: tuple[str, ...]
    flow_stack: int
    views: bool
    repeats: bool

    @property
    def together(self) -> bool:
        """Whether neighbouring clips show one sample."""
        return self.views or self.repeats


class Served:
    """Back-ends in use, once they are known.

    Args:
        shape: What a batch consists of.
        num_threads: Threads that decode on the CPU.
        prefetch: Batches made ahead.
        device_lanes: Lanes of each back-end that decodes on a GPU; by default as many as suit the device.
        clip_timeout: Seconds after which a worker process that gets nowhere is killed; None decodes in this process.

    Attributes:
        backend: Those in use as one; `AUTO` before any is.
        chosen: Whether they were chosen by trying.
        join: Whether clips that show one sample are cut out of planes that are decoded once.
        lanes: Where each decode thread takes what makes its clips.
        finisher: Makes the batches' memory.
    """

    def __init__(
        self,
        shape: BatchShape,
        num_threads: int,
        prefetch: int,
        device_lanes: int | None,
        clip_timeout: float | None = None,
    ) -> None:
        self.backend, self.chosen, self.join = AUTO, False, False
        self.lanes: list[Lanes] = []
        self.finisher: Finisher
        self._shape, self._num_threads = shape, num_threads
        self._prefetch, self._device_lanes, self._clip_timeout = prefetch, device_lanes, clip_timeout or 0.0
        # Free batches that are kept for later ones.
        self._memory = None if clip_timeout is None else SharedBufferPool(prefetch + 1)
        self._shared = False  # whether batches lie there

    @property
    def decides(self) -> bool:
        """Whether worker processes can decide clips: each row is decoded by itself, and into its batch."""
        return self._shared and not self._shape.together and self._shape.streams == ("rgb",)

    def use(self, chosen: Sequence[Backend]) -> None:
        """Takes these back-ends from now on.

        Raises:
            UsageError: They do not write what a batch needs.
        """
        shape, name = self._shape, merge(chosen).name
        planes = all(Planes in one.load().outputs for one in chosen)
        if "flow" in shape.streams and not planes:
            raise UsageError(f"decoder {name!r} gives no planes in which flow lies", hint="use 'pyav'")
        device = shape.product.device
        if any(one.device != device.type for one in chosen if on_device(one)):
            raise UsageError(f"decoder {name!r} leaves frames on a GPU, the loader's device is {str(device)!r}")
        for one in chosen if self._memory is not None else ():
            if on_device(one):
                raise UsageError(f"decoder {one.name!r} leaves frames on a GPU and cannot run in worker processes")
        self._shared = False
        sinks = [self._flow() if stream == "flow" else self._rgb(chosen) for stream in shape.streams]
        self.finisher = Finisher(sinks, threads=self._num_threads)
        self.join = shape.together and planes
        lanes = {one.name: Lanes(partial(open_lane, one, self._clip_timeout, self._memory)) for one in chosen}
        self.lanes = [lanes[one.name] for one in split_lanes(chosen, self._num_threads, self._device_lanes)]
        self.backend = merge(chosen)

    def decide(self, rows: Sequence[Row | None], world: World) -> None:
        """Takes what decodes these clips fastest; all ranks take the same. See `fastvid.load.workers.auto.agree`."""
        clips = [clip for clip in decided(rows) if clip is not None]
        # Views can be decoded one by one, but cost several times as much then.
        needs_planes = self._shape.views or "flow" in self._shape.streams
        kinds: frozenset[type] = frozenset({Planes}) if needs_planes else frozenset()
        verdict = auto.agree(clips, world, self._shape.product.device, self._num_threads, kinds)
        _log.info("decoder %s: %s", verdict.name, verdict.reason)
        self.use(choose_backends(verdict.name))
        self.chosen = True

    def restore(self, name: str) -> None:
        """Takes the back-ends that were chosen before, where they run here; otherwise they are chosen again."""
        if auto.check(name):
            self.use(choose_backends(name))
            self.chosen = True

    def close(self) -> None:
        """Closes the decoders."""
        for lanes in self.lanes:
            lanes.close()

    def _flow(self) -> list[OpenSink]:
        shape, product = self._shape, self._shape.product
        numbers = shape.dtype if shape.dtype.is_floating_point else torch.float32
        layout, device = product.layout, product.device
        flow = FlowSpec(product.num_frames, shape.flow_stack, product.size, layout, numbers, device)
        return [partial(FlowSink, flow)]

    def _rgb(self, chosen: Sequence[Backend]) -> list[OpenSink]:
        product = self._shape.product
        on_host = [one for one in chosen if not on_device(one)]
        sinks: list[OpenSink] = []
        if on_host:
            outputs = frozenset.intersection(*(frozenset(one.load().outputs) for one in on_host))
            # On the host the decoder's thread converts best, from its cache; a device converts planes faster than it
            # would receive RGB.
            if Planes in outputs and (product.device.type != "cpu" or Rgb not in outputs):
                sinks.append(partial(PlanesSink, product))
            else:
                self._shared = self._memory is not None
                batches = self._memory or BufferPool(self._prefetch + 1)
                threads = len(on_host) * self._num_threads
                sinks.append(partial(RgbSink, RgbMemory(product, batches, threads=threads)))
        if len(on_host) < len(chosen):
            sinks.append(partial(DeviceSink, product))
        return sinks
