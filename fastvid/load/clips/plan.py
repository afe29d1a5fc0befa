"""Plans: which frames, crop and flip each row of a batch gets, decided before anything is read.

A plan is a pure function of the dataset, the order, the rules, the seed and the epoch, so any thread, process or rank
can compute any batch. `ClipPlanner` does not use the dataset, because worker processes plan clips too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Final, cast

import numpy as np

from fastvid.decode.backends import Backend
from fastvid.decode.request import ClipRequest
from fastvid.decode.sound import Audio, AudioWindow, EncodedAudio, decode_audio, fetch_audio
from fastvid.errors import FastvidError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import FLOW, PICTURES
from fastvid.format.shard import Shard
from fastvid.load.clips.clip import (
    BatchRow,
    Clip,
    ClipRules,
    SampleAnnotations,
    as_clips,
    check_lengths,
    flow_request,
    join_neighbours,
    picture_size,
    stack_frames,
)
from fastvid.load.clips.crops import Size
from fastvid.load.clips.sampling import VideoInfo, with_length
from fastvid.load.clips.views import ONE_VIEW
from fastvid.load.order.buckets import ClipSizes
from fastvid.load.order.draws import Draws
from fastvid.load.order.epoch import (
    MASKED,
    Batches,
    Batching,
    ClipShape,
    EpochBatches,
    EpochOrder,
    EpochOrders,
    EveryFrame,
    Share,
)
from fastvid.load.order.mixture import Mixture, parts_of
from fastvid.runtime.arrays import AnyArray, BoolArray, Float32Array, IntArray


@dataclass(frozen=True)
class ClipPlanner:
    """Plans clips."""

    rules: ClipRules  # choose the frames, crop and flip
    seed: int  # seed of the random draws, which also depend on the epoch and the row's position
    epoch: int
    backend: Backend

    @property
    def runs_in_workers(self) -> bool:
        """Whether worker processes can plan clips: only if samplers, crops and flips are fastvid's own, because workers
        never import a user's modules."""
        own = __name__.partition(".")[0]
        return all(
            type(part).__module__.partition(".")[0] == own
            for sampler, spatial in self.rules.pairs
            for part in (sampler, spatial.crop, spatial.flip)
            if part is not None
        )

    def infos(self, row: BatchRow) -> dict[str, StreamInfo]:
        """Return the streams of a row's video."""
        return {stream: row.shard.info(row.shard_row, stream) for stream in self.rules.streams}

    def facts(self, infos: Mapping[str, StreamInfo]) -> tuple[tuple[int, int], Size]:
        """Return the exact frame rate of a video as numerator and denominator, and its height and width."""
        stream = PICTURES if PICTURES in self.rules.streams else self.rules.streams[0]
        info = infos[stream]
        return info.fps.as_integer_ratio(), picture_size(info, stream)

    def decide(self, row: BatchRow, rows: int = 1, infos: Mapping[str, StreamInfo] | None = None) -> list[Clip]:
        """Plan the clips of a row: for each stream all views, with the same frames and crops.

        `row`: the row. `rows`: rows of its batch. View v of stream s of row r is written to canvas row (s *
        rows + r) * V + v.
        """
        rules, infos = self.rules, infos or self.infos(row)
        self._check_codecs(infos)
        first = infos[rules.streams[0]]
        check_lengths(infos)
        height, width = picture_size(first, rules.streams[0])
        draws = Draws(self.seed, self.epoch, row.position)
        sampler, spatial = rules.of_sample(row.sample)
        if row.shape is not None:
            sampler, spatial = with_length(sampler, row.shape[0]), spatial.of_size(row.shape[1:])
        facts = (first.num_frames, float(first.fps), width, height, row.key, row.annotations)
        views = rules.views or ONE_VIEW
        shown = views.clips(sampler, VideoInfo(*facts, anchor=row.anchor), draws)
        clips = []
        for number, (stream, found) in enumerate(infos.items()):
            at = (number * rows + row.row) * views.num_views
            # The same draws for all streams: those of one size, such as pictures and their flow, get the same crop.
            cuts = views.cuts(spatial, *picture_size(found, stream), draws)
            for frames in shown:
                for box, size, flip in cuts:
                    if stream == FLOW:
                        stacked = stack_frames(frames, found.num_frames, rules.flow_stack)
                        request = flow_request(row.sample, stacked, box, size, found, flip=flip)
                    else:
                        request = ClipRequest(row.sample, frames, box, size, flip, stream, stream in rules.depth)
                    whose = (row.key, row.shard, row.shard_row, row.sample, row.position)
                    window = None if rules.audio is None or number else rules.audio.window(frames, found.fps)
                    clips.append(Clip(at, *whose, found, request, frames, window=window))
                    at += 1
        return clips

    def _check_codecs(self, infos: Mapping[str, StreamInfo]) -> None:
        for info in infos.values():
            if info.codec not in self.backend.codecs:
                known = ", ".join(sorted(codec.label for codec in self.backend.codecs))
                raise UsageError(
                    f"decoder {self.backend.name!r} does not decode {info.codec.label}", hint=f"use one of {known}"
                )


