"""Real footage in place and encoded: the same orientation, proportions, times and colours."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import fastvid
from fastvid.errors import FastvidError
from tests import forks
from tests.truth.judge import fitted

pytestmark = pytest.mark.soak
MOST_MEAN, LEAST_SSIM = 2.5, 0.95
# Colours that are stored for every pixel lie up to half a pixel aside once they are stored for every fourth.
MOST_BESIDE = 5.0
LUMA = (0.299, 0.587, 0.114)
FRAMES = 8
SHORT = 256
FINE = ("--profile", "compact", "--crf", "8", "--enlarge")


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


def opened(path: Path, placed) -> tuple[Fraction, str]:
    """Return the width of a file's upright pictures over their height, to the pixel, and its pixel format."""
    with av.open(str(path), metadata_errors="replace") as container:
        stream = container.streams.video[0]
        aspect = Fraction(stream.sample_aspect_ratio or 1)
        shape = Fraction(placed.width, placed.height)
        if aspect != 1:
            shape = Fraction(stream.width, stream.height) * aspect
            shape = 1 / shape if (shape > 1) != (placed.width > placed.height) else shape
        return shape, stream.pix_fmt


def encoded_as(shape: Fraction, placed, pictures: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return pictures in place as a profile scales and cuts them, float32 [N, H, W, 3].

    To the pixel, and with the last row and column that an odd size loses in place repeated: at edges half a pixel is
    more than what is to be measured.
    """
    lost = [(0, side - there) for side, there in zip((placed.height, placed.width), pictures.shape[1:3], strict=True)]
    pictures = np.pad(pictures, [(0, 0), *lost, (0, 0)], mode="edge")
    long = 2 * round(max(shape, 1 / shape) * SHORT / 2)
    scaled = (SHORT, long) if shape >= 1 else (long, SHORT)
    data = torch.from_numpy(pictures.astype(np.float32)).permute(0, 3, 1, 2)
    data = torch.nn.functional.interpolate(data, scaled, mode="bicubic", antialias=True).clamp(0, 255)
    top, left = ((whole - side) // 2 & ~1 for whole, side in zip(scaled, (height, width), strict=True))
    return data[:, :, top : top + height, left : left + width].permute(0, 2, 3, 1).numpy()


def difference(path: Path, placed, encoded) -> str:
    """Return how two datasets' videos of one file differ."""
    sides = min(placed.height, placed.width)
    expected = [round(side * SHORT / sides) for side in (placed.height, placed.width)]
    if any(not -2 <= one - got < 18 for one, got in zip(expected, (encoded.height, encoded.width), strict=True)):
        return f"{placed.width}x{placed.height} and {encoded.width}x{encoded.height}"
    numbers = np.unique(np.linspace(0, len(placed) - 1, FRAMES).round().astype(int))
    mine = placed.frames(numbers)
    lasts = 1 / float(encoded.fps)
    nearest = np.clip(np.rint(mine.seconds / lasts), 0, len(encoded) - 1).astype(int)
    theirs = encoded.frames(nearest)
    apart = np.abs(theirs.seconds - mine.seconds)
    # Half a frame, of which the end of a variable rate may lose one.
    if apart[:-1].max(initial=0) > lasts / 2 + 2e-3 or apart[-1] > 1.5 * lasts + 2e-3:
        return f"{apart.max():.3f} s apart"
    # Half of what both have: the rest is how an encoder enlarges, and how it stores colours.
    half = [max(8, side * min(SHORT, sides) // SHORT // 2) for side in theirs.data.shape[1:3]]
    shown = fitted(theirs.data, *half)
    shape, pixels = opened(path, placed)
    expected_ = fitted(encoded_as(shape, placed, mine.data, *theirs.data.shape[1:3]), *half)
    mean = float(np.median(np.abs(shown - expected_).mean((1, 2, 3))))
    alike = float(np.median([ssim(a @ LUMA, b @ LUMA) for a, b in zip(shown, expected_, strict=True)]))
    most = MOST_BESIDE if "444" in pixels else MOST_MEAN
    return "" if mean <= most and alike >= LEAST_SSIM else f"mean {mean:.2f}, SSIM {alike:.3f}"


@pytest.mark.parametrize("folder", ["clean", "odd"])
def test_index_and_encoding_of_it_are_alike(folder, footage, tmp_path):
    """The same files indexed in place, encoded, and encoded from the dataset in place, with little loss."""
    placed, sharded, again = tmp_path / "placed", tmp_path / "sharded", tmp_path / "again"
    for words in (
        ("index", footage / folder, "--out", placed),
        ("shard", footage / folder, "--out", sharded, *FINE),
        ("transcode", placed, "--out", again, *FINE),
    ):
        command = forks.start_fastvid(*words, "--allow-rejected")
        assert command.wait(3600) == 0, command.communicate()[1]
    twins = {"shard": _by_source(sharded), "transcode": {video.key: video for video in fastvid.open(again)}}
    compared, wrong = 0, []
    for source, video in _by_source(placed).items():
        for kind, others in twins.items():
            twin = others.get(source if kind == "shard" else video.key)
            if twin is None:  # not packed
                continue
            try:
                message = difference(footage / folder / source, video, twin)
            except FastvidError as error:
                message = str(error)
            compared += 1
            if message:
                wrong.append(f"{kind} of {source}: {message}")
    assert compared
    assert not wrong, "\n".join(wrong)


def _by_source(out):
    rows = pq.read_table(out / "ledger.parquet").to_pylist()
    sources = {row["key"]: row["source_id"] for row in rows if row["status"] == "packed"}
    return {sources[video.key]: video for video in fastvid.open(out)}
