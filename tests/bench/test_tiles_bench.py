"""The benchmark of tiles: rivals and encodings show the same clips, and a wrong cut is never timed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench import __main__ as command
from bench.decode import tiles
from fastvid.errors import JobError
from tests.sharding.shardtools import make

pytest.importorskip("PIL", reason="tiles are written by Pillow")


@pytest.mark.soak
def test_all_contenders_are_timed_on_the_same_clips(tmp_path, monkeypatch):
    make(tmp_path / "videos" / "a.mp4", size="448x256", frames=12)
    target = tmp_path / "tiles.json"
    words = ["tiles", "--footage", tmp_path / "videos", "--cache", tmp_path / "cache", "--json", target, "--installed"]
    words += ["--rounds", "1", "--repeats", "1"]
    assert command.main(list(map(str, words))) == 0
    record = json.loads(target.read_text())
    assert set(record["encodings"]) == {"tiles", "intra", "mjpeg"}
    assert all(0.8 < value <= 1 for one in record["encodings"].values() for value in one["ssim"])
    for row in record["rows"]:
        assert {"rgb of tiles", "torchcodec, rgb of mjpeg"} <= {one["label"] for one in row["contenders"]}
        assert 0 < row["share"] < 1
    assert all(one["shown"] <= one["decoded"] <= 1 for one in record["shares"])
    # With another picture than the whole decode's, nothing is timed.
    corpus = tiles.Cropped(str(tmp_path / "cache" / "tiles"), "tsn8", 1, shown="RandomCrop")
    tiles._compare(corpus)
    right = tiles.WholePictures.__call__
    monkeypatch.setattr(tiles.WholePictures, "__call__", lambda self, task: np.asarray(right(self, task)) ^ 1)
    with pytest.raises(JobError, match="differs from that of whole ones"):
        tiles._compare(corpus)