_LARGEST_DENOMINATOR: Final = 100_000
"""Of exact frame rates, see `fastvid.format.mp4.frame_rate`: the double of an annotation stands for only one."""


@dataclass(frozen=True, slots=True, eq=False)
class SoundTask:
    """The sound of one row of a batch, to be read and decoded."""

    window: AudioWindow  # the samples
    data: Float32Array  # where to write them, float32 [C, S] with S at least that of the window; zeros
    mask: BoolArray  # where to write which samples are heard, bool [S]; False
    source: BatchRow | EncodedAudio | None  # the row to read, or its packets; None if its sample has no audio

    def fetched(self) -> SoundTask:
        """Return the task with its packets read and checked."""
        source = self.source
        if not isinstance(source, BatchRow):
            return self
        return replace(self, source=fetch_audio(source.shard, source.shard_row, self.window, key=source.key))

    def decode(self) -> None:
        """Decode and write the sound."""
        assert not isinstance(self.source, BatchRow)
        if self.source is not None:
            clip = decode_audio(self.source, self.window)
            self.data[:, : self.window.count] = clip.data
            self.mask[: self.window.count] = clip.mask


def sounding(clips: Sequence[BatchRow | None], rows: int) -> Iterator[tuple[int, Clip]]:
    """Yield the rows of a batch that have a window of sound, with their clip of the first stream."""
    for row, clip in enumerate(clips[:rows]):
        if isinstance(clip, Clip) and clip.window is not None:
            yield row, clip


_ROWS_AHEAD: Final = 256
"""Rows whose samples are looked up in one call."""

MOST_FETCHERS: Final = 32
"""At 20 ms a request, 32 threads fetch 1,600 clips a second, more than 16 cores decode; 64 add context switches."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """One rank's share of a batch. A canvas row is a row of a stream and view, see `ClipPlanner.decide`."""

    planner: ClipPlanner  # has planned the clips, or plans those that are not planned yet; one object an epoch
    share: Share  # positions of the rows
    samples: list[int]  # number of the sample in each row; MASKED for an empty row
    keys: list[str]  # key of each row's sample; "" for an empty row
    # the clip of each canvas row; a `BatchRow` if it is not planned yet; None if it is masked or planning it failed.
    clips: list[BatchRow | None]
    errors: dict[int, Exception]  # planning errors, by canvas row
    # exact frames per second of each row's video as numerator and denominator, int64 [B, 2]; -1 for an empty row,
    # and if its shard cannot be read.
    rates: IntArray
    sizes: IntArray  # height and width of each row's video in pixels, int64 [B, 2]; -1 likewise
    sound_samples: int = 0  # samples of the longest sound of the global batch; 0 without sound


