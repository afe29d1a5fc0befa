"""Positions to clips: all that is decided about a batch before a byte of it is read.

Pure functions of the dataset, the order, the sampler and the crop, so any thread, process or rank may make any batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fastvid.decode.backends import Backend
from fastvid.decode.request import ClipRequest
from fastvid.errors import FastvidError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.packets import StreamInfo
from fastvid.format.shard import Shard
from fastvid.load.augment import Spatial
from fastvid.load.batches import MASKED, Batches, Share
from fastvid.load.draws import Draws
from fastvid.load.joined import join_neighbours, merged
from fastvid.load.mixture import Mixture
from fastvid.load.sampling import Sampler
from fastvid.load.streams import IntArray, check_flow, flow_request, stack_frames
from fastvid.load.views import Views, check_views
from fastvid.load.visits import EpochOrder

MOST_FETCHERS: Final = 32
"""At 20 ms a request, 32 threads make 1,600 clips a second, more than 16 cores decode; 64 only cost switches."""


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """One stream of one row of a batch, decided.

    Attributes:
        row: Row in the batch; streams beside the first count on: row r of B is row B + r of the second stream.
        key: The sample's key.
        shard: Where the sample lies.
        shard_row: Its row there.
        info: Its stream.
        request: What is wanted of it.
        frames: Frames that the clip shows, int64 [T]; with views [V, T].
        parts: For clips that are decoded together, the clips that are cut out of this one.
        rows: Rows of the batch that fail when this one does; none stands for `row`.
        read: What is decoded for this clip when it is a part of another, None when it is decoded by itself.
    """

    row: int
    key: str
    shard: Shard
    shard_row: int
    info: StreamInfo
    request: ClipRequest
    frames: IntArray
    parts: tuple[Clip, ...] = ()
    rows: tuple[int, ...] = ()
    read: Clip | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One rank's part of a batch, decided.

    Attributes:
        share: Positions of the rows.
        samples: Number of the sample in each row, MASKED where there is none.
        keys: Key of each row's sample, empty where there is none.
        clips: Each row's clip, or None: masked, or not planned because of an error; of each stream, in order.
        errors: What kept a row from being planned, by row.
    """

    share: Share
    samples: list[int]
    keys: list[str]
    clips: list[Clip | None]
    errors: dict[int, Exception]


