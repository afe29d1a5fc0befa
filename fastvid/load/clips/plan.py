"""Plans: which frames, crop and flip each row of a batch gets, decided before anything is read.

A plan is a pure function of the dataset, the order, the rules, the seed and the epoch, so any thread or rank can
compute any batch. Its frames and crops are arrays, of which a clip is a row.

Clips of one video (evaluation views, repeated augmentation) are decoded together, so that a packet which several need
is decoded once. The decoder writes planes of all requested frames in the bounding box of all crops; the same thread
then cuts each clip out of them into that clip's own row.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple, cast

import numpy as np

from fastvid.decode.backends import Backend
from fastvid.decode.pyav import can_cut
from fastvid.decode.request import Box, ClipRequest
from fastvid.decode.sound import Audio, AudioWindow, EncodedAudio, decode_audio, fetch_audio
from fastvid.errors import FastvidError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import FLOW, PICTURES
from fastvid.format.shard import Shard
from fastvid.load.clips.clip import ClipRules, SampleAnnotations, check_lengths, stack_frames
from fastvid.load.clips.crops import Spatial
from fastvid.load.clips.sampling import BatchSampler, Clips, Sampler, VideoInfo, Videos, is_own, with_length
from fastvid.load.clips.views import ONE_VIEW, Views
from fastvid.load.order.buckets import ClipSizes, Planned, PlannedEpoch
from fastvid.load.order.draws import BatchDraws
from fastvid.load.order.epoch import MASKED, Batches, ClipShape, EpochOrder, EpochOrders, EveryFrame, Share
from fastvid.load.order.mixture import Mixture, parts_of
from fastvid.runtime.arrays import BoolArray, Float32Array, FloatArray, IntArray

_LARGEST_DENOMINATOR: Final = 100_000
"""Largest denominator of exact frame rates, see `fastvid.format.mp4.frame_rate`; small enough that an exact rate can be
recovered from the float64 in the annotations."""

_ROWS_AHEAD: Final = 256
"""Rows whose samples are looked up in one call."""

MOST_FETCHERS: Final = 32
"""At 20 ms a request, 32 threads fetch 1,600 clips a second, more than 16 cores decode; 64 add context switches."""


class ClipPlace(NamedTuple):
    """The shard, row and stream from which the packets of a clip are read."""

    shard: Shard
    row: int  # of the sample in the shard
    stream: str
    key: str
    info: StreamInfo | None = None  # facts about the stream; None if they were not read yet

    def locate(self, error: Exception) -> None:
        """Add the clip's shard and key to an error."""
        add_location(error, self.shard.stem, self.key)


