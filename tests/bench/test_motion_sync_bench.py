"""Killing random participants of a run, and counting the samples of the run afterwards."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.strategies import motion_kills
from bench.strategies.motion_sync import lineage_of, repeated
from fastvid.errors import WorkerError
from fastvid.format.dataset import Dataset
from fastvid.load.clips.crops import CenterCrop
from fastvid.load.clips.sampling import Segments
from fastvid.train.parts.replica import Lineage
from tests import datasets
from tests.load.loaders import clip_loader

LINES = 60
# Continues from the existing lines, as a server does from its checkpoint.
SERVER = f"echo x >> server; while [ $(wc -l < work) -lt {LINES} ]; do echo x >> work; sleep 0.02; done"
CLIENT = f"echo x >> client; while [ $(wc -l < work) -lt {LINES} ]; do sleep 0.02; done"


def lines(path: Path) -> int:
    return path.read_text().count("\n")


@pytest.mark.parametrize("seed", range(2))
def test_only_killed_commands_are_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.chdir(tmp_path)
    work = tmp_path / "work"
    work.touch()
    commands = {"server": ["sh", "-c", SERVER], "client": ["sh", "-c", CLIENT]}
    kills = motion_kills.run(commands, lambda: lines(work) / LINES, kills=3, seed=seed)
    assert lines(work) >= LINES
    assert len(kills) == 3
    assert [kill["done"] for kill in kills] == sorted(kill["done"] for kill in kills)
    assert kills[0]["done"] >= motion_kills.SPAN[0]
    for name in commands:
        # A command that is killed right after its restart has written nothing.
        killed = sum(kill["killed"] == name for kill in kills)
        assert (killed > 0) < lines(tmp_path / name) <= 1 + killed


def test_a_command_that_fails_by_itself_is_an_error() -> None:
    with pytest.raises(WorkerError, match="server failed with exit code 3"):
        motion_kills.run({"server": ["sh", "-c", "exit 3"]}, lambda: 0.0, kills=1)


def test_a_run_that_ends_before_its_kills_is_an_error() -> None:
    with pytest.raises(WorkerError, match="0 of 1 kills"):
        motion_kills.run({"server": ["true"]}, lambda: 0.0, kills=1)


def test_the_participants_of_torchrun_are_its_ranks() -> None:
    agent = "RANK=0 sleep 60 & RANK=1 sleep 60 & sleep 60 & wait"
    with motion_kills._Processes({"job": ["sh", "-c", agent, motion_kills.TORCHRUN]}, None) as jobs:
        end = time.monotonic() + 50
        while len(found := jobs.participants()) < 2:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert sorted(found) == ["job, rank 0", "job, rank 1"]
        for rank, pid in enumerate(found[name] for name in sorted(found)):
            assert f"RANK={rank}" in Path(f"/proc/{pid}/environ").read_text().split("\0")
        for pid in found.values():
            os.kill(pid, signal.SIGKILL)


def test_samples_repeated_after_a_resume_are_counted() -> None:
    rows: list[dict[str, Any]] = [
        {"kind": "start", "samples": 0},
        {"kind": "train", "samples": 16},
        {"kind": "train", "samples": 40},
        {"kind": "start", "samples": 24},
        {"kind": "train", "samples": 32},
        {"kind": "start", "samples": 32},
        {"kind": "train", "samples": 48},
    ]
    assert repeated(rows) == 40 - 24
    assert repeated(rows[:3]) == 0


def test_the_lineage_computed_from_keys_equals_that_of_a_loader(tmp_path: Path) -> None:
    clip = datasets.make_clip(tmp_path / "clip.mp4", frames=4, size="32x32")
    datasets.pack(tmp_path / "shards", [[(f"clip{n}", clip, 0) for n in range(7)]])
    data = SimpleNamespace(path=str(tmp_path / "shards"), split=None, global_batch_size=3)
    config = SimpleNamespace(data=data, run=SimpleNamespace(epochs=2, seed=5))
    loader = clip_loader(
        Dataset(data.path), frames=Segments(1), spatial=CenterCrop(32), global_batch_size=3, num_threads=1, seed=5,
        rank=0, world_size=1,
    )  # fmt: skip
    seen = Lineage()
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            seen.add(epoch, *Lineage.of(batch))
    loader.close()
    assert lineage_of(config) == seen.state_dict()
    config.run.seed = 6
    assert [entry["samples"] for entry in lineage_of(config)] == [6, 6]
    assert lineage_of(config) != seen.state_dict()
