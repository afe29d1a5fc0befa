"""Memory over hundreds of thousands of clips. Started by ``make soak``; results in bench/results/load_memory.json."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.common.harness import RESULTS, machine_facts, write_json
from fastvid.format.dataset import Dataset
from fastvid.load.clips.crops import HorizontalFlip, RandomResizedCrop
from fastvid.load.clips.sampling import Segments
from tests.datasets import make_clip, pack
from tests.load.loaders import clip_loader

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

CLIPS = 300_000
BATCH = 64


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_flat_over_300_000_clips(tmp_path):
    sizes = ["96x64", "112x80", "128x96", "80x112"]
    clips = [make_clip(tmp_path / f"{n}.mp4", frames=20 + 3 * n, size=size) for n, size in enumerate(sizes)]
    samples = [[(f"clip{shard}_{n}", clips[(shard + n) % 4], n % 2) for n in range(256)] for shard in range(8)]
    pack(tmp_path / "set", samples)
    options = {"frames": Segments(4), "spatial": [RandomResizedCrop(32), HorizontalFlip(0.5)], "dtype": torch.uint8}
    loader = clip_loader(Dataset(str(tmp_path / "set")), global_batch_size=BATCH, decoder="pyav", **options)
    seen, memory = 0, []
    while seen < CLIPS:
        for batch in loader:
            seen += batch.num_rows
        memory.append((seen, resident()))
    loader.close()
    points = np.array(memory[len(memory) // 10 :], dtype=np.float64)
    slope, _ = np.polyfit(points[:, 0], points[:, 1], 1)
    # A leak of one packet a clip would be thousands of bytes; the allocator's noise over the run is below 10 MB.
    assert abs(slope) * CLIPS < 20e6
    measured = {"clips": seen, "bytes_a_clip": slope, "first_bytes": points[0, 1], "last_bytes": points[-1, 1]}
    record = {"schema": "fastvid-soak-load-memory/1", "machine": machine_facts(), **measured}
    write_json(RESULTS / "load_memory.json", record)
