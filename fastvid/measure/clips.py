"""The clips to be timed: a dataset, and the frames and crop of each clip.

All contenders decode the same frames and crops of the same MP4s. These are stored in the dataset's tars and, for
decoders that need files, also as files next to the dataset.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from fastvid.decode.access import VideoDataset
from fastvid.decode.access import open as open_dataset
from fastvid.decode.request import Box, ClipRequest
from fastvid.errors import UsageError
from fastvid.runtime.arrays import IntArray

CROP: Final = 224
"""Side of the square crop in pixels, as usual for networks trained on 256-pixel videos."""

_SAMPLING: Final = re.compile(r"tsn(\d+)|dense(\d+)x(\d+)")


def parse_sampling(text: str) -> tuple[int, int | None]:
    """Return the number of frames per clip and their stride.

    ``tsn8`` is one random frame from each of eight segments, with stride None; ``dense16x4`` is sixteen frames, four
    apart.
    """
    found = _SAMPLING.fullmatch(text)
    count, stride = (int(found[1] or found[2]), int(found[3] or 0) or None) if found else (0, None)
    if found is None or not count or (found[2] and stride is None):
        raise UsageError(f"unknown sampling {text!r}", hint="use tsn8, or dense16x4 for 16 frames 4 apart")
    return count, stride


@dataclass(frozen=True)
class Corpus:
    """Clips of a dataset; small and picklable, because the dataset is opened lazily."""

    folder: str
    sampling: str
    repeats: int = 2
    seed: int = 0  # seed of frames and crops
    crop: int = CROP  # side of the crop in pixels, for videos whose short side is `of`
    of: int | None = None
    keys: tuple[str, ...] | None = None  # samples to use; None for all
    # clips of one visit to a video, with the same crop: their frames are one request, one clip after the other.
    together: int = 1

    def __reduce__(self) -> tuple[object, ...]:
        # Do not pickle the cached properties.
        place = (self.crop, self.of, self.keys, self.together)
        return Corpus, (self.folder, self.sampling, self.repeats, self.seed, *place)

    @cached_property
    def dataset(self) -> VideoDataset:
        """The dataset."""
        return open_dataset(self.folder)

    @cached_property
    def requests(self) -> list[ClipRequest]:
        """The clips, with videos in random order."""
        rng = np.random.default_rng(self.seed)
        count = len(self.dataset)
        samples = np.arange(count) if self.keys is None else np.asarray([self.dataset.find(key) for key in self.keys])
        requests = []
        for sample in np.tile(samples, self.repeats).tolist():
            video = self.dataset[sample]
            sides = (video.height & ~1, video.width & ~1)
            side = self.crop if self.of is None else min(2 * round(self.crop * min(sides) / self.of / 2), *sides)
            if min(sides) < side:
                raise UsageError(f"{video} is smaller than the {side}-pixel crop")
            y, x = (int(rng.integers(0, (length - side) // 2 + 1)) * 2 for length in sides)
            clips = [sample_frames(video.num_frames, self.sampling, rng) for _ in range(self.together)]
            frames = clips[0] if self.together == 1 else np.concatenate(clips)
            requests.append(ClipRequest(sample, frames, Box(y, x, side, side), (side, side)))
        return [requests[place] for place in rng.permutation(len(requests)).tolist()]

    def mp4(self, sample: int) -> bytes:
        """Read a sample's MP4 from its tar."""
        shards, rows = self.dataset.locate([sample])
        shard = self.dataset.shard(int(shards[0]))
        start, size = shard.member(int(rows[0]))
        data = bytearray(size)
        shard.storage.read_into(shard.data, [(start, memoryview(data))])
        return bytes(data)

    @cached_property
    def mp4s(self) -> list[bytes]:
        """Every sample's MP4, in memory."""
        return [self.mp4(sample) for sample in range(len(self.dataset))]

    @cached_property
    def files(self) -> list[str]:
        """Paths of every sample's MP4 as a separate file, in a folder next to the dataset."""
        folder = Path(f"{self.folder.rstrip('/')}.files")
        folder.mkdir(exist_ok=True)
        paths = []
        for sample in range(len(self.dataset)):
            path = folder / f"{sample:06d}.mp4"
            data = self.mp4(sample)
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)
            paths.append(str(path))
        return paths

    def mean_packets(self) -> dict[str, float]:
        """Return the mean packets per clip that fastvid decodes, and that a decoder without a plan decodes."""
        plans = [self.dataset[request.sample].table.plan(request.frames) for request in self.requests]
        return {
            "planned": float(np.mean([len(plan.packets) for plan in plans])),
            "from_keys": float(np.mean([plan.packets_from_keys for plan in plans])),
        }


def sample_frames(num_frames: int, sampling: str, rng: np.random.Generator) -> IntArray:
    """Draw the frame indices of one clip, int64 [T], sorted."""
    count, stride = parse_sampling(sampling)
    if stride is None:
        edges = np.linspace(0, num_frames, count + 1)
        picks = (edges[:-1] + rng.random(count) * np.diff(edges)).astype(np.int64)
    else:
        start = int(rng.integers(0, max(1, num_frames - (count - 1) * stride)))
        picks = start + np.arange(count, dtype=np.int64) * stride
    # Videos shorter than the clip repeat their last frame.
    return np.minimum(picks, num_frames - 1)
