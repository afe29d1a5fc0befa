"""What is decided about a clip before a byte of it is read: its frames, its crop, its flip.

Deciding is a pure function of the row, its shard's index and the epoch's numbers, so any thread, process or rank may
decide any clip. Nothing here knows the dataset, because worker processes decide clips too.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastvid.decode.backends import Backend
from fastvid.decode.request import ClipRequest
from fastvid.errors import UsageError
from fastvid.format.packets import StreamInfo
from fastvid.load.clips.augment import Spatial
from fastvid.load.clips.clip import Clip, Row
from fastvid.load.clips.sampling import Sampler
from fastvid.load.clips.streams import check_flow, flow_request, stack_frames
from fastvid.load.clips.views import ONE_VIEW, Views
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
        views: Clips and crops of each sample.
    """

    sampler: Sampler
    spatial: Spatial
    seed: int
    epoch: int
    backend: Backend
    streams: tuple[str, ...] = ("rgb",)
    flow_stack: int = 1
    views: Views = ONE_VIEW

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

    def decide(self, row: Row, rows: int = 1) -> list[Clip]:
        """The clips of a row: of each stream all views, of the same frames and the same crops.

        Args:
            row: The row.
            rows: Rows of its batch. View v of stream s of row r goes into row (s * rows + r) * V + v of the canvas.

        Raises:
            UsageError: The back-end does not decode the codec, or nothing can be cut.
            FormatError: The streams do not belong together.
        """
        infos = {stream: self._info(row, stream) for stream in self.streams}
        picture, flow = infos.get("rgb"), infos.get("flow")
        if flow is not None:
            check_flow(flow, picture)
        info = infos[self.streams[0]]
        height = info.height // 2 if picture is None else picture.height
        draws = Draws(self.seed, self.epoch, row.position)
        cuts = self.views.cuts(self.spatial, height, info.width, draws)
        shown = self.views.clips(self.sampler, info.num_frames, draws)
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
                    clips.append(Clip(at, *whose, found, request, frames))
                    at += 1
        return clips

    def _info(self, row: Row, stream: str) -> StreamInfo:
        info = row.shard.info(row.shard_row, stream)
        if info.codec not in self.backend.codecs:
            known = ", ".join(sorted(codec.label for codec in self.backend.codecs))
            raise UsageError(
                f"decoder {self.backend.name!r} does not decode {info.codec.label}", hint=f"it decodes {known}"
            )
        return info
