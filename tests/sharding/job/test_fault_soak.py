"""Random faults of processes and disks, over shard, add, index and training: no source is lost, no byte differs.

A short slice always runs; `make soak` runs 200 faults and writes bench/results/faults.json.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bench.common.harness import RESULTS, machine_facts, write_json
from fastvid.format.dataset import Dataset
from fastvid.train.records.checkpoint import Checkpoints, decode
from tests.sharding.shardtools import REPOSITORY, ledger, make, tars
from tests.skips import soak_but

FAULTS = 200
SEED = 17
MOST_IN_A_TRIAL = 4
OPTIONS = ["--samples-per-shard", "2", "--workers", "2"]
CODES = ("EIO", "ESTALE", "ENOENT", "EACCES", "ETIMEDOUT")
RECIPE = """
from fastvid.load.clips.crops import CenterCrop, RandomCrop
from fastvid.load.clips.sampling import Segments
from fastvid.train.config.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig

def recipe():
    return Config(
        data=DataConfig(
            path={data!r}, split=None, eval_split=None, frames=Segments(2), eval_frames=Segments(2, jitter=False),
            spatial=(RandomCrop(32),), eval_spatial=(CenterCrop(32),), global_batch_size=2, num_threads=1,
        ),
        model=ModelConfig(name="tsm-r18", options={{"width": 8}}),
        optim=OptimConfig(base_lr=0.02, base_batch_size=2),
        run=RunConfig(out="unset", epochs=3, log_every_steps=1, checkpoint_every_s=0.0),
    )
