"""Loaders with batches of varying shape over a dataset in memory, and their batches as comparable rows."""

import zlib
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np

from fastvid.load.clips.crops import HorizontalFlip, Native
from fastvid.load.clips.sampling import Segments
from fastvid.load.order.buckets import Buckets
from fastvid.load.order.draws import Purpose
from fastvid.load.order.packed import Packed
from tests.load.fakes import FakeDataset
from tests.load.tools import make

LOOKS = (
    (Fraction(10), 32, 48),
    (Fraction(5), 48, 32),
    (Fraction(30_000, 1001), 32, 32),
    (Fraction(25), 20, 64),
    (Fraction(12), 66, 21),
)
FakeVideos = partial(FakeDataset, looks=LOOKS)
"""Samples of 1 to 12 frames, and of several rates and sizes."""


@dataclass(frozen=True)
class Every:
    """Every `step`-th frame from a random start on: the number of frames depends on the video."""

    step: int = 1

    def draw(self, video, draws):
        first = draws.integers(Purpose.FRAMES, min(self.step, video.num_frames), 1)[0]
        count = -(-video.num_frames // self.step)
        return np.minimum(first + np.arange(count) * self.step, video.num_frames - 1)

    def count(self, num_frames, fps):
        return -(-num_frames // self.step)

    def of_length(self, length):
        return Segments(length)


BUCKETS = Buckets([(1, 16, 24), (4, 16, 24), (4, 24, 16), (8, 16, 16)], [9, 7, 7, 8])
PACKED = Packed(200, (2, 8, 8), bins=7, window=16, quadratic_from=20)
SPATIAL = (Native(8), HorizontalFlip(0.5))


def loaders(dataset, batches, world, **options):
    """Return the loaders of all ranks."""
    standard = {"global_batch_size": None, "frames": Every(), "spatial": SPATIAL, "batches": batches, "num_threads": 2}
    return [make(dataset, **standard | options, rank=rank, world_size=world) for rank in range(world)]


def rows(batch):
    """Return the contents of a batch's valid rows, comparable, sorted: which rank has which depends on the world."""
    edges = batch.cu_seqlens.tolist() if "cu_seqlens" in batch else range(batch.num_rows + 1)
    found = []
    for row in range(batch.num_rows):
        if batch.valid[row]:
            video = batch.video[edges[row] : edges[row + 1]]
            frames = [frame for frame in batch.frame_index[row].tolist() if frame >= 0]
            content = (tuple(video.shape), zlib.crc32(video.contiguous().numpy().tobytes()))
            found.append((int(batch.position[row]), int(batch.sample[row]), batch.key[row], tuple(frames), *content))
    return found


def together(ranks):
    """Return the rest of an epoch as global batches: start, stop and sorted rows."""
    found = []
    for batches in zip(*ranks, strict=True):
        (edges,) = {(batch.start, batch.stop) for batch in batches}
        found.append((*edges, sorted(row for batch in batches for row in rows(batch))))
    return found
