"""Run the demo step by step, with the same commands that a user types."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fastvid.decode.access import open as open_dataset
from fastvid.decode.backends import backend
from fastvid.demo import evaluate, motion, report
from fastvid.errors import JobError
from fastvid.load.loader import ClipLoader
from fastvid.runtime.children import SAFE_PATH
from fastvid.train.config import recipes
from fastvid.train.records import metrics

log = logging.getLogger(__name__)

RECIPE: Final = "motion_tsm"
INSTANCES: Final = {"train": 6, "test": 2}
PROCESSES: Final = 2
STRIPS: Final = 6
_TIMED_SECONDS: Final = 2.0
_PERCENT: Final = 100.0


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One training run of the demo."""

    name: str
    title: str
    changes: tuple[str, ...] = ()


WITHOUT_SHIFT: Final = ("model.name=tsn-r18", "model.options.shift_div=none")
RUNS: Final = (
    DemoRun("tsm", "TSM"),
    DemoRun("control", "control", WITHOUT_SHIFT),
    DemoRun("control-texture", "texture, by the control", (*WITHOUT_SHIFT, "data.label=texture")),
)


@dataclass(frozen=True, slots=True)
class LoaderSpeed:
    """Throughput of a loader without a model."""

    decoder: str
    encoding: str
    clips_per_second: float
    fed: float
    from_keys: float
    split: dict[str, float]

    def row(self) -> tuple[str, str, str, str]:
        """Return a row of the report's table."""
        packets = f"{self.fed:.1f} of {self.from_keys:.1f}"
        return self.decoder, self.encoding, f"{self.clips_per_second:.0f}", packets


