"""What is decided about a clip before a byte of it is read: its frames, its crop, its flip.

Deciding is a pure function of the row, its shard's index and the epoch's numbers, so any thread, process or rank may
decide any clip. Nothing here knows the dataset, because worker processes decide clips too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fastvid.decode.backends import Backend
from fastvid.decode.request import ClipRequest
from fastvid.errors import UsageError
from fastvid.format.packets import StreamInfo
from fastvid.load.clips.augment import Spatial
from fastvid.load.clips.clip import Clip, Row
from fastvid.load.clips.joint import merged
from fastvid.load.clips.sampling import Sampler
from fastvid.load.clips.streams import IntArray, check_flow, flow_request, stack_frames
from fastvid.load.clips.views import Views, check_views
from fastvid.load.order.random_draws import Draws


@dataclass(frozen=True)
class ClipPlanner:
    """Decides clips.

    Attributes:
        sampler: Which frames.
        spatial: Which crop and flip.
        seed: What they are drawn from, with the epoch and a row's position.
        epoch: The epoch.
        backend: What will decode them; a codec that it does not know is refused here.
        streams: Which streams of a sample.
        flow_stack: Flows for each frame.
        views: Clips and crops of each sample; None for one clip, drawn at random or not as the sampler does.
    """

    sampler: Sampler
    spatial: Spatial
    seed: int
    epoch: int
    backend: Backend
    streams: tuple[str, ...] = ("rgb",)
    flow_stack: int = 1
    views: Views | None = None

    @property
    def travels(self) -> bool:
        """Whether worker processes may decide too: a user's own sampler or crop is asked only where it was defined, so
        that workers never import a user's modules."""
        own = __name__.partition(".")[0]
        return all(
            type(part).__module__.partition(".")[0] == own
            for part in (self.sampler, self.spatial.crop, self.spatial.flip)
            if part is not None
        )

    def decide(self, row: Row) -> list[Clip]:
        """One clip for each stream, of the same frames and the same crop, all in the row's place.

        Raises:
            UsageError: The back-end does not decode the codec, or views cannot be cut.
            FormatError: The streams do not belong together.
        """
        infos = {stream: self._info(row, stream) for stream in self.streams}
        picture, flow = infos.get("rgb"), infos.get("flow")
        if flow is not None:
            check_flow(flow, picture)
        info = infos[self.streams[0]]
        if self.views is not None:
            return [self._viewed(self.views, row, info)]
        height = info.height // 2 if picture is None else picture.height
        draws = Draws(self.seed, self.epoch, row.position)
        view = self.spatial.draw(height, info.width, draws)
        frames = self.sampler.draw(info.num_frames, draws)
        clips = []
        for stream, found in infos.items():
            if stream == "flow":
                stacked = stack_frames(frames, found.num_frames, self.flow_stack)
                request = flow_request(row.sample, stacked, view.box, view.size, found, flip=view.flip)
            else:
                request = ClipRequest(row.sample, frames, view.box, view.size, view.flip)
            clips.append(_decided(row, row.row, found, request, frames))
        return clips

    def _viewed(self, views: Views, row: Row, info: StreamInfo) -> Clip:
        """All views of a sample, to be decoded together."""
        first, size = row.row * views.num_views, self.spatial.crop.output
        frames = check_views(self.sampler, self.spatial).spread(info.num_frames, views.num_clips)
        cuts = views.cuts(self.spatial, info.height, info.width)
        requests = [ClipRequest(row.sample, shown, cut.box, size, cut.flip) for shown in frames for cut in cuts]
        parts = [
            _decided(row, first + number, info, request, request.frames) for number, request in enumerate(requests)
        ]
        shown = np.repeat(frames, len(cuts), axis=0)
        return replace(parts[0], row=row.row, frames=shown, read=merged(parts, row.row, [row.row]))

    def _info(self, row: Row, stream: str) -> StreamInfo:
        info = row.shard.info(row.shard_row, stream)
        if info.codec not in self.backend.codecs:
            known = ", ".join(sorted(codec.label for codec in self.backend.codecs))
            raise UsageError(
                f"decoder {self.backend.name!r} does not decode {info.codec.label}", hint=f"it decodes {known}"
            )
        return info


def _decided(row: Row, at: int, info: StreamInfo, request: ClipRequest, frames: IntArray) -> Clip:
    return Clip(at, row.key, row.shard, row.shard_row, row.sample, row.position, info, request, frames)
