"""Measure the accuracy that an encoding costs: the same training on the originals, on `compact` and on `intra`.

The originals are the demo's motion videos: nearly lossless, and no single frame shows the label; `copy` packs them
unchanged. All arms use the same model, budget and seeds, so runs are paired: the same samples in the same order, from
the same weights. Each trained model is scored on held-out videos of its own encoding and on the held-out originals.
`coarse` is a positive control with one seed: an unusually bad encoding whose loss the comparison must detect.

With --footage, also measure the SSIM of each encoding of real videos against the scaled source.
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
from bench.common.harness import FOLDER, Record, options, run_json, write_json
from bench.decode.encodings import DEFAULT, default_dataset, ssim, videos
from fastvid.demo import motion
from fastvid.runtime.processes import available_cores
from fastvid.tune.study import mean
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
_FOOTAGE_PROFILES: Final = ("compact", "intra")

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
    footage=(Path, "real videos, for SSIM", FOLDER),
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
    record["footage"] = similarity(args.footage, args.cache) if args.footage else []
    runs: list[tuple[str, int]] = [
        (name, seed) for seed in range(args.seeds) for name in args.arms if name != COARSE or not seed
    ]
    with ThreadPoolExecutor(args.parallel) as pool:
        found = pool.map(lambda one: train(made, one[0], one[1], args.epochs), runs)
        for (name, seed), scores in zip(runs, found, strict=True):
            _log.info("%s, seed %d: %s", name, seed, scores)
            for key, value in scores.items():
                record["arms"][name].setdefault(key, []).append(value)
            # An incomplete record must not look like a result.
            write_json(args.json.with_suffix(".partial"), record)
    record["costs"] = costs(record["arms"])
    args.json.with_suffix(".partial").unlink(missing_ok=True)
    record.save()
    print(table(record))
    return 0


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
    return {
        "profile": profile,
        "megabytes": round(sum(one.bytes for one in dataset.generation.shards) / 1e6, 2),
        "ssim": None if arm.profile == "copy" else round(mean(list(ssim(folder, sources, most=_JUDGED).values())), 4),
    }


def similarity(footage: Path, cache: Path) -> list[dict[str, Any]]:
    """Measure the mean SSIM and size of real videos by encoding: x264's defaults, and the unmodified profiles."""
    sources = videos(footage)
    folders = {DEFAULT: default_dataset(footage, cache)}
    folders |= {profile: shard(footage, profile, cache) for profile in _FOOTAGE_PROFILES}
    rows = []
    for name, folder in folders.items():
        found = list(ssim(folder, sources).values())
        size = sum(one.bytes for one in open_dataset(str(folder)).generation.shards)
        rows.append(
            {
                "encoding": name,
                "videos": len(found),
                "megabytes": round(size / 1e6, 2),
                "ssim": round(mean(found), 4),
                "ssim_min": round(min(found), 4),
                "ssim_max": round(max(found), 4),
            }
        )
    return rows


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


def table(record: Mapping[str, Any]) -> str:
    """Format the record as a text table."""
    lines = [
        f"{record['recipe']}, {record['epochs']} epochs, {record['videos']['test']} held-out videos,"
        f" {_seeds(record)} seeds; top-1 in percent",
        f"  {'trained on':10} {'MB':>6} {'SSIM':>7} {'own':>6} {'originals':>9}   cost of both in points (error)",
    ]
    for name, arm in record["arms"].items():
        own, other = (statistics.fmean(arm[key]) for key in _SCORES)
        similar = "-" if arm["ssim"] is None else f"{arm['ssim']:.4f}"
        costs = "   ".join(_said(record["costs"][name][key]) for key in _SCORES) if name in record["costs"] else ""
        lines.append(f"  {name:10} {arm['megabytes']:6.1f} {similar:>7} {own:6.2f} {other:9.2f}   {costs}".rstrip())
    lines += [
        f"  {row['encoding']} of {row['videos']} real videos: SSIM {row['ssim']:.4f}"
        f" ({row['ssim_min']:.4f} to {row['ssim_max']:.4f}), {row['megabytes']:.1f} MB"
        for row in record["footage"]
    ]
    return "\n".join(lines)


def _seeds(record: Mapping[str, Any]) -> int:
    return max(len(arm[_SCORES[0]]) for arm in record["arms"].values())


def _said(cost: Mapping[str, float | None]) -> str:
    error = cost["standard_error"]
    return f"{cost['mean']:+.2f}" + ("" if error is None else f" ({error:.2f})")
