"""Random access to frames of samples, for notebooks, pages and checks.

    dataset = fastvid.open("shards/mine", split="train")
    video = dataset["some_key"]
    video.frames([0, 8]).data            # uint8 [2, H, W, 3]
    video.frames(seconds=[1.2, 3.4])     # the frames shown at these times

Like the loader, reads and decodes only the planned packets, and checks their checksums. Datasets, videos and frames
display themselves in notebooks; `show` and `save` do so elsewhere.
"""

from __future__ import annotations

from fastvid.decode.access.dataset import VideoDataset
from fastvid.decode.access.dataset import open as open  # noqa: A004 - users type fastvid.open
from fastvid.decode.access.frames import FrameBatch, decode_frames
from fastvid.decode.access.video import Video

__all__ = ["FrameBatch", "Video", "VideoDataset", "decode_frames", "open"]
