"""Encodings of equal quality: the search for a CRF, and the complete procedure on one short video."""

import pytest

import fastvid
from bench.decode import encodings
from bench.decode.encodings import TOLERANCE, equal_quality, search, ssim, videos
from fastvid.errors import UsageError
from tests.datasets import make_clip


@pytest.mark.parametrize("best", [10, 17, 23, 36])
def test_the_search_finds_the_nearest_crf_in_few_tries(best):
    tried = []

    def quality(crf):
        tried.append(crf)
        return 1 - crf / 100

    assert search(quality, 1 - (best + 0.2) / 100) == best
    assert len(tried) <= 5


def test_two_videos_with_the_same_stem_are_refused(tmp_path):
    for name in ("a.mp4", "a.avi"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="same name"):
        videos(tmp_path)
    assert list(videos(tmp_path, "*.mp4")) == ["a"]


@pytest.mark.soak
def test_encodings_of_a_video_have_equal_ssim_and_are_cached(tmp_path, monkeypatch):
    footage, cache = tmp_path / "footage", tmp_path / "cache"
    footage.mkdir()
    make_clip(footage / "one.mp4", frames=40, size="320x256")
    default, intra = equal_quality(footage, ["intra"], cache)
    assert abs(intra.mean_ssim - default.mean_ssim) <= TOLERANCE
    assert (default.name, default.crf) == ("default", 23)
    assert default.as_row()["ssim_videos"] == 1
    ours, theirs = (fastvid.open(encoding.folder)[0] for encoding in (intra, default))
    assert (ours.num_frames, ours.width, ours.height) == (theirs.num_frames, theirs.width, theirs.height)
    frames = list(range(1, 40, 5))
    assert len(ours.table.plan(frames).packets) == 8
    assert theirs.table.plan(frames).packets_from_keys > 30

    # Nothing is encoded or compared twice.
    monkeypatch.setattr(encodings, "compare", None)
    assert ssim(intra.folder, videos(footage)) == intra.ssim
    again = equal_quality(footage, ["intra"], cache)
    assert [one.as_row() for one in again] == [default.as_row(), intra.as_row()]
    # If no CRF reaches the quality, it is an error.
    monkeypatch.setattr(encodings, "search", lambda *_: intra.crf)
    monkeypatch.setattr(encodings, "TOLERANCE", -1.0)
    with pytest.raises(UsageError, match="SSIM"):
        equal_quality(footage, ["intra"], cache)
