"""The commands around training: ``train``, ``eval``, ``predict``, ``weights``, ``report``, ``demo`` and ``bench``."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import fastvid
from fastvid.cli.command import write_file
from fastvid.errors import UsageError, visible
from fastvid.runtime.processes import SAFE_PATH
from fastvid.runtime.values import json_text, listing


@dataclass(frozen=True)
class ViewOptions:
    """Which checkpoint is used, and which clips and crops of each video.

    Attributes:
        checkpoint (NAME): File name in the run's checkpoints, or best (default: the newest complete one).
        protocol (NAME): CLIPSxCROPS whose predictions are averaged: 1x1, 10x3, 1x10, twice, twicex3, ...
        size (PIXELS): Side of the crops, such as 256 (default: the recipe's).
    """

    checkpoint: str | None = None
    protocol: str = "1x1"
    size: int | None = None


def train(
    recipe: str, *changes: str, show: bool = False, dry_run: bool = False, world: int = 1, json: bool = False
) -> int:
    """Train a recipe in this process, or on every rank under torchrun:

      torchrun --nproc-per-node 8 -m fastvid.train RECIPE [key=value ...]

    A run resumes from the newest checkpoint in its folder. On SIGTERM it writes a checkpoint and exits.

    Less memory: run.micro_batch_size=8 adds the gradients of several passes, run.amp=bf16 computes in 16 bits,
    model.options.recompute=true checkpoints activations. Faster: run.amp=bf16, model.compile=true.

    Args:
        recipe (RECIPE): Name of a recipe that comes with fastvid, or a file's path.
        changes (key=value): Such as optim.base_lr=0.02 or run.epochs=10.
        show: Print the configuration as JSON and do not train.
        dry_run: Check files, labels, weights, steps and memory; print them and do not train.
        world (N): World size that a dry run assumes.
        json: Print the result as one JSON object.
    """
    from fastvid.train.config import config
    from fastvid.train.run import launch

    chosen = config.load_all(recipe, changes)
    if show:
        for one in chosen:
            print(json_text(config.to_json(one), indent=1))
        return 0
    return launch.rehearse(chosen, world, as_json=json) if dry_run else launch.start(chosen, as_json=json)


def evaluate(recipe: str, *changes: str, views: ViewOptions, json: bool = False, report: str | None = None) -> int:
    """Score a checkpoint of a run on the evaluation split, each video once.

    fastvid eval kinetics400_tsm_r50 run.out=runs/mine --protocol 10x3 --size 256 --report eval.html

    Args:
        recipe (RECIPE): Name of a recipe that comes with fastvid, or a file's path.
        changes (key=value): Such as optim.base_lr=0.02 or run.epochs=10.
        json: Print one JSON object, with numbers per class or column and the confusion matrix.
        report (FILE): Write them as one HTML page.
    """
    from fastvid.train.config import config
    from fastvid.train.run import launch, scoring

    found = scoring.score(config.load(recipe, changes), **asdict(views))
    if launch.is_first():
        confusion = {} if found.confusion is None else {"confusion": found.confusion.tolist()}
        details = {**found.as_row(), "classes": list(found.rows), **confusion}
        print(json_text(details) if json else listing(found.as_row()))
        if not json and report is None:
            print("next: the same with `--report FILE`, a page of the numbers per class")
        if report is not None:
            from fastvid.report import results

            write_file(report, results.page(found), "page")
    return 0 if found.score.scored == found.score.total else 1


def predict(
    recipe: str, *words: str, top: int = 5, picture: str | None = None, json: bool = False, views: ViewOptions
) -> int:
    """Classify videos that are not in a dataset with a trained model.

      fastvid predict kinetics400_tsm_r50 my.mp4 other.mp4 run.out=runs/mine --picture strip.png

    Videos are encoded like the recipe's dataset, so the model sees the same kind of input as in training.

    Args:
        recipe (RECIPE): Name of a recipe that comes with fastvid, or a file's path.
        words (VIDEO | key=value): Files, and settings of the recipe.
        top (N): Classes to print.
        picture (FILE): Write the model's input frames: .png, or .html with the classes.
        json: Print one JSON object per video and line.
    """
    from fastvid.train.config import config
    from fastvid.train.run import scoring

    if picture is not None and not picture.endswith((".png", ".html")):
        raise UsageError("--picture must end in .png or .html", file=picture)
    # A file name may contain "=".
    changes = [word for word in words if "=" in word and not Path(word).exists()]
    videos = [word for word in words if word not in changes]
    found = scoring.predict(config.load(recipe, changes), videos, top=max(1, top), **asdict(views))
    for prediction in found:
        told = f"{visible(prediction.video)}\n{listing(dict(prediction.top))}"
        print(json_text(prediction.as_row()) if json else told)
    if picture is not None:
        from fastvid.report import results

        results.write(Path(picture), found)
    return 0


def weights(run: str, *, out: str, checkpoint: str | None = None) -> int:
    """Write the weights of a run, those that its evaluations use, as a file for plain torch.

    A model of the same recipe takes it by model.load_state_dict(torch.load(FILE, weights_only=True)), and a recipe
    by model.weights=FILE.

    Args:
        run (RUN): Folder of a run, its run.out, or folder or URL of its checkpoints.
        out (FILE): The file.
        checkpoint (NAME): File name in the run's checkpoints, or best (default: the newest complete one).
    """
    import torch

    from fastvid.train.records.checkpoint import Checkpoints, decode, evaluated_weights
    from fastvid.train.run.assemble import CHECKPOINTS

    inside = Path(run) / CHECKPOINTS
    checkpoints = Checkpoints(str(inside) if inside.is_dir() else run)
    found = checkpoints.find(checkpoint)
    if found is None:
        raise UsageError("run has no checkpoint", file=run, hint="name the folder of a run, its run.out")
    buffer = io.BytesIO()
    torch.save(evaluated_weights(decode(found.data, found.name)), buffer)
    write_file(out, buffer.getvalue(), "weights")
    print(f"{out}: {found.name}")
    return 0


def report(*runs: str, out: str | None = None) -> int:
    """Render training runs as an HTML page: curves, time by phase, scaling over the smallest run.

    Args:
        runs (RUN): Folder of a run, its run.out.
        out (FILE): The page (default: report.html in the first run's folder).
    """
    from fastvid.train.run import run_report

    if not runs:
        raise UsageError("no run is given", hint="name the folder of a run, its run.out")
    folders = [Path(folder) for folder in runs]
    page = Path(out) if out else folders[0] / "report.html"
    write_file(str(page), run_report.page(folders), "page")
    print(page)
    return 0


def demo(*, out: Path = Path("runs/demo"), seed: int = 0, processes: int = 2) -> int:
    """Run all steps on this machine, without a GPU.

    Makes a motion dataset with ffmpeg, shards it, trains TSM and a control under torchrun, and writes
    summary.json and report.html.

    Args:
        out (DIR): Folder to write to; emptied first.
        seed (N): Seed of the videos and of training.
        processes (N): Training processes under torchrun.
    """
    from fastvid.demo import run

    print(json_text(run.run(out, seed=seed, processes=processes), indent=1))
    return 0


def bench(*words: str) -> int:
    """Run a benchmark in a separate process, so that the state of this one is not measured."""
    search_path = [str(bench_folder()), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "bench", *words]
    return subprocess.call(command, env=os.environ | SAFE_PATH | {"PYTHONPATH": os.pathsep.join(search_path)})


def bench_folder() -> Path:
    """Return the folder of the package ``bench``: inside fastvid if installed, beside it in a checkout."""
    package = Path(fastvid.__file__).parent
    installed = package / "bundled"
    return installed if installed.is_dir() else package.parent
