"""Run the demo step by step, with the commands that a user types, and write its HTML report.

The trained models are then run on the clips of the test split, with frames in order and shuffled in time.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fastvid.demo import motion
from fastvid.errors import JobError
from fastvid.load.clips.crops import CenterCrop
from fastvid.load.clips.sampling import Segments
from fastvid.load.loader import ClipLoader
from fastvid.models import zoo
from fastvid.report import page as html
from fastvid.report.charts import bars, lines
from fastvid.runtime.processes import SAFE_PATH
from fastvid.runtime.values import duration, size, things
from fastvid.train.config import config as recipes
from fastvid.train.records import checkpoint
from fastvid.train.run.run_report import RunMetrics
from fastvid.videos.dataset import VideoDataset
from fastvid.videos.dataset import open as open_dataset


@dataclass(frozen=True, slots=True, eq=False)
class Strip:
    """One held-out clip with the models' predictions."""

    frames: npt.NDArray[np.uint8]  # uint8 [T, H, W, 3]
    truth: str  # its class
    guesses: Mapping[str, str]  # predicted class by model


def page(
    summary: Mapping[str, Any],
    runs: Mapping[str, RunMetrics],
    strips: Sequence[Strip],
    facts: Mapping[str, str],
) -> str:
    """Return the whole HTML page.

    `summary`: from `run`. `runs`: metrics by title, those of TSM first. `facts`: numbers about the dataset by label.
    """
    percent, first = "{:.1f} %".format, next(iter(runs.values()))
    curves, losses = (
        {title: run.curve(*column) for title, run in runs.items()}
        for column in (("eval", "top1_percent"), ("train", "loss"))
    )
    numbers = [
        ("TSM", percent(summary["tsm_top1"]), "held-out top-1"),
        ("The same net without shift", percent(summary["control_top1"]), "held-out top-1"),
        ("TSM on shuffled frames", percent(summary["shuffled_top1"]), f"chance is {percent(summary['chance'])}"),
        ("Training", f"{summary['clips_per_second']:,.0f} clips/s", "all ranks together"),
        ("Whole demo", duration(summary["seconds"]), "from raw videos to this page"),
    ]
    step = first.median("step_ms") or 0.0
    wait = step * (first.median("wait_percent") or 0.0) / _PERCENT
    sections = [
        html.Section(
            "Learning",
            html.grid(
                html.card("", lines(curves, "held-out top-1, %", across="epochs", limits=(0, 103), whole_x=True)),
                html.card("", lines(losses, "training loss", across="epochs", whole_x=True)),
            ),
            "Only a model that compares frames can tell the classes apart. TSM shifts a quarter of its channels to the"
            " frame before and a quarter to the frame after. The control is the same net without the shift: it averages"
            " its predictions for single frames. If the label is the kind of texture instead, which needs no motion,"
            f" the control reaches {percent(summary['control_texture_top1'])} in fewer epochs.",
        ),
        html.Section(
            "Clips",
            html.card("Held-out clips", "".join(map(_strip, strips))),
            "The eight frames that the loader decoded, in order, cropped as the model saw them.",
        ),
        html.Section(
            "Speed",
            html.grid(
                html.card(
                    "Where a training step's time goes",
                    bars({"computing": step - wait, "waiting for data": wait}, unit="ms", quiet=["waiting for data"]),
                    f"One rank of {summary['processes']}, TSM. The model is idle while it waits.",
                ),
                html.card("Dataset", html.definitions(facts)),
            ),
        ),
    ]
    return html.document(
        "A model that sees motion",
        sections,
        command="demo",
        lead="Raw videos, made with ffmpeg, were sharded, indexed, decoded by plan and used for training with"
        f" {things(summary['processes'], 'rank')} of torchrun. Textures drift in eight directions; no single frame"
        " shows which.",
        top=html.figures(numbers),
        style=html.asset("fastvid.demo", "demo.css"),
    )


def _strip(strip: Strip) -> str:
    said = "".join(
        f'<span class="pill {"ok" if guess == strip.truth else "no"}">{html.text(model)}: {html.text(guess)}</span>'
        for model, guess in strip.guesses.items()
    )
    shown = html.picture(html.film_strip(strip.frames), f"eight frames of a clip that moves {strip.truth}")
    return f'<div class="clip">{shown}<div><b>{html.text(strip.truth)}</b>{said}</div></div>'


_BATCH = 32


@torch.no_grad()
def examine(
    dataset: VideoDataset, folders: Mapping[str, Path], changes: Mapping[str, Sequence[str]]
) -> tuple[float, list[Strip]]:
    """Run trained models on held-out clips, and choose some of the clips to show.

    `dataset`: the held-out samples. `folders`: run folder of each model, by name. `changes`: overrides of the recipe
    for each model. Returns the top-1 accuracy in percent of the first model on clips whose frames are shuffled in time,
    and the chosen clips with the predictions.
    """
    models = {name: _load(folder, changes[name], len(dataset.classes)) for name, folder in folders.items()}
    config = recipes.load(RECIPE).data
    crop = next(t for t in config.eval_spatial if isinstance(t, CenterCrop))
    loader = ClipLoader(
        dataset,
        frames=Segments(config.num_frames, jitter=False),
        spatial=crop,
        global_batch_size=min(_BATCH, len(dataset)),
        decoder="pyav",
        shuffle=False,
        last="keep",
        rank=0,
        world_size=1,
    )
    shuffle = torch.Generator().manual_seed(0)
    hits, total, shown = 0, 0, []
    # Sample indices spread evenly over the split; adding `number` varies texture and direction.
    examples = {round((number + 0.5) * len(dataset) / STRIPS) + number for number in range(STRIPS)}
    for batch in loader:
        order = torch.stack([torch.randperm(batch.video.shape[2], generator=shuffle) for _ in range(batch.num_rows)])
        shuffled = torch.stack([clip[:, when] for clip, when in zip(batch.video, order, strict=True)])
        first = next(iter(models.values()))
        hits += int((first(shuffled).argmax(1) == batch.label).sum())
        total += batch.num_rows
        guesses = {name: model(batch.video).argmax(1) for name, model in models.items()}
        for row, sample in enumerate(batch.sample.tolist()):
            if sample in examples:
                shown.append(_strip_evaluate(dataset, batch.key[row], batch.frame_index[row], guesses, row, crop))
    loader.close()
    return _PERCENT * hits / total, shown


