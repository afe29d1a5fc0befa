"""Reads in any order: a decoder that stays open gives the frames that a new one does, in threads and processes."""

from __future__ import annotations

import multiprocessing
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fastvid
from fastvid.decode.pyav import PyAvDecoder
from fastvid.videos import video
from tests import forks
from tests.skips import soak_but
from tests.truth.recipes import make
from tests.truth.table import recipes

# Streams that change their parameter sets on the way among others of the same configuration, size and codec.
NAMES = (
    "h264-h264-joined-mp4", "h264-h264-regular-mp4", "h264-h264-joined-mkv", "h264-h264-regular-mkv",
    "hevc-hevc-joined-mp4", "h264-mp4-rot90", "h264-mp4-plain", "vp9-webm-plain", "av1-mp4-plain", "mpeg4-mp4-plain",
)  # fmt: skip
READS = (300, 10_000)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Return a dataset in place, and a checksum of every frame, each decoded by a decoder of its own."""
    folder, out = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("out")
    for recipe in recipes():
        if recipe.name in NAMES:
            make(recipe, folder, tmp_path_factory.mktemp("work"))
    done = forks.fastvid("index", folder, "--out", out / "index")
    assert done.returncode == 0, done.stderr
    dataset = fastvid.open(out / "index")
    assert len(dataset) == len(NAMES)
    return dataset, [[_fresh(one, frame) for frame in range(len(one))] for one in dataset]


def _fresh(one, frame):
    video._local.decoder = PyAvDecoder()
    return _read(one, frame)


def _read(one, frame):
    return zlib.crc32(one.frames([frame]).data)


def _differences(dataset, expected, reads):
    """Return how many of some reads, (sample, frame), give other pixels; the calling thread's decoder is kept."""
    videos = list(dataset)
    return sum(_read(videos[sample], frame) != expected[sample][frame] for sample, frame in reads)


def _drawn(expected, count, seed):
    rng = np.random.default_rng(seed)
    samples = rng.integers(0, len(expected), count).tolist()
    return [(sample, int(rng.integers(0, len(expected[sample])))) for sample in samples]


@pytest.mark.parametrize("count", soak_but(READS, 300))
@pytest.mark.parametrize("kind", ["one", "threads", "processes"])
def test_kept_decoders_read_what_fresh_ones_do(dataset, kind, count):
    videos, expected = dataset
    video._local.decoder = None
    shares = [_drawn(expected, count // 4, seed) for seed in range(4)]
    if kind == "one":
        assert _differences(videos, expected, [read for share in shares for read in share]) == 0
        return
    if kind == "threads":
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda share: _differences(videos, expected, share), shares))
    else:
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            found = pool.starmap(_differences, [(videos, expected, share) for share in shares])
    assert found == [0] * 4
