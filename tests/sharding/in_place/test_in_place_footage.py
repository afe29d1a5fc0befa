"""Real videos indexed in place: every frame of what is accepted is the one that a player shows."""

from __future__ import annotations

import shutil

import pytest

import fastvid
from fastvid.media.reasons import Reason
from fastvid.sharding.in_place import index_videos
from fastvid.sharding.verify.verify import verify_dataset
from tests.sharding.in_place import tools

FRAMES = 12
"""Frames of a file that are compared, each decoded from its own plan."""


@pytest.mark.parametrize(
    ("kind", "proof", "every", "least"),
    [
        pytest.param("clean", "none", 1, 47, marks=pytest.mark.soak),
        pytest.param("clean", "sample", 1, 47, marks=pytest.mark.soak),
        pytest.param("odd", "sample", 1, 95, marks=pytest.mark.soak),
        ("clean", "none", 12, 4),
        ("odd", "sample", 12, 8),
    ],
)
def test_every_frame_is_the_one_that_a_player_shows(footage, tmp_path, kind, proof, every, least):
    folder = tmp_path / kind
    folder.mkdir()
    for path in sorted((footage / kind).iterdir())[::every]:
        shutil.copyfile(path, folder / path.name)
    report = index_videos([str(folder)], tmp_path / "set", proof=proof, workers=2)
    assert report.packed >= least
    dataset = fastvid.open(tmp_path / "set")
    for sample in range(len(dataset)):
        path = folder / dataset.column("source_id")[sample].as_py()
        assert tools.wrong_frames(dataset, sample, path, most=FRAMES) == [], path
        # Its pictures can be converted, too.
        video = dataset[sample]
        assert video.frames([0]).data.shape == (1, video.height & ~1, video.width & ~1, 3), path
    assert verify_dataset(str(tmp_path / "set"), workers=2).problems == []


def test_bad_files_are_rejected_or_right(footage, tmp_path):
    good = next(path for path in sorted((footage / "clean").iterdir()) if path.suffix == ".mp4")
    report = index_videos([str(footage / "bad"), str(good)], tmp_path / "set", workers=2)
    assert report.rejected
    assert Reason.CRASHED not in report.rejected
    dataset = fastvid.open(tmp_path / "set")
    for sample in range(len(dataset)):
        path = footage / dataset.column("source_id")[sample].as_py()
        assert tools.wrong_frames(dataset, sample, path, most=FRAMES) == [], path
