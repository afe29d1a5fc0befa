"""Plans clips before they are read: their frames, crop and flip.

A plan is a pure function of the row, its shard's index, the seed and the epoch, so any thread, process or rank can plan
any clip. This module does not use the dataset, because worker processes plan clips too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastvid.audio.window import Audio
from fastvid.decode.backends import Backend
from fastvid.decode.request import ClipRequest
from fastvid.errors import UsageError
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import FLOW, PICTURES
from fastvid.load.clips.clip import BatchRow, Clip
from fastvid.load.clips.crop_size import Size
from fastvid.load.clips.rules import ClipRules
from fastvid.load.clips.sampling import with_length
from fastvid.load.clips.streams import check_lengths, flow_request, picture_size, stack_frames
from fastvid.load.clips.video_info import VideoInfo
from fastvid.load.clips.views import ONE_VIEW, Views
from fastvid.load.order.random_draws import Draws


@dataclass(frozen=True)
class ClipPlanner:
    """Plans clips."""

    rules: ClipRules  # choose the frames, crop and flip
    seed: int  # seed of the random draws, which also depend on the epoch and the row's position
    epoch: int
    backend: Backend
    streams: tuple[str, ...] = ("rgb",)
    flow_stack: int = 1
    views: Views = ONE_VIEW
    audio: Audio | None = None
    depth: frozenset[str] = frozenset()

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
        return {stream: row.shard.info(row.shard_row, stream) for stream in self.streams}

    def facts(self, infos: Mapping[str, StreamInfo]) -> tuple[tuple[int, int], Size]:
        """Return the exact frame rate of a video as numerator and denominator, and its height and width."""
        stream = PICTURES if PICTURES in self.streams else self.streams[0]
        info = infos[stream]
        return info.fps.as_integer_ratio(), picture_size(info, stream)

    def decide(self, row: BatchRow, rows: int = 1, infos: Mapping[str, StreamInfo] | None = None) -> list[Clip]:
        """Plan the clips of a row: for each stream all views, with the same frames and crops.

        `row`: the row. `rows`: rows of its batch. View v of stream s of row r is written to canvas row (s *
        rows + r) * V + v.
        """
        infos = infos or self.infos(row)
        self._check_codecs(infos)
        first = infos[self.streams[0]]
        check_lengths(infos)
        height, width = picture_size(first, self.streams[0])
        draws = Draws(self.seed, self.epoch, row.position)
        sampler, spatial = self.rules.of_sample(row.sample)
        if row.shape is not None:
            sampler, spatial = with_length(sampler, row.shape[0]), spatial.of_size(row.shape[1:])
        facts = (first.num_frames, float(first.fps), width, height, row.key, row.annotations)
        shown = self.views.clips(sampler, VideoInfo(*facts, anchor=row.anchor), draws)
        clips = []
        for number, (stream, found) in enumerate(infos.items()):
            at = (number * rows + row.row) * self.views.num_views
            # The same draws for all streams: those of one size, such as pictures and their flow, get the same crop.
            cuts = self.views.cuts(spatial, *picture_size(found, stream), draws)
            for frames in shown:
                for box, size, flip in cuts:
                    if stream == FLOW:
                        stacked = stack_frames(frames, found.num_frames, self.flow_stack)
                        request = flow_request(row.sample, stacked, box, size, found, flip=flip)
                    else:
                        request = ClipRequest(row.sample, frames, box, size, flip, stream, stream in self.depth)
                    whose = (row.key, row.shard, row.shard_row, row.sample, row.position)
                    window = None if self.audio is None or number else self.audio.window(frames, found.fps)
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
