"""The clips that decoders are compared on: a dataset, which frames of each video, which crop.

Everyone gets the same frames and crops of the same MP4s, which lie in the dataset's tars and, for decoders that would
rather have files, beside them as files.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from fastvid.decode.access import VideoDataset
from fastvid.decode.access import open as open_dataset
from fastvid.decode.request import Box, ClipRequest
from fastvid.errors import UsageError

CROP: Final = 224

# Frames of a clip: eight segments, one random frame of each (TSN); or 16 or 32 frames at a stride.
SAMPLINGS: Final = {"tsn8": None, "dense16x4": (16, 4), "dense32x2": (32, 2)}


@dataclass(frozen=True)
class Corpus:
    """Clips of a dataset; small and picklable, opened where it is used.

    Attributes:
        folder: The dataset.
        sampling: A key of SAMPLINGS.
        repeats: Clips of each video.
        seed: Of frames and crops.
    """

    folder: str
    sampling: str
    repeats: int = 2
    seed: int = 0

    def __reduce__(self) -> tuple[object, ...]:
        # What was read stays behind when a corpus travels to a worker process.
        return Corpus, (self.folder, self.sampling, self.repeats, self.seed)

    @cached_property
    def dataset(self) -> VideoDataset:
        """The dataset."""
        return open_dataset(self.folder)

    @cached_property
    def requests(self) -> list[ClipRequest]:
        """The clips, in an order that mixes the videos."""
        rng = np.random.default_rng(self.seed)
        requests = []
        for sample in np.tile(np.arange(len(self.dataset)), self.repeats).tolist():
            video = self.dataset[sample]
            if min(video.height, video.width) < CROP:
                raise UsageError(f"{video} is smaller than the {CROP}-pixel crop")
            y, x = (int(rng.integers(0, (side - CROP) // 2 + 1)) * 2 for side in (video.height, video.width))
            frames = choose(video.num_frames, self.sampling, rng)
            requests.append(ClipRequest(sample, frames, Box(y, x, CROP, CROP), (CROP, CROP)))
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


def choose(num_frames: int, sampling: str, rng: np.random.Generator) -> np.ndarray:
    """Frame indices of one clip, int64 [T], sorted."""
    dense = SAMPLINGS[sampling]
    if dense is None:
        edges = np.linspace(0, num_frames, 9)
        return np.minimum((edges[:-1] + rng.random(8) * np.diff(edges)).astype(np.int64), num_frames - 1)
    count, stride = dense
    start = int(rng.integers(0, max(1, num_frames - (count - 1) * stride)))
    # Videos shorter than the clip repeat their last frame.
    return np.minimum(start + np.arange(count, dtype=np.int64) * stride, num_frames - 1)


def shard(footage: Path, profile: str, cache: Path) -> Path:
    """The dataset of `footage` in a profile, made on first use."""
    folder = cache / profile
    if not (folder / "dataset.json").exists():
        command = [sys.executable, "-m", "fastvid", "shard", str(footage), "--out", str(folder), "--profile", profile]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        # 3: complete, but some sources were rejected.
        if done.returncode not in (0, 3):
            raise UsageError(f"`{' '.join(command[1:])}` failed with exit code {done.returncode}")
    return folder
