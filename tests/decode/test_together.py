"""Clips decoded in one pass equal the same clips decoded one by one, whatever is damaged among them."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch

import fastvid
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Box, Planes, Rgb
from fastvid.errors import FastvidError
from fastvid.format.presentation import Coded
from fastvid.load.workers.clip_worker import ClipWorker
from tests import datasets
from tests.conformance.outputs import arrays, empty
from tests.load.loaders import clip_loader
from tests.makers import Video, arguments, ffmpeg
from tests.skips import soak_but

KINDS = [
    ("intra", (96, 160)),
    ("intra", (96, 176)),
    ("mjpeg", (96, 160)),
    ("compact", (96, 160)),
    ("h264-422", (96, 160)),
]

# Which videos, how many clips of them, and which share of those is damaged.
REQUESTS = [
    ("some", 400, 0.0), ("some", 400, 0.1), ("real", 400, 0.1), ("some", 10_000, 0.05), ("real", 10_000, 0.05)
]  # fmt: skip


def draw(rng, some, *, damage):
    """Return a clip of one of some videos: any frames, crop, size, flip and orientation, perhaps damaged."""
    video = some[rng.integers(len(some))]
    info = video.info
    if rng.random() < 0.2:
        coded = Coded(
            info.width, info.height, (0, 0, info.height, info.width), int(rng.integers(4)), rng.random() < 0.5
        )
        sides = (info.width, info.height)[:: -1 if coded.turn % 2 else 1]
        info = replace(info, width=sides[0], height=sides[1], coded=coded)
    height, width = (int(2 * rng.integers(4, side // 2 + 1)) for side in (info.height, info.width))
    y, x = (
        int(2 * rng.integers(0, (side - own) // 2 + 1)) for side, own in ((info.height, height), (info.width, width))
    )
    size = (height, width) if rng.random() < 0.7 else (32, 48)
    frames = rng.integers(0, info.num_frames, rng.integers(1, 6)).tolist()
    clip = video.clip(frames, box=Box(y, x, height, width), size=size, flip=rng.random() < 0.5, info=info)
    if rng.random() < damage:
        data, packet = bytearray(clip.data), rng.integers(len(clip.starts))
        at = clip.starts[packet] + rng.integers(0, clip.sizes[packet], 8)
        for place in at.tolist():
            data[place] ^= int(rng.integers(1, 256))
        clip = replace(clip, data=memoryview(data))
    return clip


def outputs(clips):
    """Return memory for clips: RGB where they are resized or flipped, else planes or RGB."""
    found = []
    for number, clip in enumerate(clips):
        request = clip.request
        is_rgb = request.flip or request.size != (request.box.height, request.box.width) or number % 2
        found.append(empty(clip, Rgb if is_rgb else Planes))
    return found


def differences(some, seed, requests, *, damage):
    """Return how many of random clips differ between the two ways, how many fail, and how many went in one pass."""
    rng, together, apart = np.random.default_rng(seed), PyAvDecoder(), PyAvDecoder()
    passes, inner = [], together._decode_together
    together._decode_together = lambda key, group: passes.append(len(group) * inner(key, group)) or passes[-1] > 0
    wrong = failed = done = 0
    while done < requests:
        pool = [some[one] for one in rng.integers(0, len(some), rng.integers(1, 3))]
        clips = [draw(rng, pool, damage=damage) for _ in range(rng.integers(2, 12))]
        ours, theirs = outputs(clips), outputs(clips)
        found = together.decode(clips, ours)
        wanted = [apart.decode([clip], [output])[0] for clip, output in zip(clips, theirs, strict=True)]
        for mine, other, a, b in zip(found, wanted, ours, theirs, strict=True):
            same = all(map(np.array_equal, arrays(a), arrays(b))) if other is None else True
            wrong += str(mine) != str(other) or not same
            failed += other is not None
        done += len(clips)
    return wrong, failed, sum(passes)


@pytest.fixture(scope="module")
def some(videos):
    return [videos.textured(encoding, size=size, frames=24) for encoding, size in KINDS]


@pytest.fixture(scope="module")
def real(footage, tmp_path_factory):
    """Real videos in several encodings and sizes."""
    folder, found = tmp_path_factory.mktemp("real"), []
    for number, source in enumerate(sorted((footage / "clean").glob("*.mp4"))[::4]):
        side, encoding = (96, 128, 224)[number % 3], ("intra", "intra", "mjpeg", "compact")[number % 4]
        path = folder / f"{number}.mp4"
        filters = arguments(encoding, f"scale={side}:{side}:force_original_aspect_ratio=increase,crop={side}:{side}")
        command = [ffmpeg(), "-v", "error", "-i", str(source), "-frames:v", "24", "-an", *filters, str(path)]
        subprocess.run(command, check=True)
        found.append(Video(path))
    return found


@pytest.mark.parametrize(("which", "count", "damage"), soak_but(REQUESTS, *REQUESTS[:3]))
def test_one_pass_makes_the_same_pictures_and_errors(which, count, damage, request):
    wrong, failed, passed = differences(request.getfixturevalue(which), 7, count, damage=damage)
    assert not wrong
    assert bool(failed) == bool(damage)
    assert passed > (40 if count == 400 else 2000)


def test_without_its_checks_one_pass_would_hide_damage(some, monkeypatch):
    inner = PyAvDecoder._decode_together
    monkeypatch.setattr(PyAvDecoder, "_decode_together", lambda *args: inner(*args) or True)
    assert differences(some, 7, 300, damage=0.1)[0]


SEGMENTS = fastvid.Segments(3, jitter=False)


def batches(folder, monkeypatch, *, most, **options):
    """Return the pictures, frames and validity of an epoch whose workers decode `most` clips in a call."""
    with monkeypatch.context() as patch:
        made = ClipWorker.__init__
        patch.setattr(ClipWorker, "__init__", lambda self, decoder, _=None: made(self, decoder, most))
        options = {"frames": fastvid.Segments(3), "dtype": torch.uint8, "global_batch_size": 12, "seed": 5} | options
        loader = clip_loader(fastvid.open(folder), shuffle=False, num_threads=1, **options)
        found = [(batch["video"].clone(), batch.frame_index, batch.valid) for batch in loader]
        loader.close()
    return found


@pytest.fixture
def dataset(some, tmp_path):
    """Samples of several sizes and encodings, side by side in two shards."""
    samples = [(f"s{number:02}", some[number // 3 % len(some)].data, 0) for number in range(24)]
    datasets.pack(tmp_path, [samples[:15], samples[15:]], classes=("a",))
    return tmp_path


OPTIONS = {
    "crop": {"spatial": [fastvid.RandomCrop(64), fastvid.HorizontalFlip(0.5)]},
    "resize": {"spatial": [fastvid.RandomResizedCrop(48)], "layout": "BTCHW"},
    "floats": {"spatial": [fastvid.CenterCrop(64)], "dtype": torch.float32},
    "views": {"spatial": [fastvid.CenterCrop(64)], "frames": SEGMENTS, "views": fastvid.Views(2)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_batches_equal_those_read_and_decoded_clip_by_clip(dataset, monkeypatch, options):
    one, many = (batches(dataset, monkeypatch, most=most, **options) for most in (1, None))
    for mine, theirs in zip(many, one, strict=True):
        assert all((a == b).all() for a, b in zip(mine, theirs, strict=True))


def test_a_damaged_clip_of_a_batch_is_named_or_skipped_alone(dataset, monkeypatch):
    datasets.damage(dataset, "s01")
    options = OPTIONS["crop"]
    skipping = options | {"on_error": fastvid.Skip(1.0)}
    one, many = (batches(dataset, monkeypatch, most=most, **skipping) for most in (1, None))
    assert [sum((~valid).tolist()) for _, _, valid in many] == [1, 0]
    for mine, theirs in zip(many, one, strict=True):
        assert all((a == b).all() for a, b in zip(mine, theirs, strict=True))
    for most in (1, None):
        with pytest.raises(FastvidError, match=r"checksum.*s01"):
            batches(dataset, monkeypatch, most=most, **options)