def run(out: Path, *, seed: int = 0, processes: int = PROCESSES) -> dict[str, Any]:
    """Make the dataset, shard it, time the loader, train, and write summary.json and report.html to `out`.

    Returns the summary.
    """
    started = time.monotonic()
    _empty(out)
    videos = motion.plan_videos(INSTANCES, seed=seed)
    log.info("making %d videos: %d textures in %d directions", len(videos), len(videos) // 8, len(motion.DIRECTIONS))
    annotations = motion.make_videos(out / "videos", videos)
    held_out = motion.annotate(out / "videos" / "held-out.csv", [video for video in videos if video.split == "test"])

    size = ["--short-side", str(motion.SIDE)]
    compact, vp9 = out / "shards", out / "shards-vp9"
    _fastvid("shard", out / "videos", "--out", compact, "--annotations", f"csv:{annotations}", *size)
    _fastvid("shard", out / "videos", "--out", vp9, "--annotations", f"csv:{held_out}", "--profile", "vp9", *size)

    timings = [_time_loader(compact, "pyav", "compact")]
    timings += [_time_loader(vp9, name, "vp9") for name in ("pyav", "dali-cpu") if not backend(name).why_unavailable()]

    changes = {
        entry.name: (f"data.path={compact}", f"run.out={out / entry.name}", f"run.seed={seed}", *entry.changes)
        for entry in RUNS
    }
    for entry in RUNS:
        _torchrun(processes, changes[entry.name])
    top1 = {entry.name: _rows(out / entry.name, "eval")[-1]["top1_percent"] for entry in RUNS}
    evaluation = evaluate.examine(
        open_dataset(str(compact), split="test"),
        {entry.title: out / entry.name for entry in RUNS[:2]},
        recipe=RECIPE,
        changes={entry.title: changes[entry.name] for entry in RUNS},
        strips=STRIPS,
    )

    summary = {
        "tsm_top1": top1["tsm"],
        "control_top1": top1["control"],
        "control_texture_top1": top1["control-texture"],
        "shuffled_top1": evaluation.shuffled_top1,
        "chance": _PERCENT / len(motion.DIRECTIONS),
        "clips_per_second": timings[0].clips_per_second,
        "seconds": time.monotonic() - started,
        "processes": processes,
        "seed": seed,
    }
    text = report.page(
        summary,
        curves={entry.title: _curve(out / entry.name, "eval", "top1_percent") for entry in RUNS},
        losses={entry.title: _curve(out / entry.name, "train", "loss") for entry in RUNS},
        strips=evaluation.strips,
        split=_step_split(out / "tsm", timings[0]),
        facts=_facts(compact),
        loaders=[timing.row() for timing in timings],
    )
    (out / "report.html").write_text(text, encoding="utf-8")
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def _empty(out: Path) -> None:
    if out.exists():
        if any(out.iterdir()) and not (out / "videos").is_dir():
            raise JobError("folder contains files that are not a demo's", file=out, hint="choose another --out")
        shutil.rmtree(out)
    out.mkdir(parents=True)


def _fastvid(*arguments: object) -> None:
    _command([sys.executable, "-m", "fastvid", *map(str, arguments)])


def _torchrun(processes: int, changes: Sequence[str]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    _command([*launcher, "-m", "fastvid.train", RECIPE, *changes])


def _command(words: Sequence[str]) -> None:
    shown = shlex.join(words).replace(f"{sys.executable} -m torch.distributed.run", "torchrun")
    log.info("$ %s", shown.replace(f"{sys.executable} -m fastvid", "fastvid"))
    # Avoids torchrun's warning about OMP_NUM_THREADS; the trainer sets the threads from the cores of its node.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | SAFE_PATH
    result = subprocess.run(words, stdout=subprocess.DEVNULL, env=environment, check=False)
    if result.returncode:
        raise JobError(f"command failed with exit code {result.returncode}: {shown}")


def _time_loader(shards: Path, decoder: str, encoding: str) -> LoaderSpeed:
    """Measure the clips per second of the recipe's training loader without a model."""
    data = recipes.load(RECIPE).data
    dataset = open_dataset(str(shards))
    size = min(data.global_batch_size, len(dataset))
    loader = ClipLoader(
        dataset,
        frames=data.frames,
        spatial=data.spatial,
        global_batch_size=size,
        decoder=decoder,
        rank=0,
        world_size=1,
    )
    for _ in loader:
        break  # warm-up: opens the decoders
    clips, began = 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < _TIMED_SECONDS:
        for batch in loader:
            clips += batch.num_rows
    total = loader.stats.total
    loader.close()
    split = {
        name: getattr(total, f"{name}_seconds") / total.clips * size / loader.num_threads
        for name in ("fetch", "decode", "finish")
    }
    fed, from_keys = total.packets / total.clips, total.packets_from_keys / total.clips
    return LoaderSpeed(decoder, encoding, clips / seconds, fed, from_keys, split)


def _rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    return metrics.curve(metrics.read(folder / metrics.METRICS_FILE), kind)


def _curve(folder: Path, kind: str, name: str) -> list[tuple[float, float]]:
    """Return (epoch, value) points."""
    size = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["lineage"][0]["samples"]
    return [(row["samples"] / size, row[name]) for row in _rows(folder, kind) if row[name] is not None]


def _step_split(folder: Path, timing: LoaderSpeed) -> dict[str, float]:
    """Return the parts of the median training step in seconds; the loader's overlap the model's."""
    rows = sorted(_rows(folder, "train"), key=lambda row: row["step_ms"])
    row = rows[len(rows) // 2]
    step, wait = row["step_ms"] / 1e3, row["step_ms"] / 1e3 * row["wait_percent"] / _PERCENT
    return {"compute": step - wait, "wait for data": wait} | {
        f"{name} (in parallel)": value / PROCESSES for name, value in timing.split.items()
    }


def _facts(shards: Path) -> list[tuple[str, str]]:
    dataset = open_dataset(str(shards))
    first = dataset[dataset.key(0)]
    size = sum(shard.bytes for shard in dataset.generation.shards)
    return [
        ("videos", f"{len(dataset)}"),
        ("shards", f"{len(dataset.generation.shards)}"),
        ("bytes", f"{size / 2**20:.1f} MiB"),
        ("frames", f"{first.num_frames} of {first.width}x{first.height} at {first.fps}/s"),
        ("directions", f"{len(dataset.classes)}"),
        ("textures, train and held-out", f"{8 * INSTANCES['train']} and {8 * INSTANCES['test']}, disjoint"),
    ]