def _load(folder: Path, changes: Sequence[str], num_classes: int) -> nn.Module:
    config = recipes.load(RECIPE, changes)
    model = zoo.build(config.model.name, num_classes, config.data.num_frames, **config.model.arguments)
    found = checkpoint.Checkpoints(str(folder / "checkpoints")).newest()
    assert found is not None, "a finished run has a checkpoint"
    model.load_state_dict(checkpoint.decode(found.data, found.name)["replica"]["model"])
    return model.eval()


def _strip_evaluate(
    dataset: VideoDataset, key: str, frames: Tensor, guesses: Mapping[str, Tensor], row: int, crop: CenterCrop
) -> Strip:
    names = dataset.classes
    data = dataset[key].frames(frames.tolist()).data
    height, width = crop.output_of(*data.shape[1:3])
    top, left = (data.shape[1] - height) // 2, (data.shape[2] - width) // 2
    truth = names[int(dataset.labels[dataset.find(key)])]
    predicted = {name: names[int(guess[row])] for name, guess in guesses.items()}
    return Strip(np.ascontiguousarray(data[:, top : top + height, left : left + width]), truth, predicted)


log = logging.getLogger(__name__)

RECIPE: Final = "motion_tsm"
INSTANCES: Final = {"train": 6, "test": 2}  # random textures of each kind, by split
PROCESSES: Final = 2
STRIPS: Final = 6  # held-out clips to show
_PERCENT: Final = 100.0


WITHOUT_SHIFT: Final = ("model.name=tsn-r18", "model.options.shift_div=none")
RUNS: Final = {
    "TSM": ("tsm", ()),
    "control": ("control", WITHOUT_SHIFT),
    "texture, by the control": ("control-texture", (*WITHOUT_SHIFT, "data.label=texture", "run.epochs=8")),
}
"""Folder and changed settings of each training run, by its title on the page."""


def run(out: Path, *, seed: int = 0, processes: int = PROCESSES) -> dict[str, Any]:
    """Make the dataset, shard it, train, and write summary.json and report.html to `out`.

    Returns the summary.
    """
    started = time.monotonic()
    _empty(out)
    videos = motion.plan_videos(INSTANCES, seed=seed)
    log.info("making %d videos: %d textures in %d directions", len(videos), len(videos) // 8, len(motion.DIRECTIONS))
    annotations = motion.make_videos(out / "videos", videos)
    shards, size = out / "shards", ["--short-side", str(motion.SIDE)]
    _fastvid("shard", out / "videos", "--out", shards, "--annotations", f"csv:{annotations}", *size)
    folders = {title: out / name for title, (name, _) in RUNS.items()}
    changes = {
        title: (f"data.path={shards}", f"run.out={folders[title]}", f"run.seed={seed}", *settings)
        for title, (_, settings) in RUNS.items()
    }
    for settings in changes.values():
        _torchrun(processes, settings)
    runs = {title: RunMetrics.read(folder) for title, folder in folders.items()}
    tsm, control, texture = (run.curve("eval", "top1_percent")[-1][1] for run in runs.values())
    compared = {title: folders[title] for title in ("TSM", "control")}
    shuffled, strips = examine(open_dataset(str(shards), split="test"), compared, changes)

    summary = {
        "tsm_top1": tsm,
        "control_top1": control,
        "control_texture_top1": texture,
        "shuffled_top1": shuffled,
        "chance": _PERCENT / len(motion.DIRECTIONS),
        "clips_per_second": runs["TSM"].median("clips_per_s"),
        "seconds": time.monotonic() - started,
        "processes": processes,
        "seed": seed,
    }
    (out / "report.html").write_text(page(summary, runs, strips, _facts(shards)), encoding="utf-8")
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def _empty(out: Path) -> None:
    if out.exists():
        if any(out.iterdir()) and not (out / "videos").is_dir():
            raise JobError("folder contains files that are not from a demo", file=out, hint="choose another --out")
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
    # OMP_NUM_THREADS=1 avoids torchrun's warning; the trainer sets the number of threads from the machine's cores.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | SAFE_PATH
    result = subprocess.run(words, stdout=subprocess.DEVNULL, env=environment, check=False)
    if result.returncode:
        raise JobError(f"command failed with exit code {result.returncode}: {shown}")


def _facts(shards: Path) -> dict[str, str]:
    dataset = open_dataset(str(shards))
    first = dataset[dataset.key(0)]
    return {
        "videos": f"{len(dataset)}",
        "shards": f"{len(dataset.generation.shards)}",
        "size": size(sum(shard.bytes for shard in dataset.generation.shards)),
        "each video": f"{first.num_frames} frames of {first.width}x{first.height} at {first.fps} fps",
        "directions": f"{len(dataset.classes)}",
        "textures, train and held-out": f"{8 * INSTANCES['train']} and {8 * INSTANCES['test']}, disjoint",
    }