"""


@dataclass
class Trial:
    """A command that is disturbed, run again until it succeeds, and compared with an undisturbed one."""

    words: list[str]
    out: Path  # the folder that it makes or changes
    disk: Path  # the folder that it reads, and that may be unmounted
    kinds: tuple[str, ...] = ("kill", "kill a child", "stop", "read error", "full disk", "unmount")
    point: str = "source"
    returned: list[int | None] = field(default_factory=list)

    def start(self, fault: str = "") -> subprocess.Popen[str]:
        variables = {name: value for name, value in os.environ.items() if name != "FASTVID_FAULT"}
        variables |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        variables |= {"FASTVID_FAULT": fault} if fault else {}
        command = [sys.executable, "-m", "fastvid", *self.words]
        return subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        _, said = process.communicate(timeout=300)
        self.returned.append(process.returncode)
        return process.returncode, said


def strike(trial: Trial, kind: str, draws: random.Random, seconds: float) -> tuple[bool, int]:
    """Run the command under one fault; return whether it struck, and the exit status."""
    if kind in ("read error", "full disk"):
        errors = f"source:{draws.choice(['', '/'])}{draws.randint(1, 2)}:{draws.choice(CODES)}"
        fault = f"write:{draws.randint(1, 8)}:ENOSPC" if kind == "full disk" else errors.replace("source", trial.point)
        code, said = trial.finish(trial.start(fault))
        assert "Traceback" not in said, said
        return code != 0 or "retrying" in said, code
    process = trial.start()
    time.sleep(draws.uniform(0.1, 0.7) * seconds)
    struck = process.poll() is None
    if kind == "unmount":
        away = trial.disk.with_name("away")
        trial.disk.rename(away)
        if empty := draws.random() < 0.5:
            trial.disk.mkdir()
        code, said = trial.finish(process)
        if empty:
            trial.disk.rmdir()
        away.rename(trial.disk)
        assert "Traceback" not in said, said
        return struck and code != 0, code
    try:
        family = [psutil.Process(process.pid)]
        children = family[0].children(recursive=True)
        target = draws.choice(children or family) if kind == "kill a child" or draws.random() < 0.5 else family[0]
        target = family[0] if kind == "kill" else target
        struck &= kind != "kill a child" or bool(children)
        if kind == "stop":
            target.suspend()
            time.sleep(draws.uniform(0.2, 1.5))
            target.resume()
        else:
            target.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        struck = False
    return struck, trial.finish(process)[0]


def write_foreign(own: Path, tar: Path) -> None:
    """Copy only the videos of a tar: fastvid restores a dataset of tars that are all its own, without a job."""
    with tarfile.open(own) as source, tarfile.open(tar, "w") as target:
        for member in source:
            if member.name.endswith(".mp4"):
                target.addfile(member, source.extractfile(member))


def files(out: Path) -> dict[str, Any]:
    """Everything that a user may miss in a dataset."""
    dataset = Dataset(str(out))
    rows = [{name: value for name, value in row.items() if name != "path"} for row in ledger(out)]
    found = {"tars": tars(out), "ledger": rows, "annotations": dataset.annotations.to_pylist()}
    found["packets"] = {shard: dataset.shard(i).check() for i, shard in enumerate(tars(out))}
    # A commit that was killed uses a number up, and what it left is deleted by the next job, `compact` or `gc`.
    found["names"] = sorted(p.name for p in out.iterdir() if p.suffix != ".tmp" and "annotations" not in p.name)
    return found


def weights(out: Path) -> dict[str, Any]:
    """The samples that a run has trained on, and its weights."""
    found = Checkpoints(str(out / "checkpoints")).newest()
    assert found is not None
    state = decode(found.data, found.name)
    flat: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name}.{key}", inner)
        elif isinstance(value, torch.Tensor):
            flat[name] = value.numpy().tobytes()

    add("", state)
    assert flat
    return {"lineage": state["lineage"], "weights": flat}


class Place:
    """The inputs of all commands, and what they make undisturbed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, first in (("raw", 0), ("more", 6)):
            for number in range(first, first + 6):
                path = folder / name / "disk" / ("run", "jump")[number % 2] / f"v{number}.mp4"
                make(path, "-preset", "ultrafast", size="64x64", frames=8 + number)
        (folder / "raw" / "disk" / "run" / "bad.mp4").write_text("no video")
        self._made: dict[str, tuple[Callable[[Path], Any], Any, float]] = {}
        self.undisturbed("shard")

    def undisturbed(self, name: str) -> tuple[Callable[[Path], Any], Any, float]:
        """What an undisturbed command makes, as a function of its folder shows it, and its duration in seconds."""
        if name in self._made:
            return self._made[name]
        trial, look = self.trial(name, self.folder / f"whole-{name}"), weights if name == "train" else files
        started = time.monotonic()
        code, said = trial.finish(trial.start())
        assert code == 0, said
        self._made[name] = look, look(trial.out), time.monotonic() - started
        return self._made[name]

    def trial(self, name: str, out: Path) -> Trial:
        """A command with an output of its own."""
        raw, whole = self.folder / "raw" / "disk", self.folder / "whole-shard"
        if name == "shard":
            words = ["shard", str(raw), "--out", str(out), "--short-side", "64", "--allow-rejected", *OPTIONS]
            return Trial(words, out, raw)
        if name == "add":
            shutil.copytree(whole, out)
            more = self.folder / "more" / "disk"
            return Trial(["add", str(out), str(more), "--prefix", "more", *OPTIONS], out, more)
        if name == "index":
            disk = out.with_name(f"{out.name}-tars") / "disk"
            disk.mkdir(parents=True)
            for path in whole.glob("*.tar"):
                write_foreign(path, disk / path.name)
            return Trial(["index", str(disk), "--out", str(out), "--workers", "2"], out, disk)
        disk = out.with_name(f"{out.name}-data") / "disk"
        shutil.copytree(whole, disk)
        recipe = out.with_name(f"{out.name}.py")
        recipe.write_text(RECIPE.format(data=str(disk)))
        kinds = ("kill", "stop", "read error", "full disk", "unmount")
        return Trial(["train", str(recipe), f"run.out={out}"], out, disk, kinds, "open")

    def disturb(self, name: str, out: Path, draws: random.Random, most: int, kind: str = "") -> Counter[str]:
        """Strike one command up to `most` times, let it finish, and compare; return the faults that struck."""
        look, expected, seconds = self.undisturbed(name)
        trial, struck = self.trial(name, out), Counter[str]()
        for _ in range(most):
            chosen = kind or draws.choice(trial.kinds)
            hit, code = strike(trial, chosen, draws, seconds)
            struck[chosen] += hit
            if code == 0:
                break
        if trial.returned[-1] != 0:
            code, said = trial.finish(trial.start())
            # A killed index may have committed already.
            assert code == 0 or (name == "index" and "a dataset exists already" in said), said
        found = look(trial.out)
        for part, value in expected.items():
            assert found[part] == value, (name, part, dict(struck))
        return struck


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(
    ("name", "kind"),
    soak_but(
        [("shard", "unmount"), ("add", "full disk"), ("index", "read error"), ("train", "kill")], ("shard", "unmount")
    ),
)
def test_a_fault_loses_nothing(name, kind, place, tmp_path):
    place.disturb(name, tmp_path / "out", random.Random(SEED), 1, kind)


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_many_faults_lose_nothing(place, tmp_path):
    draws, counts = random.Random(SEED), {name: Counter[str]() for name in ("shard", "add", "index", "train")}
    trials = 0
    while sum(map(Counter.total, counts.values())) < FAULTS:
        name = draws.choices(list(counts), [5, 3, 1, 1])[0]
        out = tmp_path / f"out-{trials}" / "out"
        out.parent.mkdir()
        counts[name] += place.disturb(name, out, draws, MOST_IN_A_TRIAL)
        shutil.rmtree(out.parent)
        trials += 1
        print(trials, counts, flush=True)
    record = {"schema": "fastvid-faults/1", "seed": SEED, "trials": trials, "faults": counts, "sources_lost": 0}
    write_json(RESULTS / "faults.json", record | {"tables_that_differ": 0, "machine": machine_facts()})
