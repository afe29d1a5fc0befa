"""Plans clips before they are read: their frames, crop and flip.

A plan is a pure function of the row, its shard's index, the seed and the epoch, so any thread, process or rank can plan
any clip. This module does not use the dataset, because worker processes plan clips too.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastvid.audio.window import Audio
from fastvid.decode.backends import Backend
from fastvid.decode.request import ClipRequest
from fastvid.errors import UsageError
from fastvid.format.packets import StreamInfo
from fastvid.load.clips.clip import BatchRow, Clip
from fastvid.load.clips.crop_size import Size
from fastvid.load.clips.rules import ClipRules
from fastvid.load.clips.sampling import with_length
from fastvid.load.clips.streams import check_flow, flow_request, picture_size, stack_frames
from fastvid.load.clips.video_info import VideoInfo
from fastvid.load.clips.views import ONE_VIEW, Views
from fastvid.load.order.random_draws import Draws


@dataclass(frozen=True)
class ClipPlanner:
    """Plans clips.

    Attributes:
        rules: Choose the frames, crop and flip.
        seed: Seed of the random draws, which also depend on the epoch and the row's position.
        epoch: The epoch.
        backend: The decoder back-end; a codec that it does not support is rejected here.
        streams: Streams of a sample to decode.
        flow_stack: Flow pictures per frame.
        views: Clips and crops of each sample.
        audio: The sound of a clip; None for none.
    """

    rules: ClipRules
    seed: int
    epoch: int
    backend: Backend
    streams: tuple[str, ...] = ("rgb",)
    flow_stack: int = 1
    views: Views = ONE_VIEW
    audio: Audio | None = None

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

    def facts(self, row: BatchRow) -> tuple[tuple[int, int], Size]:
        """Return the exact frame rate of a row's video as numerator and denominator, and its height and width."""
        stream = "rgb" if "rgb" in self.streams else self.streams[0]
        info = row.shard.info(row.shard_row, stream)
        return info.fps.as_integer_ratio(), picture_size(info, stream)

    def decide(self, row: BatchRow, rows: int = 1) -> list[Clip]:
        """Plan the clips of a row: for each stream all views, with the same frames and crops.

        Args:
            row: The row.
            rows: Rows of its batch. View v of stream s of row r is written to canvas row (s * rows + r) * V + v.

        Raises:
            UsageError: If the back-end does not support the codec, or no crop fits.
            FormatError: If the streams do not match each other.
        """
        infos = {stream: self._info(row, stream) for stream in self.streams}
        picture, flow = infos.get("rgb"), infos.get("flow")
        if flow is not None:
            check_flow(flow, picture)
        info = infos[self.streams[0]]
        height, width = picture_size(info, self.streams[0])
        draws = Draws(self.seed, self.epoch, row.position)
        sampler, spatial = self.rules.of_sample(row.sample)
        if row.shape is not None:
            sampler, spatial = with_length(sampler, row.shape[0]), spatial.of_size(row.shape[1:])
        cuts = self.views.cuts(spatial, height, width, draws)
        video = VideoInfo(info.num_frames, float(info.fps), width, height, row.key, row.annotations)
        shown = self.views.clips(sampler, video, draws)
        clips = []
        for number, (stream, found) in enumerate(infos.items()):
            at = (number * rows + row.row) * self.views.num_views
            for frames in shown:
                stacked = stack_frames(frames, found.num_frames, self.flow_stack) if stream == "flow" else frames
                for box, size, flip in cuts:
                    if stream == "flow":
                        request = flow_request(row.sample, stacked, box, size, found, flip=flip)
                    else:
                        request = ClipRequest(row.sample, frames, box, size, flip)
                    whose = (row.key, row.shard, row.shard_row, row.sample, row.position)
                    window = None if self.audio is None or number else self.audio.window(frames, found.fps)
                    clips.append(Clip(at, *whose, found, request, frames, window=window))
                    at += 1
        return clips

    def _info(self, row: BatchRow, stream: str) -> StreamInfo:
        info = row.shard.info(row.shard_row, stream)
        if info.codec not in self.backend.codecs:
            known = ", ".join(sorted(codec.label for codec in self.backend.codecs))
            raise UsageError(
                f"decoder {self.backend.name!r} does not decode {info.codec.label}", hint=f"use one of {known}"
            )
        return info
