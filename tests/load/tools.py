"""Make loaders over a dataset in memory, and convert their batches to comparable rows."""

import json
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from fastvid.decode.backends import backend
from fastvid.decode.request import Box
from fastvid.load.clips.clip import ClipRules
from fastvid.load.clips.crops import CenterCrop, HorizontalFlip, RandomCrop, Spatial
from fastvid.load.clips.plan import Planner
from fastvid.load.clips.sampling import Segments, VideoInfo
from fastvid.load.clips.views import ONE_VIEW, Views
from fastvid.load.order.draws import BatchDraws, Draws, Permutation
from fastvid.load.order.epoch import Share
from tests.load.fakes import HEIGHT, WIDTH, fake
from tests.load.loaders import clip_loader

SPATIAL = (RandomCrop(16), HorizontalFlip(0.5))


def make(dataset, **options):
    standard = {"frames": Segments(3), "spatial": SPATIAL, "global_batch_size": 8, "decoder": fake()}
    standard |= {"num_threads": 2, "dtype": torch.uint8}
    return clip_loader(dataset, **standard | options)


def video(num_frames, fps=25.0, *, height=HEIGHT, width=WIDTH):
    """Return the facts of a video."""
    return VideoInfo(num_frames, fps, width, height, "key")


def rows(batch):
    """Return the contents of a batch's valid rows, comparable."""
    columns = (batch.position, batch.sample, batch.key, batch.label, batch.frame_index, batch.video, batch.valid)
    return [
        (int(p), int(s), key, int(label), tuple(frames.tolist()), video.numpy().tobytes())
        for p, s, key, label, frames, video, valid in zip(*columns, strict=True)
        if valid
    ]


class View(NamedTuple):
    """The region of a video that a clip shows."""

    box: Box
    size: tuple[int, int]
    flip: bool


FIRST = Draws(0, 0, 0)


def views_of(spatial, height, width, draws=FIRST, views=ONE_VIEW):
    """Return what the views of a video of this size show."""
    cuts = spatial.cuts([height], [width], BatchDraws(draws.seed, draws.epoch, np.array([draws.position])))
    cuts = views.divided(cuts, np.array([height]), np.array([width]))
    return [View(Box(*cut[:4]), tuple(cut[4:6]), bool(cut[6])) for cut in cuts.tolist()]


def channels_are_neighbours(video, layout="BCTHW"):
    """Return whether a batch is in torch's channels-last memory format."""
    first = video if layout == "BCTHW" else video.transpose(1, 2)
    return first.is_contiguous(memory_format=torch.channels_last_3d)


def epoch_of(dataset, world, **options):
    """Return the rest of an epoch as global batches: the rows of all ranks in order."""
    ranks = [make(dataset, rank=rank, world_size=world, **options) for rank in range(world)]
    return [[row for batch in batches for row in rows(batch)] for batches in zip(*ranks, strict=True)]


def walk(dataset, legs, *, epoch=0, unit=1, of=rows, **options):
    """Return what `of` shows of an epoch that loaders continue at every checkpoint with another world and batch size.

    `legs`: for each the world, the clips of a batch besides those of the ranks, and the batches before the next leg.
    """
    delivered, first = [], make(dataset, global_batch_size=unit, **options)
    state = json.dumps({**first.state_dict(), "epoch": epoch})
    for number, (world, more, steps) in enumerate(legs):
        size = {"world_size": world, "global_batch_size": unit * (world + more)}
        ranks = [make(dataset, rank=rank, **size, **options) for rank in range(world)]
        for rank in ranks:
            rank.load_state_dict(json.loads(state))
        if ranks[0].epoch > epoch:  # nothing of the epoch is left
            break
        iterators = [iter(rank) for rank in ranks]
        for step, batches in enumerate(zip(*iterators, strict=True)):
            if step == steps and number < len(legs) - 1:
                break
            delivered += [row for batch in batches for row in of(batch)]
            (state,) = {json.dumps(rank.state_dict()) for rank in ranks}
        for iterator in iterators:
            iterator.close()
    return delivered


def plan_of(dataset, frames=None, samples=range(6), decoder=None):
    """Return the plan of a batch of these samples."""
    rules = ClipRules((frames or Segments(2),), (Spatial.of(CenterCrop(16)),))
    planner = Planner(dataset, rules, Permutation(len(dataset), 0, 0), decoder or backend("pyav"))
    share = Share(0, len(samples), np.arange(len(samples)))
    return planner.plan(share, np.array(samples, dtype=np.int64))


def fastvid_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fastvid-")]


def until(reached, seconds=60.0):
    """Wait until `reached` returns True; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, f"not reached within {seconds:g} s"
        time.sleep(0.002)


class Own:
    """A sampler of a user: `draw` is all that it has, besides the `others` that are given."""

    def __init__(self, choose, **others):
        self.choose = choose
        vars(self).update(others)

    def __repr__(self):
        return "Own()"

    def draw(self, video, draws):
        return self.choose(video, draws)


@dataclass(frozen=True)
class FixedFrames:
    """A sampler of clip `clip` of the `count` clips that another sampler spreads over a video."""

    of: object
    clip: int
    count: int

    @property
    def num_frames(self):
        return self.of.num_frames

    def draw(self, video, draws):
        return self.of.spread(video, self.count)[self.clip]


@dataclass(frozen=True)
class FixedCrop:
    """A crop that is crop `number` of some views."""

    spatial: Spatial
    views: Views
    number: int

    @property
    def output(self):
        return self.spatial.crop.output

    def draw(self, height, width, draws):
        return views_of(self.spatial, height, width, views=self.views)[self.number].box
