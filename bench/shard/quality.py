"""Measure the accuracy that an encoding costs: the same training on originals, `compact`, `intra` and `tiles`.

The originals are the demo's motion videos: nearly lossless, and no single frame shows the label; `copy` packs them
unchanged. All arms use the same model, budget and seeds, so runs are paired: the same samples in the same order, from
the same weights. Each trained model is scored on held-out videos of its own encoding and on the held-out originals.
`coarse` is a positive control with one seed: an unusually bad encoding whose loss the comparison must detect.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.common.footage import shard
from bench.common.harness import Record, options, run_json
from bench.decode.similarity import ssim, videos
from fastvid.demo import motion
from fastvid.runtime.processes import available_cores
from fastvid.videos.dataset import open as open_dataset

SCHEMA: Final = "fastvid-bench-quality/1"
RECIPE: Final = "motion_tsm"
ORIGINALS: Final = "originals"
COARSE: Final = "coarse"
# Textures per kind. More held-out textures would resolve smaller differences: one of 256 videos is 0.4 points.
INSTANCES: Final = {"train": 6, "test": 4}

_SIDE: Final = ("--short-side", str(motion.SIDE))
_COARSE_CRF: Final = 45
_WARMUP_EPOCHS: Final = 3  # as in the recipe; fewer in a shorter run
_JUDGED: Final = 64  # number of motion videos whose SSIM is measured
_SCORES: Final = ("top1_percent", "on_originals_percent")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arm:
    """An encoding to compare."""

    profile: str
    options: tuple[str, ...] = ()


ARMS: Final = {
    ORIGINALS: Arm("copy"),
    "compact": Arm("compact", _SIDE),
    "intra": Arm("intra", _SIDE),
    "tiles": Arm("tiles", _SIDE),
    COARSE: Arm("compact", (*_SIDE, "--crf", str(_COARSE_CRF))),
}


add_arguments = options(
    "cache",
    json="quality.json",
    arms=(list(ARMS), "encodings", {"choices": ARMS}),
    seeds=3,
    epochs=24,
    textures=(int, "training textures of each kind (default 6)"),
    parallel=(available_cores(), "concurrent runs"),
)


def run(args: argparse.Namespace) -> int:
    """Create the datasets, train all arms, and write the record."""
    instances = INSTANCES | ({"train": args.textures} if args.textures else {})
    folder = args.cache / f"motion-{instances['train']}-{instances['test']}"
    made = datasets(folder, instances, args.arms)
    sources = videos(folder / "videos", "*.mp4")
    kinds = len(motion.TEXTURES) * len(motion.DIRECTIONS)
    record = Record(SCHEMA, args, "epochs", recipe=RECIPE, chance_percent=100 / len(motion.DIRECTIONS))
    record["videos"] = {split: count * kinds for split, count in instances.items()}
    record["arms"] = {name: encoding(ARMS[name], made[name], sources) for name in args.arms}
    runs: list[tuple[str, int]] = [
        (name, seed) for seed in range(args.seeds) for name in args.arms if name != COARSE or not seed
    ]
    with ThreadPoolExecutor(args.parallel) as pool:
        found = pool.map(lambda one: train(made, one[0], one[1], args.epochs), runs)
        for (name, seed), scores in zip(runs, found, strict=True):
            _log.info("%s, seed %d: %s", name, seed, scores)
            for key, value in scores.items():
                record["arms"][name].setdefault(key, []).append(value)
    record["costs"] = costs(record["arms"])
    return record.finish()


def datasets(folder: Path, instances: Mapping[str, int], arms: Sequence[str]) -> dict[str, Path]:
    """Return the motion videos in every arm's encoding, created on first use."""
    annotations = folder / "videos" / "annotations.csv"
    if not annotations.exists():
        motion.make_videos(folder / "videos", motion.plan_videos(dict(instances)))
    return {
        name: shard(
            folder / "videos",
            ARMS[name].profile,
            folder,
            options=("--annotations", f"csv:{annotations}", *ARMS[name].options),
            name=name,
        )
        for name in arms
    }


def encoding(arm: Arm, folder: Path, sources: Mapping[str, Path]) -> dict[str, Any]:
    """Describe an arm's dataset: profile, size and mean SSIM."""
    dataset = open_dataset(str(folder))
    profile = dict(dataset.generation.shards[0].profile)
    judged = {} if arm.profile == "copy" else ssim(folder, sources, most=_JUDGED)
    return {
        "profile": profile,
        "megabytes": round(sum(one.bytes for one in dataset.generation.shards) / 1e6, 2),
        "ssim": round(statistics.fmean(judged.values()), 4) if judged else None,
    }


def train(made: Mapping[str, Path], name: str, seed: int, epochs: int) -> dict[str, float]:
    """Train once; return top-1 in percent and loss on the held-out videos, in its own encoding and as originals."""
    with tempfile.TemporaryDirectory(prefix="fastvid-quality-") as out:
        shared = [RECIPE, f"run.out={out}", f"run.seed={seed}", f"run.epochs={epochs}", "data.num_threads=1"]
        shared += [f"optim.warmup_epochs={min(_WARMUP_EPOCHS, epochs - 1)}", "--json"]
        summary = _command("fastvid.train", *shared, f"data.path={made[name]}", f"run.eval_every_epochs={epochs}")
        scores = {"own": summary["eval"]}
        scores["originals"] = scores["own"]
        if name != ORIGINALS and ORIGINALS in made:
            scores["originals"] = _command("fastvid", "eval", *shared, f"data.path={made[ORIGINALS]}")
    return {
        "top1_percent": scores["own"]["top1_percent"],
        "loss": scores["own"]["loss"],
        "on_originals_percent": scores["originals"]["top1_percent"],
        "on_originals_loss": scores["originals"]["loss"],
    }


def _command(module: str, *words: str) -> dict[str, Any]:
    return run_json([sys.executable, "-m", module, *words])


def costs(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return each arm's loss of top-1 against the originals in points, paired by seed; negative is a gain."""
    if ORIGINALS not in arms:
        return {}
    wanted = arms[ORIGINALS]["top1_percent"]
    return {
        name: {key: cost(wanted[: len(arm[key])], arm[key]) for key in _SCORES}
        for name, arm in arms.items()
        if name != ORIGINALS
    }


def cost(wanted: Sequence[float], found: Sequence[float]) -> dict[str, float | None]:
    """Return the mean difference of paired runs and its standard error (None for a single pair)."""
    pairs = [a - b for a, b in zip(wanted, found, strict=True)]
    error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
    return {"mean": statistics.fmean(pairs), "standard_error": error, "least": min(pairs), "greatest": max(pairs)}
