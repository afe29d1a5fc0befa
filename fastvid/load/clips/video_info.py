"""What a frame sampler sees of a video: facts that are known before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

NO_ANNOTATIONS: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """The facts of one video.

    Attributes:
        num_frames: Number of frames F, at least 1.
        fps: Frames per second: the double nearest to the exact rate, as in the annotations.
        width: Width of the stored frames in pixels.
        height: Height of the stored frames in pixels.
        key: The sample's key.
        annotations: The sample's row of the annotations by column; a column is read when it is first used. Empty in
            worker processes, which run fastvid's own samplers only.
        anchor: Frame that the clip is about, of an item of `EveryFrame`; None if the sampler chooses.
    """

    num_frames: int
    fps: float
    width: int
    height: int
    key: str = ""
    annotations: Mapping[str, Any] = field(default_factory=lambda: NO_ANNOTATIONS, compare=False, repr=False)
    anchor: int | None = None

    @property
    def duration(self) -> float:
        """Duration in seconds, num_frames / fps, as in the annotations."""
        return self.num_frames / self.fps