@dataclass(frozen=True)
class Planner:
    """Makes the plans of an epoch.

    Attributes:
        dataset: The samples.
        sampler: Which frames.
        spatial: Which crop and flip.
        order: Which samples when.
        backend: What will decode them; a codec that it does not know is refused here.
        streams: Which streams of a sample.
        flow_stack: Flows for each frame.
        views: Clips and crops of each sample; None for one clip, drawn at random or not as the sampler does.
        join: Decode neighbours that show one sample together.
    """

    dataset: Dataset | Mixture
    sampler: Sampler
    spatial: Spatial
    order: EpochOrder
    backend: Backend
    streams: tuple[str, ...] = ("rgb",)
    flow_stack: int = 1
    views: Views | None = None
    join: bool = False

    def plans(self, batches: Batches, position: int) -> Iterator[Plan]:
        """The plans of all batches from `position` to the end of the epoch, each made when it is asked for."""
        for number in range(batches.count(position)):
            yield self.plan(batches.share(position + number * batches.size))

    def plan(self, share: Share) -> Plan:
        """The plan of one rank's part of a batch."""
        present = share.positions != MASKED
        samples = np.full(len(share.positions), MASKED, dtype=np.int64)
        samples[present] = self.order.ids(share.positions[present])
        shards, rows = self.dataset.locate(samples[present])
        self._open(np.unique(shards).tolist())
        empty: list[Clip | None] = [None] * (len(samples) * len(self.streams))
        plan = Plan(share, samples.tolist(), [""] * len(samples), empty, {})
        for row, shard, shard_row in zip(np.flatnonzero(present).tolist(), shards.tolist(), rows.tolist(), strict=True):
            sample = plan.samples[row]
            plan.keys[row] = self.dataset.key(sample)
            try:
                clips = self._clips(row, sample, plan.keys[row], shard, shard_row, int(share.positions[row]))
                for number, clip in enumerate(clips):
                    at = row + number * len(samples)
                    plan.clips[at] = replace(clip, row=at)
            except Exception as error:  # noqa: BLE001 - belongs to this clip; the consumer decides
                place(error, self.dataset.shard_name(shard), plan.keys[row])
                plan.errors[row] = error
            # Lets decode threads have the interpreter between clips; unasked it would change hands every 5 ms only.
            time.sleep(0)
        if self.join:
            join_neighbours(plan.clips)
        return plan

    def _open(self, shards: list[int]) -> None:
        """Opens shards side by side where each costs a request; errors come again where the shard is used."""
        at_once = reads_at_once(self.dataset)
        closed = [index for index in shards if not self.dataset.is_open(index)] if at_once else []
        if len(closed) > 1:
            with ThreadPoolExecutor(min(at_once, len(closed)), thread_name_prefix="fastvid-open") as pool:
                for opened in [pool.submit(self.dataset.shard, index) for index in closed]:
                    opened.exception()

    def _clips(self, row: int, sample: int, key: str, shard_index: int, shard_row: int, position: int) -> list[Clip]:
        """One clip for each stream, of the same frames and the same crop."""
        shard = self.dataset.shard(shard_index)
        infos = {stream: self._info(shard, shard_row, stream) for stream in self.streams}
        picture, flow = infos.get("rgb"), infos.get("flow")
        if flow is not None:
            check_flow(flow, picture)
        info = infos[self.streams[0]]
        if self.views is not None:
            return [self._viewed(self.views, row, sample, key, shard, shard_row, info)]
        height = info.height // 2 if picture is None else picture.height
        draws = Draws(self.order.seed, self.order.epoch, position)
        view = self.spatial.draw(height, info.width, draws)
        frames = self.sampler.draw(info.num_frames, draws)
        clips = []
        for stream, found in infos.items():
            if stream == "flow":
                stacked = stack_frames(frames, found.num_frames, self.flow_stack)
                request = flow_request(sample, stacked, view.box, view.size, found, flip=view.flip)
            else:
                request = ClipRequest(sample, frames, view.box, view.size, view.flip)
            clips.append(Clip(row, key, shard, shard_row, found, request, frames))
        return clips

    def _viewed(
        self, views: Views, row: int, sample: int, key: str, shard: Shard, shard_row: int, info: StreamInfo
    ) -> Clip:
        """All views of a sample, to be decoded together."""
        first, size = row * views.num_views, self.spatial.crop.output
        frames = check_views(self.sampler, self.spatial).spread(info.num_frames, views.num_clips)
        cuts = views.cuts(self.spatial, info.height, info.width)
        requests = [ClipRequest(sample, shown, cut.box, size, cut.flip) for shown in frames for cut in cuts]
        parts = [
            Clip(first + number, key, shard, shard_row, info, request, request.frames)
            for number, request in enumerate(requests)
        ]
        shown = np.repeat(frames, len(cuts), axis=0)
        return replace(parts[0], row=row, frames=shown, read=merged(parts, row, [row]))

    def _info(self, shard: Shard, shard_row: int, stream: str) -> StreamInfo:
        info = shard.info(shard_row, stream)
        if info.codec not in self.backend.codecs:
            known = ", ".join(sorted(codec.label for codec in self.backend.codecs))
            raise UsageError(
                f"decoder {self.backend.name!r} does not decode {info.codec.label}", hint=f"it decodes {known}"
            )
        return info


def reads_at_once(dataset: Dataset | Mixture, asked: int | None = None) -> int:
    """Threads that should read ahead from a dataset's storage; 0 where a reader may as well wait for each read."""
    if asked is not None:
        return asked
    sets = dataset.datasets if isinstance(dataset, Mixture) else (dataset,)
    at_once = max(part.storage.concurrency for part in sets)
    return 0 if at_once == 1 else min(at_once, MOST_FETCHERS)


def place(error: Exception, shard: str, key: str) -> None:
    """Tells an error which clip it is about."""
    if isinstance(error, FastvidError):
        error.at(shard=shard, key=key)
    else:
        error.add_note(f"while loading {key} of {shard}")
