"""Footage for benchmarks, and the similarity of its encodings."""

import subprocess

import numpy as np
import pytest

import fastvid
from bench.common import footage
from bench.common.footage import COPIED, X264, Kind, datasets, shard
from bench.decode import similarity
from bench.decode.similarity import ssim, videos
from fastvid.errors import UsageError
from fastvid.tune.measure import Corpus, FastvidRunner
from tests.datasets import make_clip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("footage")
    for name in ("a.mp4", "b.mp4"):
        make_clip(folder / name, frames=10, size="160x120")
    (folder / "c.mp4").write_bytes(b"no video")
    kind = Kind((96, 128), 12, 3, 2, X264, (COPIED, "intra"), ("tsn8",), 64, loops=2)
    patch = pytest.MonkeyPatch()
    patch.setattr(footage, "KINDS", {"small": kind})
    cache = tmp_path_factory.mktemp("cache")
    found = dict(datasets("small", folder, cache))
    # Nothing is made twice.
    patch.setattr(subprocess, "run", None)
    assert dict(datasets("small", None, cache)) == found
    patch.undo()
    return found


@pytest.mark.soak
def test_footage_has_the_size_and_length_of_its_kind(made):
    for profile, folder in made.items():
        videos = list(fastvid.open(folder))
        assert [(video.height, video.width, video.num_frames) for video in videos] == [(96, 128, 72)] * 2, profile
    # It is encoded again in a profile, and as it was otherwise.
    one, other = (fastvid.open(folder)[0].table for folder in made.values())
    assert one.plan([30]).packets_from_keys > other.plan([30]).packets_from_keys == 1


@pytest.mark.soak
def test_a_video_repeats_itself_after_its_loop(made):
    video = fastvid.open(made["intra"])[0]
    first, second = video.frames([5]).data, video.frames([5 + 36]).data
    assert np.array_equal(np.asarray(first), np.asarray(second))


def test_footage_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="--footage"):
        next(datasets("robot", None, tmp_path))
    with pytest.raises(UsageError, match="no videos"):
        next(footage.frames(tmp_path, 0, 1, (96, 128)))


@pytest.mark.soak
def test_clips_of_one_visit_are_one_request_that_decodes_a_packet_once(made):
    corpus = Corpus(str(made["intra"]), "tsn8", repeats=1, crop=64, together=4)
    for request in corpus.requests:
        assert len(request.frames) == 32
        assert all((np.diff(clip) >= 0).all() for clip in request.frames.reshape(4, 8))
        table = corpus.dataset[request.sample].table
        assert len(table.plan(request.frames).packets) == len(set(request.frames.tolist()))
    assert FastvidRunner(corpus, "rgb", "memory")(0).shape == (32, 64, 64, 3)


def test_two_videos_with_the_same_stem_are_refused(tmp_path):
    for name in ("a.mp4", "a.avi"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="same name"):
        videos(tmp_path)
    assert list(videos(tmp_path, "*.mp4")) == ["a"]


@pytest.mark.soak
def test_a_coarser_encoding_is_less_similar_and_is_compared_once(tmp_path, monkeypatch):
    footage = tmp_path / "footage"
    footage.mkdir()
    make_clip(footage / "one.mp4", frames=20, size="320x256")
    fine, coarse = (shard(footage, "intra", tmp_path, options=("--crf", crf), name=crf) for crf in ("20", "45"))
    found = ssim(fine, videos(footage))
    assert ssim(coarse, videos(footage))["one"] < 0.99 * found["one"] < 1
    monkeypatch.setattr(similarity, "compare", None)
    assert ssim(fine, videos(footage)) == found