@dataclass(frozen=True)
class BatchPlanner:
    """Computes the batch plans of an epoch."""

    dataset: Dataset | Mixture  # the samples
    order: EpochOrder  # order of the samples
    clips: ClipPlanner  # plans frames, crop and flip
    join: bool = False  # whether neighbouring clips of a video are decoded together
    # whether to plan clips here, which takes most of the planning time; otherwise the lane that decodes a row
    # plans its clip.
    decide: bool = True
    # the sizes of all samples' clips, if they differ: each share then gets the shape of the largest clip of its
    # global batch, which ranks cannot know from their own rows.
    clip_sizes: ClipSizes | None = None

    def plans(self, batches: EpochBatches, position: int) -> Iterator[BatchPlan]:
        """Yield the plans of all batches from `position` to the end of the epoch, computed lazily."""
        shares = batches.shares(position)
        # Look up many rows per call: numpy's overhead per call hardly depends on their number.
        for first in shares:
            some = [first, *itertools.islice(shares, _ROWS_AHEAD // len(first.positions))]
            samples = self._samples(np.concatenate([share.positions for share in some]))
            ends = np.cumsum([len(share.positions) for share in some])
            for share, part in zip(some, np.split(samples, ends[:-1]), strict=True):
                yield self._plan(share, part)

    def plan(self, share: Share, samples: IntArray | None = None) -> BatchPlan:
        """Return the plan of one rank's share of a batch; of these samples, in place of those of the order."""
        return self._plan(share, self._samples(share.positions) if samples is None else samples)

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

    def _plan(self, share: Share, samples: IntArray) -> BatchPlan:
        present = samples != MASKED
        wanted = samples[present]
        shards, rows = self.dataset.locate(wanted)
        self._open(np.unique(shards).tolist())
        frames = (
            self.dataset.place(wanted)[1].tolist() if isinstance(self.dataset, EveryFrame) else [None] * len(wanted)
        )
        rules = self.clips.rules
        empty: list[BatchRow | None] = [None] * (len(samples) * len(rules.streams) * rules.num_views)
        facts = np.full((2, len(samples), 2), -1, dtype=np.int64)
        plan = BatchPlan(self.clips, self._shaped(share), samples.tolist(), [""] * len(samples), empty, {}, *facts)
        positions, opened = share.positions.tolist(), dict[int, Shard]()
        for number, key, shard, shard_row, anchor in zip(
            np.flatnonzero(present).tolist(),
            self.dataset.keys_of(wanted),
            shards.tolist(),
            rows.tolist(),
            frames,
            strict=True,
        ):
            sample = plan.samples[number]
            plan.keys[number] = key
            try:
                if shard not in opened:
                    opened[shard] = self.dataset.shard(shard)
                place = (number, key, opened[shard], shard_row, sample, positions[number])
                annotations = SampleAnnotations(self.dataset, sample)
                row = BatchRow(*place, annotations=annotations, shape=share.shape, anchor=anchor)
                infos = self.clips.infos(row)
                plan.rates[number], plan.sizes[number] = self.clips.facts(infos)
                if not self.decide:
                    plan.clips[number] = row
                    continue
                for clip in self.clips.decide(row, len(samples), infos):
                    plan.clips[clip.row] = clip
            except Exception as error:  # noqa: BLE001 - belongs to this clip; the consumer handles it
                add_location(error, self.dataset.shard_name(shard), key)
                plan.errors[number * rules.num_views] = error
        # Yield the GIL to decode threads between batches; otherwise it switches only every 5 ms.
        time.sleep(0)
        if self.join:
            plan.clips[:] = join_neighbours(as_clips(plan.clips))
        if rules.audio is None:
            return plan
        return replace(plan, sound_samples=self._longest_sound(share, plan.clips, rules.audio))

    def _longest_sound(self, share: Share, clips: Sequence[BatchRow | None], audio: Audio) -> int:
        """Return the samples of the longest sound of the global batch, which ranks cannot know from their own rows; of
        this rank's rows alone in a batch planned by shape."""
        counts = [clip.window.count for _, clip in sounding(clips, len(share.positions)) if clip.window]
        own = share.positions[share.positions != MASKED]
        if share.shape is None and share.bins is None and len(own) < share.stop - share.start:
            others = np.setdiff1d(np.arange(share.start, share.stop), own)
            for position, sample in zip(others.tolist(), self.order.ids(others).tolist(), strict=True):
                video = self._video(sample)
                sampler, _ = self.clips.rules.of_sample(sample)
                draws = Draws(self.clips.seed, self.clips.epoch, position)
                (frames,) = ONE_VIEW.clips(sampler, video, draws)
                fps = Fraction(video.fps).limit_denominator(_LARGEST_DENOMINATOR)
                counts.append(audio.window(frames, fps).count)
        return max(counts, default=0)

    def _video(self, sample: int) -> VideoInfo:
        frames, fps, width, height = (column[sample].item() for column in self._facts)
        annotations = SampleAnnotations(self.dataset, sample)
        return VideoInfo(frames, fps, width, height, self.dataset.key(sample), annotations)

    @cached_property
    def _facts(self) -> list[AnyArray]:
        return [self.dataset.column(name).to_numpy() for name in ("num_frames", "fps", "width", "height")]

    def _open(self, shards: list[int]) -> None:
        """Open shards in parallel if each costs a request; errors are raised again when the shard is used."""
        at_once = prefetch_threads(self.dataset)
        closed = [index for index in shards if not self.dataset.is_open(index)] if at_once else []
        if len(closed) > 1:
            with ThreadPoolExecutor(min(at_once, len(closed)), thread_name_prefix="fastvid-open") as pool:
                for opened in [pool.submit(self.dataset.shard, index) for index in closed]:
                    opened.exception()


def prefetch_threads(dataset: Dataset | Mixture, asked: int | None = None) -> int:
    """Return how many threads should prefetch from a dataset's storage; 0 if reads are fast enough without."""
    if asked is not None:
        return asked
    sets = parts_of(dataset)
    at_once = max(part.storage.concurrency for part in sets)
    return 0 if at_once == 1 else min(at_once, MOST_FETCHERS)


def add_location(error: Exception, shard: str, key: str) -> None:
    """Add the clip's shard and key to an error."""
    if isinstance(error, FastvidError):
        error.at_sample(shard, key)
    else:
        error.add_note(f"while loading {key} of {shard}")


class EpochPlans:
    """The batches of any epoch of a loader."""

    def __init__(self, orders: EpochOrders, batching: Batching) -> None:
        self.orders, self.batching = orders, batching
        self._epochs: dict[tuple[int, int], EpochBatches] = {}

    def __repr__(self) -> str:
        batching = self.batching
        return f"global_batch_size={batching.size}" if isinstance(batching, Batches) else f"batches={batching}"

    @property
    def of_one_size(self) -> Batches:
        """The batches of every epoch."""
        if not isinstance(self.batching, Batches):
            raise UsageError(
                "batches of varying shape have no global_batch_size",
                hint="use start and stop of each batch, and len() of the loader for the steps of an epoch",
            )
        return self.batching

    def steps(self, seed: int, epoch: int, position: int) -> int:
        """Return the number of batches from a position to the end of the epoch, or at its end those of the next."""
        return self.epoch(seed, epoch).count(position) or self.epoch(seed, epoch + 1).count(0)

    def epoch(self, seed: int, epoch: int) -> EpochBatches:
        """Return the batches of an epoch. Those of the last two epochs are kept: both are asked for between them."""
        found = self._epochs.get((seed, epoch))
        if found is None:
            found = self.batching.epoch(self.orders.order(seed, epoch))
            self._epochs = dict([*self._epochs.items(), ((seed, epoch), found)][-2:])
        return found
