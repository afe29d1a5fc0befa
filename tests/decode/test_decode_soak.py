"""Memory and file handles over hundreds of thousands of clips: detects a leak of ten bytes per clip."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import fastvid
from bench.common.harness import machine_facts, write_json
from tests.datasets import pack
from tests.load.loaders import clip_loader

CLIPS = int(os.environ.get("FASTVID_SOAK_CLIPS", "200000"))
SAMPLES = 2000
RESULTS = Path(__file__).parents[2] / "bench" / "results" / "decode-soak.json"


@pytest.fixture(scope="module")
def folder(videos, tmp_path_factory):
    """Two thousand samples of several encodings, sizes and lengths, in twenty shards."""
    folder = tmp_path_factory.mktemp("soak")
    kinds = [
        videos.painted(encoding, frames=frames, size=size).data
        for encoding in ("compact", "intra")
        for frames in (9, 24, 40)
        for size in ((96, 160), (112, 160), (96, 176))
    ]
    samples = [(f"s{number}", kinds[number % len(kinds)], 0) for number in range(SAMPLES)]
    pack(folder, [samples[first : first + 100] for first in range(0, SAMPLES, 100)], classes=("a",))
    return folder


def slope(clips: list[int], rss: list[int]) -> float:
    """Return the growth in megabytes per 100,000 clips, by least squares without the first tenth."""
    first = len(clips) // 10
    x, y = np.asarray(clips[first:], float), np.asarray(rss[first:], float)
    return float(np.polyfit(x / 1e5, y / 2**20, 1)[0])


def test_leak_rate_detects_a_leak():
    clips = list(range(0, 200_000, 1000))
    noise = np.random.default_rng(0).normal(0, 2e5, len(clips))
    assert abs(slope(clips, [int(1e8 + n) for n in noise])) < 0.2
    assert slope(clips, [int(1e8 + 12 * c + n) for c, n in zip(clips, noise, strict=True)]) > 1


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_memory_and_handles_do_not_grow(folder):
    loader = clip_loader(
        fastvid.open(folder),
        frames=fastvid.Segments(4),
        spatial=[fastvid.RandomResizedCrop(64), fastvid.HorizontalFlip(0.5)],
        global_batch_size=100,
        decoder="pyav",
        dtype=torch.uint8,
        num_threads=2,
    )
    process = psutil.Process()
    clips, rss, handles = [], [], []
    done = 0
    while done < CLIPS:
        for batch in loader:
            done += len(batch.key)
            if not done % 1000:
                clips.append(done)
                rss.append(process.memory_info().rss)
                handles.append(process.num_fds())
        gc.collect()
    loader.close()
    found = slope(clips, rss)
    tenth = len(handles) // 10
    record = {
        "schema": "fastvid-decode-soak/1",
        "machine": machine_facts(),
        "clips": done,
        "samples": SAMPLES,
        "mb_per_100000_clips": round(found, 3),
        "rss_mb": [round(value / 2**20, 1) for value in rss[:: max(1, len(rss) // 50)]],
        "file_handles": [min(handles[tenth:]), max(handles[tenth:])],
    }
    write_json(RESULTS, record)
    print(json.dumps(record, indent=1))
    assert found < 1
    assert max(handles[tenth:]) <= handles[tenth]
