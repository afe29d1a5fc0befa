"""The sound of planned clips: how long it is in a batch, and the task of reading and decoding one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Final

import numpy as np

from fastvid.audio.decoding import decode_audio
from fastvid.audio.packets import EncodedAudio, fetch_audio
from fastvid.audio.window import AudioWindow
from fastvid.format.dataset import Dataset
from fastvid.load.clips.clip import BatchRow, Clip
from fastvid.load.clips.planner import ClipPlanner
from fastvid.load.clips.sample_annotations import SampleAnnotations
from fastvid.load.clips.video_info import VideoInfo
from fastvid.load.order.batches import MASKED, Share
from fastvid.load.order.epoch import EpochOrder
from fastvid.load.order.mixture import Mixture
from fastvid.load.order.random_draws import Draws
from fastvid.runtime.arrays import AnyArray, BoolArray, Float32Array

_LARGEST_DENOMINATOR: Final = 100_000
"""Of exact frame rates, see `fastvid.format.mp4.demux.frame_rate`: the double of an annotation stands for only one."""


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


@dataclass(frozen=True)
class LongestSound:
    """Finds the longest sound of a global batch, which ranks cannot know from their own rows, from facts and draws."""

    dataset: Dataset | Mixture  # the samples
    order: EpochOrder

    def samples(self, share: Share, clips: Sequence[BatchRow | None], planner: ClipPlanner) -> int:
        """Return the samples of the longest sound, S; of this rank's rows alone in a batch planned by shape.

        `share`: this rank's rows, as the batches made it. `planner`: draws the frames of the other ranks' rows.
        """
        longest = max(
            (clip.window.count for _, clip in sounding(clips, len(share.positions)) if clip.window), default=0
        )
        own = share.positions[share.positions != MASKED]
        if share.shape is not None or share.bins is not None or len(own) == share.stop - share.start:
            return longest
        others = np.setdiff1d(np.arange(share.start, share.stop), own)
        assert planner.audio is not None
        for position, sample in zip(others.tolist(), self.order.ids(others).tolist(), strict=True):
            video = self._video(sample)
            sampler, _ = planner.rules.of_sample(sample)
            (frames,) = planner.views.clips(sampler, video, Draws(planner.seed, planner.epoch, position))
            fps = Fraction(video.fps).limit_denominator(_LARGEST_DENOMINATOR)
            longest = max(longest, planner.audio.window(frames, fps).count)
        return longest

    def _video(self, sample: int) -> VideoInfo:
        frames, fps, width, height = (column[sample].item() for column in self._facts)
        annotations = SampleAnnotations(self.dataset, sample)
        return VideoInfo(frames, fps, width, height, self.dataset.key(sample), annotations)

    @cached_property
    def _facts(self) -> list[AnyArray]:
        return [self.dataset.column(name).to_numpy() for name in ("num_frames", "fps", "width", "height")]