class Plan:
    """One rank's share of a batch: S streams of B rows with V views each.

    Canvas row c is view c % V of row c // V % B of stream c // V // B. The frames of all streams are the same.
    """

    def __init__(self, rules: ClipRules, share: Share, draws: BatchDraws, samples: IntArray) -> None:
        rows, views = len(samples), rules.num_views
        clips = rows * views
        self.rules, self.share, self.views = rules, share, views
        # The random numbers of each row, and the number of its sample, int64 [B]; MASKED for an empty row.
        self.draws, self.samples = draws, samples
        # bool [B]; False for an empty row, and for one that could not be planned.
        self.valid: BoolArray = samples != MASKED
        self.keys = [""] * rows  # key of each row's sample; "" for an empty row
        # The shard of each row's sample, its row there, and its streams.
        self.shards: list[Shard | None] = [None] * rows
        self.shard_rows, self.infos = [0] * rows, [cast("tuple[StreamInfo, ...]", ())] * rows
        # Exact frames per second of each row's video as numerator and denominator, int64 [B, 2], and the height and
        # width of each stream in pixels, int64 [S, B, 2]; -1 for an empty row, and if its shard cannot be read.
        self.rates = np.full((rows, 2), -1, dtype=np.int64)
        self.sizes = np.full((len(rules.streams), rows, 2), -1, dtype=np.int64)
        # What each canvas row shows of its video, int64 [S * B * V, 7], see `Spatial.cuts`.
        self.cuts: IntArray = np.zeros((len(rules.streams) * clips, 7), dtype=np.int64)
        # Frames that clips show, int64 [B * V, T], -1 after the end of a shorter clip; and how many they are, int64
        # [B * V], 0 for a clip of a row that is not valid.
        self.frames: IntArray = np.zeros((clips, 1), dtype=np.int64)
        self.lengths: IntArray = np.zeros(clips, dtype=np.int64)
        self.reads: dict[int, int] = {}  # canvas rows that are decoded together: the first, and one past the last
        self.errors: dict[int, Exception] = {}  # planning errors, by canvas row
        self.windows: dict[int, AudioWindow] = {}  # the sound of each row
        self.sound_samples = 0  # samples of the longest sound of the global batch; 0 without sound

    @property
    def num_frames(self) -> int | None:
        """Frames of every clip of the batch, padded ones included; None if that depends on the clips."""
        return self.share.shape[0] if self.share.shape else self.rules.num_frames

    def place(self, number: int) -> ClipPlace:
        """Return where the packets of a canvas row are."""
        stream, clip = divmod(number, len(self.lengths))
        row = clip // self.views
        shard = self.shards[row]
        assert shard is not None
        return ClipPlace(
            shard, self.shard_rows[row], self.rules.streams[stream], self.keys[row], self.infos[row][stream]
        )

    def info(self, number: int) -> StreamInfo:
        """Return the facts about the stream of a canvas row."""
        stream, clip = divmod(number, len(self.lengths))
        return self.infos[clip // self.views][stream]

    def part(self, number: int) -> ClipRequest:
        """Return the frames, crop and flip of a canvas row; for flow one tall crop of both halves, x above y."""
        stream, clip = divmod(number, len(self.lengths))
        rules, row, name = self.rules, clip // self.views, self.rules.streams[stream]
        frames = self.frames[clip, : self.lengths[clip]]
        if name == FLOW:
            frames = stack_frames(frames, self.infos[row][stream].num_frames, rules.flow_stack)
        y, x, height, width, high, wide, flip = self.cuts[number].tolist()
        box, size = Box(y, x, height, width), (high, wide)
        return ClipRequest(int(self.samples[row]), frames, box, size, bool(flip), name, name in rules.depth)

    def request(self, number: int) -> ClipRequest:
        """Return what to decode for a canvas row and those that are decoded together with it."""
        rows = range(number, self.reads[number])
        first = self.part(number)
        if len(rows) == 1:
            return first
        boxes = self.cuts[rows.start : rows.stop, :4]
        y, x = boxes[:, :2].min(axis=0).tolist()
        bottom, right = (boxes[:, :2] + boxes[:, 2:]).max(axis=0).tolist()
        size = (bottom - y, right - x)
        frames = np.unique(np.concatenate([self.part(row).frames for row in rows]))
        return replace(first, frames=frames, box=Box(y, x, *size), size=size, flip=False)

    def shapes(self, stream: int) -> IntArray:
        """Return frames, height and width of the clips of a stream, int64 [B * V, 3]; zeros for a masked one."""
        count = len(self.lengths)
        return np.column_stack([self.lengths, self.cuts[stream * count : (stream + 1) * count, 4:6]])

    def row_of(self, number: int) -> int:
        """Return the row of the batch to which a canvas row belongs, and which fails if that does."""
        return number // self.views % len(self.samples)

    @property
    def seconds(self) -> FloatArray:
        """Time at which each frame is shown in its video, in seconds, float64 [B * V, T]; -1 where there is none."""
        numerators, denominators = np.repeat(self.rates, self.views, axis=0).T[..., None]
        found: FloatArray = self.frames * denominators / numerators
        for row in np.flatnonzero(self.valid).tolist():
            info, some = self.infos[row][self.rules.main], slice(row * self.views, (row + 1) * self.views)
            if info.times is not None:
                found[some] = info.seconds(self.frames[some])
        found[(self.frames < 0) | ~np.repeat(self.valid, self.views)[:, None]] = -1.0
        return found


@dataclass(slots=True, eq=False)
class SoundTask:
    """The sound of one row of a batch, to be read and decoded."""

    window: AudioWindow  # which samples of the sound
    data: Float32Array  # where to write them, float32 [C, S] with S at least that of the window; zeros at first
    mask: BoolArray  # where to write which samples were decoded, bool [S]; False at first
    packets: EncodedAudio | None = None  # None if it is not read yet, or if its sample has no audio
    is_read: bool = False

    def read(self, place: ClipPlace) -> None:
        """Read and check the packets."""
        if not self.is_read:
            self.packets = fetch_audio(place.shard, place.row, self.window, key=place.key)
            self.is_read = True

    def decode(self) -> None:
        """Decode and write the sound."""
        if self.packets is not None:
            clip = decode_audio(self.packets, self.window)
            self.data[:, : self.window.count] = clip.data
            self.mask[: self.window.count] = clip.mask


@dataclass(frozen=True)
class Planner:
    """Computes the plans of an epoch."""

    dataset: Dataset | Mixture  # the samples
    rules: ClipRules  # choose the frames, crop and flip
    order: EpochOrder  # order of the samples; its seed and epoch are those of the random numbers
    backend: Backend
    join: bool = False  # whether neighbouring clips of a video are decoded together
    # the sizes of all samples' clips, if they differ: each share then gets the shape of the largest clip of its
    # global batch, which ranks cannot know from their own rows.
    clip_sizes: ClipSizes | None = None
    # whether the rows of a batch have one shape, also those of a rank that has masked rows alone.
    one_shape: bool = False

    def plans(self, batches: Batches | PlannedEpoch, position: int) -> Iterator[Plan]:
        """Yield the plans of all batches from `position` to the end of the epoch, computed lazily."""
        shares = batches.shares(position)
        # Look up many rows per call: numpy's overhead per call hardly depends on their number.
        for first in shares:
            some = [first, *itertools.islice(shares, _ROWS_AHEAD // len(first.positions))]
            samples = self._samples(np.concatenate([share.positions for share in some]))
            ends = np.cumsum([len(share.positions) for share in some])
            for share, part in zip(some, np.split(samples, ends[:-1]), strict=True):
                yield self.plan(share, part)
                # Yield the GIL to decode threads between batches; otherwise it switches only every 5 ms.
                time.sleep(0)

    def plan(self, share: Share, samples: IntArray | None = None) -> Plan:
        """Return the plan of one rank's share of a batch; `samples` replaces the samples that the order has there."""
        samples = self._samples(share.positions) if samples is None else samples
        draws = BatchDraws(self.order.seed, self.order.epoch, share.positions)
        plan = Plan(self.rules, self._shaped(share), draws, samples)
        shards = self._find(plan)
        clips = [np.empty(0, dtype=np.int64)] * len(plan.lengths)
        present = np.flatnonzero(plan.valid)
        for some, sampler, spatial in groups(self.rules, samples[present]):
            if share.shape is not None:
                sampler, spatial = with_length(sampler, share.shape[0]), spatial.of_size(share.shape[1:])
            rows = present[some].tolist()
            try:
                self._decide(plan, clips, rows, sampler, spatial)
            except Exception:  # noqa: BLE001 - belongs to one of the clips
                for row in rows:
                    try:
                        self._decide(plan, clips, [row], sampler, spatial)
                    except Exception as error:  # noqa: BLE001 - the consumer handles it
                        self._failed(plan, row, error, shards[row])
        self._set_frames(plan, clips)
        self._set_reads(plan)
        if self.rules.audio is not None:
            self._set_sound(plan, share, self.rules.audio)
        if self.one_shape and not plan.valid.any() and self.rules.shape is None and plan.share.shape is None:
            self._borrow_shape(plan)
        return plan

    def _borrow_shape(self, plan: Plan) -> None:
        """Give rows without clips the shape that the first clip of the global batch has on another rank."""
        start = plan.share.start
        other = replace(self, one_shape=False).plan(Share(start, start + 1, np.array([start])))
        by_row = len(self.rules.streams), -1, self.rules.num_views
        plan.cuts.reshape(*by_row, 7)[:] = other.cuts.reshape(*by_row, 7)
        plan.lengths.reshape(by_row[1:])[:] = other.lengths

    def _samples(self, positions: IntArray) -> IntArray:
        present = positions != MASKED
        samples = np.full(len(positions), MASKED, dtype=np.int64)
        samples[present] = self.order.ids(positions[present])
        return samples

    def _shaped(self, share: Share) -> Share:
        if share.shape is not None or self.clip_sizes is None:
            return share
        samples = self.order.ids(np.arange(share.start, share.stop))
        sizes = self.clip_sizes
        shape = tuple(int(side[samples].max()) for side in (sizes.frames, sizes.heights, sizes.widths))
        return replace(share, shape=cast(ClipShape, shape))

    def _find(self, plan: Plan) -> dict[int, int]:
        """Look up the shard and the streams of each row's sample; return the number of each row's shard."""
        present = np.flatnonzero(plan.valid)
        wanted = plan.samples[present]
        shards, shard_rows = self.dataset.locate(wanted)
        self._open(np.unique(shards).tolist())
        numbers, opened = dict(zip(present.tolist(), shards.tolist(), strict=True)), dict[int, Shard]()
        for (row, shard), key, shard_row in zip(
            numbers.items(), self.dataset.keys_of(wanted), shard_rows.tolist(), strict=True
        ):
            plan.keys[row], plan.shard_rows[row] = key, shard_row
            try:
                if shard not in opened:
                    opened[shard] = self.dataset.shard(shard)
                plan.shards[row] = opened[shard]
                plan.infos[row] = self._infos(plan, row, opened[shard])
            except Exception as error:  # noqa: BLE001 - belongs to this clip; the consumer handles it
                self._failed(plan, row, error, shard)
        return numbers

    def _failed(self, plan: Plan, row: int, error: Exception, shard: int) -> None:
        add_location(error, self.dataset.shard_name(shard), plan.keys[row])
        views = self.rules.num_views
        plan.errors[row * views], plan.valid[row] = error, False
        plan.cuts.reshape(-1, len(plan.samples), views, 7)[:, row] = 0

    def _infos(self, plan: Plan, row: int, shard: Shard) -> tuple[StreamInfo, ...]:
        streams = self.rules.streams
        infos = tuple(map(shard.info, itertools.repeat(plan.shard_rows[row]), streams))
        plan.rates[row] = infos[self.rules.main].fps.as_integer_ratio()
        for stream, info in enumerate(infos):
            # A flow picture has x above y, so it is twice as high as the video's pictures.
            plan.sizes[stream, row] = (info.height // 2 if streams[stream] == FLOW else info.height), info.width
            if info.codec not in self.backend.codecs:
                known = ", ".join(sorted(codec.label for codec in self.backend.codecs))
                hint = f"use one of {known}"
                raise UsageError(f"decoder {self.backend.name!r} does not decode {info.codec.label}", hint=hint)
        if streams != (PICTURES,):
            check_lengths(dict(zip(streams, infos, strict=True)))
        return infos

    def _decide(self, plan: Plan, clips: list[IntArray], rows: list[int], sampler: Sampler, spatial: Spatial) -> None:
        """Decide the frames and crops of rows that have the same sampler and transforms."""
        rules, views, draws = self.rules, self.rules.views or ONE_VIEW, plan.draws.chosen(rows)
        first = [plan.infos[row][0] for row in rows]
        anchors = self._anchors(plan.samples[rows])
        num_frames, fps = np.array([info.num_frames for info in first]), np.array([float(info.fps) for info in first])
        times = {number: info.times.seconds() for number, info in enumerate(first) if info.times is not None}

        def video(number: int) -> VideoInfo:
            row, info = rows[number], first[number]
            height, width = plan.sizes[0, row].tolist()
            annotations = SampleAnnotations(self.dataset, int(plan.samples[row]))
            anchor = None if anchors is None else int(anchors[number])
            facts = (info.num_frames, float(info.fps), width, height, plan.keys[row], annotations)
            return VideoInfo(*facts, anchor=anchor, times=times.get(number))

        shown = draw_all(views, sampler, Videos(num_frames, fps, draws, anchors, times), video)
        cuts = plan.cuts.reshape(len(rules.streams), len(plan.samples), views.num_clips, views.num_crops, 7)
        for number, stream in enumerate(rules.streams):
            heights, widths = plan.sizes[number, rows].T
            # The same draws for all streams: those of one size, such as pictures and their flow, get the same crop.
            views_of = spatial.cuts(heights.tolist(), widths.tolist(), draws)
            if views.num_crops > 1:
                views_of = views.divided(views_of, heights, widths)
            views_of = views_of.reshape(len(rows), 1, views.num_crops, 7)
            if stream == FLOW:
                views_of[..., 2] += heights[:, None, None]
            cuts[number, rows] = views_of
        each, count = [clip for clip in shown for _ in range(views.num_crops)], rules.num_views
        for number, row in enumerate(rows):
            clips[row * count : (row + 1) * count] = each[number * count : (number + 1) * count]

    def _set_frames(self, plan: Plan, clips: Sequence[IntArray]) -> None:
        plan.lengths[:] = list(map(len, clips))
        longest = max(1, int(plan.lengths.max()), plan.num_frames or 0)
        plan.frames = np.full((len(clips), longest), -1, dtype=np.int64)
        for into, clip in zip(plan.frames, clips, strict=True):
            into[: len(clip)] = clip

    def _set_reads(self, plan: Plan) -> None:
        """Set which clips are decoded together: neighbours that show the same stream of the same sample."""
        streams, views, last = self.rules.streams, self.rules.num_views, None
        decoded = np.flatnonzero(np.tile(np.repeat(plan.valid, views), len(streams))).tolist()
        if not self.join:
            plan.reads = {number: number + 1 for number in decoded}
            return
        first = -1
        for number in decoded:
            stream, sample = streams[number // len(plan.lengths)], int(plan.samples[plan.row_of(number)])
            joins = first >= 0 and plan.reads[first] == number and last == (stream, sample)
            if not (joins and can_cut(plan.info(first)) and stream not in self.rules.depth):
                first = number
            plan.reads[first], last = number + 1, (stream, sample)

    def _set_sound(self, plan: Plan, share: Share, audio: Audio) -> None:
        """Set the windows of sound, and the samples of the longest one in the global batch.

        Other ranks' clips are computed from the annotations. A batch of planned shape uses this rank's rows alone.
        """
        for row in np.flatnonzero(plan.valid).tolist():
            frames = plan.frames[row, : plan.lengths[row]]
            plan.windows[row] = audio.window(frames, plan.infos[row][0].fps)
        counts = [window.count for window in plan.windows.values()]
        own = share.positions[share.positions != MASKED]
        if share.shape is None and share.bins is None and len(own) < share.stop - share.start:
            others = np.setdiff1d(np.arange(share.start, share.stop), own)
            counts += self._sound_samples(others, audio)
        plan.sound_samples = max(counts, default=0)

    def _sound_samples(self, positions: IntArray, audio: Audio) -> Iterator[int]:
        """Yield the number of sound samples of the clips at other ranks' positions, computed from the annotations."""
        samples = self.order.ids(positions)
        for some, sampler, _ in groups(self.rules, samples):
            chosen, draws = samples[some], BatchDraws(self.order.seed, self.order.epoch, positions[some])
            facts, anchors = [column[chosen] for column in self._facts], self._anchors(chosen)

            def video(row: int) -> VideoInfo:
                sample, annotations = int(chosen[row]), SampleAnnotations(self.dataset, int(chosen[row]))  # noqa: B023
                num_frames, fps, width, height = (column[row].item() for column in facts)  # noqa: B023
                anchor = None if anchors is None else int(anchors[row])  # noqa: B023
                return VideoInfo(num_frames, fps, width, height, self.dataset.key(sample), annotations, anchor=anchor)

            clips = draw_all(ONE_VIEW, sampler, Videos(facts[0], facts[1], draws, anchors), video)
            for frames, rate in zip(clips, facts[1].tolist(), strict=True):
                yield audio.window(frames, Fraction(rate).limit_denominator(_LARGEST_DENOMINATOR)).count

    def _anchors(self, samples: IntArray) -> IntArray | None:
        """Return the frame that each item of `EveryFrame` is, int64 [N]; None for samples."""
        return self.dataset.place(samples)[1] if isinstance(self.dataset, EveryFrame) else None

    @cached_property
    def _facts(self) -> list[Any]:
        names = ("num_frames", "fps", "width", "height")
        if isinstance(self.dataset, EveryFrame):
            return [self.dataset.repeat(self.dataset.samples.column(name).to_numpy()) for name in names]
        return [self.dataset.column(name).to_numpy() for name in names]

    @cached_property
    def _at_once(self) -> int:
        return prefetch_threads(self.dataset)

    def _open(self, shards: list[int]) -> None:
        """Open shards in parallel if each costs a request; errors are raised again when the shard is used."""
        closed = [index for index in shards if not self.dataset.is_open(index)] if self._at_once else []
        if len(closed) > 1:
            with ThreadPoolExecutor(min(self._at_once, len(closed)), thread_name_prefix="fastvid-open") as pool:
                for opened in [pool.submit(self.dataset.shard, index) for index in closed]:
                    opened.exception()


def groups(rules: ClipRules, samples: IntArray) -> Iterator[tuple[list[int], Sampler, Spatial]]:
    """Yield groups of samples with the same sampler and crop: indices into `samples`, int64 [N], and these two."""
    numbers = np.searchsorted(np.asarray(rules.ends), samples, side="right")
    for number in np.unique(numbers).tolist():
        yield np.flatnonzero(numbers == number).tolist(), rules.samplers[number], rules.spatials[number]


def draw_all(views: Views, sampler: Sampler, videos: Videos, video: Callable[[int], VideoInfo]) -> Clips:
    """Return the frame indices of the clips of each video, video by video; `video`: returns the facts of one."""
    if is_own(sampler) and views.num_clips == 1 and not views.places:
        return cast(BatchSampler, sampler).draw_all(videos)
    rows = range(len(videos.num_frames))
    return [clip for row in rows for clip in views.clips(sampler, video(row), videos.draws[row])]


def prefetch_threads(dataset: Dataset | Mixture, asked: int | None = None) -> int:
    """Return how many threads should prefetch from a dataset's storage; 0 if reads are fast enough without."""
    if asked is not None:
        return asked
    at_once = max(part.storage.concurrency for part in parts_of(dataset))
    return 0 if at_once == 1 else min(at_once, MOST_FETCHERS)


def add_location(error: Exception, shard: str, key: str) -> None:
    """Add the clip's shard and key to an error."""
    if isinstance(error, FastvidError):
        error.at_sample(shard, key)
    else:
        error.add_note(f"while loading {key} of {shard}")


class EpochPlans:
    """The batches of any epoch of a loader."""

    def __init__(self, orders: EpochOrders, batching: Batches | Planned) -> None:
        self.orders, self.batching = orders, batching
        # The last two epochs are kept: between them a loader asks for both.
        self.epoch = lru_cache(2)(self._epoch)
        """Returns the batches of an epoch, given the seed and the number of the epoch."""

    def __repr__(self) -> str:
        batching = self.batching
        return f"global_batch_size={batching.size}" if isinstance(batching, Batches) else f"batches={batching}"

    @property
    def of_one_size(self) -> Batches:
        """The batches of every epoch."""
        if not isinstance(self.batching, Batches):
            hint = "use start and stop of each batch, and len() of the loader for the steps of an epoch"
            raise UsageError("batches of varying shape have no global_batch_size", hint=hint)
        return self.batching

    def steps(self, seed: int, epoch: int, position: int) -> int:
        """Return the number of batches from a position to the end of the epoch; at its end, those of the next epoch."""
        return self.epoch(seed, epoch).count(position) or self.epoch(seed, epoch + 1).count(0)

    def check(self, seed: int) -> None:
        """Raise UsageError if the first epoch has no batch; of packed batches, a later one may have none."""
        if self.epoch(seed, 0).is_over(0):
            text = f"{self.orders.num_samples} samples do not fill one batch of {self.batching} with last='drop'"
            raise UsageError(text, hint="use smaller batches, or last='mask'")

    def _epoch(self, seed: int, epoch: int) -> Batches | PlannedEpoch:
        return self.batching.epoch(self.orders.order(seed, epoch))
