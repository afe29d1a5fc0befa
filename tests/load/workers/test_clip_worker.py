"""The clip worker, called as threads and processes call it."""

from __future__ import annotations

import numpy as np
import pytest

from fastvid.decode.request import Rgb
from fastvid.load.clips.sampling import Segments
from fastvid.load.workers.clip_worker import ClipWorker, Row, Watched, fetch_clip
from tests.load.fakes import FakeDataset, GroupDecoder, RgbDecoder, fake, picture
from tests.load.tools import plan_of

FRAMES = 3


class Rows:
    """A target with one array per row."""

    def __init__(self, dataset, samples):
        self.plan = plan_of(dataset, Segments(FRAMES, jitter=False), samples=samples, decoder=fake())
        self.place, self.request = self.plan.place, self.plan.request
        self.packets, self.sounds = {}, {}
        self.data = np.zeros((len(samples), 3, FRAMES, 16, 16), np.uint8)
        self.rows = [Row(self, number) for number in range(len(samples))]

    def output(self, row, kinds):
        assert Rgb in kinds
        return Rgb(self.data[row])


class Seen(Watched):
    """Notes which rows a worker processes, and is over after some of these steps."""

    def __init__(self, steps=100):
        self.steps, self.seen = steps, []

    @property
    def is_over(self):
        return len(self.seen) > self.steps

    @property
    def rows(self):
        return self.seen[-1]

    @rows.setter
    def rows(self, rows):
        self.seen.append([one.row for one in rows])


def made_by(worker, rows, watch=None):
    """Return the results of a worker: number of each row, its error and its cost."""
    made = []
    worker.make(rows, watch or Watched(), lambda row, error, costs: made.append((row.row, error, costs)))
    return made


def test_rows_and_packets_decode_to_the_same_pictures():
    read, fetched = (Rows(FakeDataset(40), [3, 17, 39]) for _ in range(2))
    fetched.packets = {row.row: fetch_clip(row)[0] for row in fetched.rows}
    for target in (read, fetched):
        made = made_by(ClipWorker(RgbDecoder()), target.rows)
        assert [(row, error) for row, error, _ in made] == [(0, None), (1, None), (2, None)]
        assert sum(costs.clips for _, _, costs in made) == 3
        # Bytes are counted by whoever read them.
        assert all((costs.bytes_read > 0) == (target is read) for _, _, costs in made)
    assert (read.data == fetched.data).all()
    request = read.request(1)
    assert read.data[1, :, 2, 0, 0].tolist() == list(picture(17, int(request.frames[2]), request.box, False))


@pytest.mark.parametrize(("most", "groups"), [(None, [5, 2]), (1, [1] * 7)])
def test_clips_are_decoded_in_groups_of_the_decoder_or_fewer(most, groups):
    GroupDecoder.groups.clear()
    watch, target = Seen(), Rows(FakeDataset(40), range(7))
    made_by(ClipWorker(GroupDecoder(), most), target.rows, watch)
    assert GroupDecoder.groups == groups
    # Rows are reported while fetching, all at once unless one is decoded at a time, then by group while decoding.
    fetched = [[n] for n in range(7)] if most == 1 else [[*range(7)]]
    assert watch.seen[: len(fetched)] == fetched
    assert [len(which) for which in watch.seen[len(fetched) :]] == groups


def test_no_row_begins_once_the_rest_is_not_needed():
    target = Rows(FakeDataset(40), range(4))
    made = made_by(ClipWorker(RgbDecoder()), target.rows, Seen(steps=5))
    assert [row for row, _, _ in made] == [0]  # four fetches, one decode
    assert not target.data[1:].any()
