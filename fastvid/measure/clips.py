"""The clips that are timed: a dataset, which frames of each video, which crop.

Everyone who is compared gets the same frames and crops of the same MP4s, which lie in the dataset's tars and, for
decoders that would rather have files, beside them as files.
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
"""Pixels of a square crop's side: what networks for 256-pixel videos take."""

_SAMPLING: Final = re.compile(r"tsn(\d+)|dense(\d+)x(\d+)")


def parse_sampling(text: str) -> tuple[int, int | None]:
    """Frames of a clip and their stride: ``tsn8`` is one random frame of each of eight segments, without a stride;
    ``dense16x4`` sixteen frames, four apart.

    Raises:
        UsageError: It is neither.
    """
    found = _SAMPLING.fullmatch(text)
    count, stride = (int(found[1] or found[2]), int(found[3] or 0) or None) if found else (0, None)
    if found is None or not count or (found[2] and stride is None):
        raise UsageError(f"sampling {text!r} is not understood", hint="tsn8, or dense16x4 for 16 frames 4 apart")
    return count, stride


@dataclass(frozen=True)
class Corpus:
    """Clips of a dataset; small and picklable, opened where it is used.

    Attributes:
        folder: The dataset.
        sampling: See `parse_sampling`.
        repeats: Clips of each video.
        seed: Of frames and crops.
        crop: Side of the crop in pixels, of videos whose short side is `of`; None crops that many pixels of any.
        of: See `crop`; crops of larger videos are larger in proportion.
        keys: Samples to take; all by default.
    """

    folder: str
    sampling: str
    repeats: int = 2
    seed: int = 0
    crop: int = CROP
    of: int | None = None
    keys: tuple[str, ...] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        # What was read stays behind when a corpus travels to a worker process.
        return Corpus, (self.folder, self.sampling, self.repeats, self.seed, self.crop, self.of, self.keys)

    @cached_property
    def dataset(self) -> VideoDataset:
        """The dataset."""
        return open_dataset(self.folder)

    @cached_property
    def requests(self) -> list[ClipRequest]:
        """The clips, in an order that mixes the videos."""
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
            frames = choose(video.num_frames, self.sampling, rng)
            requests.append(ClipRequest(sample, frames, Box(y, x, side, side), (side, side)))
        return [requests[place] for place in rng.permutation(len(requests)).tolist()]

    def mp4(self, sample: int) -> bytes:
        """A sample's MP4, read from its tar."""
        shards, rows = self.dataset.locate([sample])
        shard = self.dataset.shard(int(shards[0]))
        start, size = shard.member(int(rows[0]))
        data = bytearray(size)
        shard.storage.read_into(shard.tar, [(start, memoryview(data))])
        return bytes(data)

    @cached_property
    def mp4s(self) -> list[bytes]:
        """Every sample's MP4, in memory."""
        return [self.mp4(sample) for sample in range(len(self.dataset))]

    @cached_property
    def files(self) -> list[str]:
        """Every sample's MP4 as a file of its own, in a folder beside the dataset."""
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

    def packets_a_clip(self) -> dict[str, float]:
        """Mean packets that fastvid feeds, and that a decoder without a plan feeds."""
        plans = [self.dataset[request.sample].table.plan(request.frames) for request in self.requests]
        return {
            "planned": float(np.mean([len(plan.packets) for plan in plans])),
            "from_keys": float(np.mean([plan.packets_from_keys for plan in plans])),
        }


def choose(num_frames: int, sampling: str, rng: np.random.Generator) -> IntArray:
    """Frame indices of one clip, int64 [T], sorted."""
    count, stride = parse_sampling(sampling)
    if stride is None:
        edges = np.linspace(0, num_frames, count + 1)
        picks = (edges[:-1] + rng.random(count) * np.diff(edges)).astype(np.int64)
    else:
        start = int(rng.integers(0, max(1, num_frames - (count - 1) * stride)))
        picks = start + np.arange(count, dtype=np.int64) * stride
    # Videos shorter than the clip repeat their last frame.
    return np.minimum(picks, num_frames - 1)
