"""The training job that `bench.elastic.elastic` and `bench.elastic.launch` disturb: videos, recipe and results.

Its model is in float64 without batch norm and dropout, so the weights after any sequence of world sizes equal those of
one process up to rounding.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from fastvid.errors import JobError
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.sharding.job.job import run_job
from fastvid.train.records import records as metrics
from fastvid.train.records.checkpoint import Checkpoints, decode

ROOT: Final = Path(__file__).parents[2]
VIDEOS: Final = 24
STEPS_AN_EPOCH: Final = 4
TIMEOUT_S: Final = 10.0  # run.timeout_s: seconds after which a silent peer counts as dead
LIMIT: Final = 1e-9  # largest weight difference: the rounding of float64 sums with a margin

RECIPE: Final = """
from fastvid.train import CenterCrop, Config, DataConfig, ModelConfig, OptimConfig, RandomCrop, RunConfig, Segments


def recipe():
    return Config(
        data=DataConfig(
            path={data!r}, split=None, eval_split=None, frames=Segments(2), eval_frames=Segments(2, jitter=False),
            spatial=(RandomCrop(32),), eval_spatial=(CenterCrop(32),), global_batch_size={batch}, num_threads=1,
        ),
        model=ModelConfig(name="bench.elastic.paced_model:net", num_classes=4, options={{"pause_s": {pause}}}),
        optim=OptimConfig(base_lr=0.01, base_batch_size=6, decay="cosine", warmup_epochs=1, clip_norm=5.0),
        run=RunConfig(
            out={out!r}, epochs={epochs}, log_every_steps=1, checkpoint_every_s=1.0, timeout_s={timeout},
        ),
    )
"""


def make_dataset(here: Path) -> Path:
    """Create and shard small videos of four test patterns; the class is the folder.

    Returns the dataset's folder.
    """
    sources = ("testsrc", "testsrc2", "smptebars", "rgbtestsrc")
    for number in range(VIDEOS):
        kind = sources[number % len(sources)]
        path = here / "videos" / kind / f"v{number:02d}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [find_ffmpeg().path, "-v", "error", "-f", "lavfi", "-i", f"{kind}=size=64x48:rate=8:duration=2"]
        command += ["-vf", f"hue=h={15 * number}", "-pix_fmt", "yuv420p", str(path)]
        subprocess.run(command, check=True)
    run_job([str(here / "videos")], here / "shards")
    return here / "shards"


def write_recipe(shards: Path, out: Path, *, epochs: int, pause_s: float) -> Path:
    """Write the recipe of a run in `out`, beside that folder; each step sleeps for `pause_s` seconds."""
    text = RECIPE.format(
        data=str(shards), out=str(out), epochs=epochs, pause=pause_s, timeout=TIMEOUT_S, batch=VIDEOS // STEPS_AN_EPOCH
    )
    path = out.parent / f"{out.name}.py"
    path.write_text(text)
    return path


def train_alone(shards: Path, out: Path, *, epochs: int) -> dict[str, Any]:
    """Train undisturbed in one process and return the outcome."""
    recipe = write_recipe(shards, out, epochs=epochs, pause_s=0.0)
    command = [sys.executable, "-m", "fastvid.train", str(recipe), "run.log_every_steps=50"]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    if result.returncode:
        raise JobError(f"the undisturbed run failed: {shlex.join(command)}")
    return outcome(out)


def rows(out: Path) -> list[dict[str, Any]]:
    """Return the metrics rows that a run has written so far."""
    file = out / metrics.METRICS_FILE
    return metrics.read(file) if file.exists() else []


def count(out: Path, kind: str) -> int:
    """Return the number of rows of a kind."""
    return sum(row["kind"] == kind for row in rows(out))


def rows_after_start(out: Path) -> int:
    """Return the number of training rows written by the newest process group."""
    kinds = [row["kind"] for row in rows(out)]
    last = len(kinds) - 1 - kinds[::-1].index("start")
    return kinds[last:].count("train")


def is_finished(out: Path) -> bool:
    """Return whether the run has reached its end."""
    try:
        return bool(json.loads((out / "summary.json").read_text())["over"])
    except (OSError, ValueError, KeyError):
        return False


def outcome(out: Path) -> dict[str, Any]:
    """Return the weights, lineage and samples of a run's newest checkpoint."""
    found = Checkpoints(str(out / "checkpoints")).newest()
    if found is None:
        raise JobError("the run has no checkpoint", file=out)
    state = decode(found.data, found.name)
    return {
        "weights": state["replica"]["model"],
        "lineage": state["lineage"],
        "samples": state["replica"]["samples"],
    }


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest absolute difference between two models' weights."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)
