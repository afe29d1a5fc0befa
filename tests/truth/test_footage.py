"""Real footage in place and encoded: the same orientation, proportions, times and colours."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

import fastvid
from fastvid.errors import FastvidError
from tests import forks
from tests.datasets import REPOSITORY
from tests.truth.judge import fitted
from tests.truth.test_truth import _record

FOOTAGE = REPOSITORY.parent / "shared" / "videos"
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not FOOTAGE.is_dir(), reason="no footage beside the repository"),
]
MOST_MEAN, LEAST_SSIM = 2.5, 0.95
FRAMES = 8


def ssim(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean structural similarity of two pictures of luma, over blocks of 8 by 8."""
    height, width = (side // 8 * 8 for side in one.shape)
    a, b = (
        picture[:height, :width].reshape(height // 8, 8, width // 8, 8).swapaxes(1, 2).reshape(-1, 64).astype(float)
        for picture in (one, other)
    )
    mean_a, mean_b = a.mean(1), b.mean(1)
    covariance = (a * b).mean(1) - mean_a * mean_b
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    upper = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    lower = (mean_a**2 + mean_b**2 + c1) * (a.var(1) + b.var(1) + c2)
    return float((upper / lower).mean())


def difference(placed, encoded) -> str:
    """Return how two datasets' videos of one file differ."""
    sides = min(placed.height, placed.width)
    expected = [round(side * 256 / sides) for side in (placed.height, placed.width)]
    if any(not -2 <= one - got < 18 for one, got in zip(expected, (encoded.height, encoded.width), strict=True)):
        return f"{placed.width}x{placed.height} and {encoded.width}x{encoded.height}"
    numbers = np.unique(np.linspace(0, len(placed) - 1, FRAMES).round().astype(int))
    mine = placed.frames(numbers)
    # A frame of a constant rate is shown for longer than its own time says, at most by half a frame.
    times = np.minimum(mine.seconds, float(encoded.duration) - 0.5 / float(encoded.fps))
    theirs = encoded.frames(seconds=times)
    if np.abs(theirs.seconds - mine.seconds).max() > 0.5 / float(min(placed.fps, encoded.fps)) + 2e-3:
        return f"{np.abs(theirs.seconds - mine.seconds).max():.3f} s apart"
    half = [side // 2 for side in theirs.data.shape[1:3]]
    shown, expected_ = fitted(theirs.data, *half), fitted(fitted(mine.data, *theirs.data.shape[1:3]), *half)
    mean = float(np.median(np.abs(shown - expected_).mean((1, 2, 3))))
    alike = float(np.median([ssim(a.mean(-1), b.mean(-1)) for a, b in zip(shown, expected_, strict=True)]))
    return "" if mean <= MOST_MEAN and alike >= LEAST_SSIM else f"mean {mean:.2f}, SSIM {alike:.3f}"


@pytest.mark.parametrize("folder", ["clean", "odd"])
def test_index_and_encoding_of_it_are_alike(folder, tmp_path):
    """The same files indexed in place, encoded, and encoded from the dataset in place."""
    placed, sharded, again = tmp_path / "placed", tmp_path / "sharded", tmp_path / "again"
    for words in (
        ("index", FOOTAGE / folder, "--out", placed),
        ("shard", FOOTAGE / folder, "--out", sharded),
        ("transcode", placed, "--out", again, "--profile", "compact"),
    ):
        done = forks.fastvid(*words, "--allow-rejected")
        assert done.returncode == 0, done.stderr
    twins = {"shard": _by_source(sharded), "transcode": {video.key: video for video in fastvid.open(again)}}
    counts, wrong = Counter(), []
    for source, video in _by_source(placed).items():
        for kind, others in twins.items():
            twin = others.get(source if kind == "shard" else video.key)
            if twin is None:
                counts[f"{kind}: not packed"] += 1
                continue
            try:
                message = difference(video, twin)
            except FastvidError as error:
                message = str(error)
            counts[f"{kind}: {'different' if message else 'alike'}"] += 1
            if message:
                wrong.append(f"{kind} of {source}: {message}")
    _record("footage", folder, dict(counts))
    assert not wrong, "\n".join(wrong)


def _by_source(out):
    rows = pq.read_table(out / "ledger.parquet").to_pylist()
    sources = {row["key"]: row["source_id"] for row in rows if row["status"] == "packed"}
    return {sources[video.key]: video for video in fastvid.open(out)}
