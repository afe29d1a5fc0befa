"""The clip worker, called as threads and processes call it."""

from __future__ import annotations

import numpy as np
import pytest

from fastvid.decode.request import Rgb
from fastvid.errors import ChecksumError
from fastvid.load.clips.clip import BatchRow, ClipRules
from fastvid.load.clips.crops import CenterCrop, Spatial
from fastvid.load.clips.plan import ClipPlanner
from fastvid.load.clips.sampling import Segments
from fastvid.load.workers.clip_worker import ClipTask, ClipWorker, fetch_clip
from tests.load.fakes import FakeDataset, GroupDecoder, RgbDecoder, fake, picture

FRAMES = 3


class Rows:
    """A target with one array per row."""

    def __init__(self, rows):
        self.data = np.zeros((rows, 3, FRAMES, 16, 16), np.uint8)

    def output(self, row, kinds):
        assert Rgb in kinds
        return Rgb(self.data[row])


@pytest.fixture
def planner():
    return ClipPlanner(ClipRules((Segments(FRAMES, jitter=False),), (Spatial.of(CenterCrop(16)),)), 0, 0, fake())


def undecided(dataset, samples):
    return [BatchRow(n, dataset.key(s), dataset.shard(s // 16), s % 16, s, n) for n, s in enumerate(samples)]


def tasks_of(sources):
    rows = Rows(len(sources))
    return [ClipTask(number, source, rows) for number, source in enumerate(sources)], rows.data


def always(which):
    return True


def test_rows_clips_and_packets_decode_to_the_same_pictures(planner):
    rows = undecided(FakeDataset(40), [3, 17, 39])
    clips = [clip for row in rows for clip in planner.decide(row)]
    packets = [fetch_clip(clip)[0] for clip in clips]
    found = {}
    for name, sources in (("rows", rows), ("clips", clips), ("packets", packets)):
        tasks, pixels = tasks_of(sources)
        made = list(ClipWorker(RgbDecoder()).make(tasks, always, planner))
        assert [(one.number, one.error) for one in made] == [(0, None), (1, None), (2, None)]
        assert sum(one.counters.clips for one in made) == 3
        # Frames are reported by whoever planned the clip, bytes are counted by whoever read it.
        assert [one.frames is not None for one in made] == [name == "rows"] * 3
        assert all((one.counters.bytes_read > 0) == (name != "packets") for one in made)
        found[name] = pixels
    assert (found["rows"] == found["clips"]).all()
    assert (found["rows"] == found["packets"]).all()
    request = clips[1].request
    assert found["rows"][1, :, 2, 0, 0].tolist() == list(picture(17, int(request.frames[2]), request.box, False))


def test_failed_clip_does_not_affect_its_neighbours(planner):
    dataset = FakeDataset(40)
    dataset.damage(17)
    tasks, pixels = tasks_of(undecided(dataset, [3, 17, 39]))
    made = {one.number: one for one in ClipWorker(RgbDecoder()).make(tasks, always, planner)}
    assert isinstance(made[1].error, ChecksumError)
    assert (made[1].frames, made[1].counters.clips) == (None, 0)
    assert (made[0].error, made[2].error) == (None, None)
    assert [bool(row.any()) for row in pixels] == [True, False, True]


@pytest.mark.parametrize(("most", "groups"), [(None, [5, 2]), (1, [1] * 7)])
def test_clips_are_decoded_in_groups_of_the_decoder_or_fewer(planner, most, groups):
    GroupDecoder.groups.clear()
    seen = []
    tasks, _ = tasks_of(undecided(FakeDataset(40), range(7)))
    list(ClipWorker(GroupDecoder(), most).make(tasks, lambda which: seen.append(list(which)) or True, planner))
    assert GroupDecoder.groups == groups
    # Tasks are reported one by one while fetching, then by group while decoding.
    assert seen[:7] == [[n] for n in range(7)]
    assert [len(which) for which in seen[7:]] == groups


def test_no_task_begins_after_keep_going_returns_false(planner):
    tasks, pixels = tasks_of(undecided(FakeDataset(40), range(4)))
    left = iter([True] * 5)
    made = list(ClipWorker(RgbDecoder()).make(tasks, lambda which: next(left, False), planner))
    assert [one.number for one in made] == [0]  # four fetches, one decode
    assert not pixels[1:].any()
