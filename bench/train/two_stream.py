"""Compare two-stream models with each stream alone, from ``fastvid shard --streams rgb,flow`` to held-out accuracy.

toy       textures in two colours of equal luma that drift left or right and wrap around. A frame shows the colour but
          not the direction; flow is computed from luma and shows the direction but not the colour. Two labels:
          "xor", the exclusive or of colour and direction, which neither stream shows: tests the joint head;
          "both", the pair of colour and direction, of which each stream shows half: tests late fusion of two models.
motion    the demo's eight directions of motion, with the temporal model alone.

Held-out videos have other textures. Chance is 50 % for "xor", 25 % for "both" (50 % with one stream) and 12.5 % for
motion. Exit code 1 means that a stream alone was better than chance, or that both streams together or flow on motion
did not reach 95 %. Runs that exist in the working folder are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.common.harness import Record, options
from fastvid.demo.motion import make_videos, plan_videos
from fastvid.load.clips.crops import CenterCrop, RandomCrop
from fastvid.load.clips.sampling import Segments
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.sharding.encode.profiles import get_profile
from fastvid.sharding.job.job import run_job
from fastvid.train.config.config import Config, ModelConfig, OptimConfig, RunConfig
from fastvid.train.config.data import DataConfig
from fastvid.train.records.checkpoint import Checkpoints
from fastvid.train.run import launch, scoring

SCHEMA: Final = "fastvid-bench-two-stream/1"
SIDE, FRAMES, SPEED = 64, 12, 2  # pixels, frames, pixels per frame
VIDEOS: Final = {"train": 128, "test": 64}
INSTANCES: Final = {"train": 6, "test": 2}  # textures of each of the demo's kinds
STACK: Final = 4
CHANCE: Final = 50.0
ALONE: Final = tuple(f"{label} {net}" for label in ("xor", "both") for net in ("tsn-r18", "temporal-r18"))
FUSED: Final = "both two-stream-r18, late fusion of the two"
"""A key in the result, like those in `ALONE` and `LEARNED`."""
LEARNED: Final = ("xor two-stream-r18", FUSED, "motion temporal-r18")
TARGET_PERCENT: Final = 95.0


@dataclass(frozen=True, slots=True)
class Toy:
    """One toy video."""

    split: str
    number: int

    @property
    def warm(self) -> int:
        """Whether the colour is the warm one, 0 or 1."""
        return self.number & 1

    @property
    def right(self) -> int:
        """Whether the texture drifts to the right, 0 or 1."""
        return self.number >> 1 & 1

    @property
    def name(self) -> str:
        """File name."""
        return f"{self.split}-{self.number:04d}.mp4"


def toys() -> list[Toy]:
    """Return all toy videos."""
    return [Toy(split, number) for split, count in VIDEOS.items() for number in range(count)]


def toy_frames(toy: Toy, seed: int) -> Iterator[bytes]:
    """Yield the frames of a toy video as packed 4:2:0 planes."""
    rng = np.random.default_rng([seed, toy.number >> 2, *map(ord, toy.split)])
    spectrum = np.fft.rfft2(rng.standard_normal((SIDE, SIDE)))
    rows, columns = np.fft.fftfreq(SIDE)[:, None], np.fft.rfftfreq(SIDE)[None]
    field = np.fft.irfft2(spectrum * np.exp(-(rows**2 + columns**2) * 60), (SIDE, SIDE))
    luma = np.clip(126 + 45 * field / field.std(), 16, 235).round().astype(np.uint8)
    start, strength = int(rng.integers(SIDE)), int(rng.integers(20, 40))
    chroma = (128 - strength, 128 + strength) if toy.warm else (128 + strength, 128 - strength)
    planes = b"".join(bytes([level]) * (SIDE * SIDE // 4) for level in chroma)
    for frame in range(FRAMES):
        yield np.roll(luma, start + (1 if toy.right else -1) * SPEED * frame, axis=1).tobytes() + planes


def make_toys(folder: Path, seed: int) -> Path:
    """Write the toy videos and their annotations; return the annotation file."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = f"-f rawvideo -pix_fmt yuv420p -s {SIDE}x{SIDE} -r 25 -i - -c:v libx264 -preset ultrafast -crf 8 -threads 1"
    for toy in toys():
        command = [find_ffmpeg().path, "-v", "error", *raw.split(), "-y", str(folder / toy.name)]
        subprocess.run(command, input=b"".join(toy_frames(toy, seed)), check=True)
    path = folder / "annotations.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "label", "split", "both"])
        for toy in toys():
            table.writerow(
                [toy.name, "same" if toy.warm == toy.right else "other", toy.split, 2 * toy.warm + toy.right]
            )
    return path


def config(out: Path, shards: Path, model: str, *, epochs: int, crop: int, **model_options: Any) -> Config:
    """Return the configuration of a small one- or two-stream model on one frame and the flow around it."""
    streams = {"tsn": ("rgb",), "temporal": ("flow",), "two-stream": ("rgb", "flow")}[model.rpartition("-")[0]]
    options = {"width": 8, "dropout": 0.0, **model_options}
    return Config(
        data=DataConfig(
            path=str(shards),
            split="train",
            eval_split="test",
            frames=Segments(1),
            eval_frames=Segments(1, jitter=False),
            spatial=(RandomCrop(crop),),
            eval_spatial=(CenterCrop(crop),),
            streams=streams,
            flow_stack=STACK,
            global_batch_size=16,
        ),
        model=ModelConfig(name=model, options=options if streams == ("rgb",) else {**options, "flow_stack": STACK}),
        optim=OptimConfig(base_lr=0.05, base_batch_size=16, decay="cosine", warmup_epochs=1, weight_decay=5e-4),
        run=RunConfig(out=str(out), epochs=epochs, log_every_steps=100, eval_every_epochs=epochs),
    )


def trained(made: Config) -> float:
    """Train a configuration; return the held-out top-1 in percent."""
    if launch.train(made):
        raise SystemExit("training was interrupted")
    summary = json.loads((Path(made.run.out) / "summary.json").read_text())
    return float(summary["eval"]["top1_percent"])


def weights(made: Config) -> str:
    """Return the file of a run's newest checkpoint."""
    folder = Path(made.run.out) / "checkpoints"
    found = Checkpoints(str(folder)).newest()
    assert found is not None
    return str(folder / found.name)


def run_toy(folder: Path, *, seed: int, epochs: int) -> dict[str, float]:
    """Return the held-out top-1 of each model on both labels, in percent."""
    shards = folder / "toy"
    made = make_toys(folder / "toy-videos", seed)
    run_job(
        str(made.parent),
        str(shards),
        annotations=f"csv:{made}",
        profile=get_profile("compact").changed(short_side=SIDE),
        streams="rgb,flow",
    )
    top1: dict[str, float] = {}
    for net, extra in (("tsn-r18", {}), ("temporal-r18", {}), ("two-stream-r18", {"fusion": "joint"})):
        top1[f"xor {net}"] = trained(config(folder / f"xor-{net}", shards, net, epochs=epochs, crop=48, **extra))
    parts = {}
    for net in ("tsn-r18", "temporal-r18"):
        one = config(folder / f"both-{net}", shards, net, epochs=epochs, crop=48)
        parts[net] = replace(one, data=replace(one.data, label="both"), model=replace(one.model, num_classes=4))
        top1[f"both {net}"] = trained(parts[net])
    fused = config(folder / "both-fused", shards, "two-stream-r18", epochs=1, crop=48, fusion="scores", flow_weight=1.0)
    files = ",".join(weights(one) for one in parts.values())
    fused = replace(
        fused,
        data=replace(fused.data, label="both"),
        model=replace(fused.model, num_classes=4, weights=files),
    )
    top1[FUSED] = scoring.score(fused).score.numbers["top1_percent"]
    return top1


def run_motion(folder: Path, *, seed: int, epochs: int) -> dict[str, float]:
    """Return the held-out top-1 of the temporal model on the demo's directions, in percent."""
    shards, videos = folder / "motion", folder / "motion-videos"
    made = make_videos(videos, plan_videos(INSTANCES, seed=seed))
    run_job(
        str(videos),
        str(shards),
        annotations=f"csv:{made}",
        profile=get_profile("compact").changed(short_side=96),
        streams="rgb,flow",
    )
    return {
        "motion temporal-r18": trained(config(folder / "motion-run", shards, "temporal-r18", epochs=epochs, crop=64))
    }


def misses(top1: Mapping[str, float]) -> list[str]:
    """Return a description of each measured model that fails its check."""
    # Chance plus four standard deviations.
    most = CHANCE + 4 * 100 * 0.5 / VIDEOS["test"] ** 0.5
    found = [f"{net} is above chance on one stream: {top1[net]:.2f} %" for net in ALONE if top1.get(net, 0.0) > most]
    return found + [
        f"{net} is below {TARGET_PERCENT:g} %: {top1[net]:.2f} %"
        for net in LEARNED
        if top1.get(net, TARGET_PERCENT) < TARGET_PERCENT
    ]


add_arguments = options(
    json="two_stream.json",
    folder=(Path("runs/two_stream"), "working folder"),
    seed=(0, "seed of the videos"),
    epochs=(30, "epochs per toy model"),
    motion_epochs=(10, "epochs of the motion model"),
)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    began = time.monotonic()
    top1 = run_toy(args.folder, seed=args.seed, epochs=args.epochs)
    top1 |= run_motion(args.folder, seed=args.seed, epochs=args.motion_epochs)
    for name, value in top1.items():
        print(f"{name:50} {value:6.2f} %")
    record = Record(SCHEMA, args, "seed", top1_percent=top1, videos=VIDEOS, misses=misses(top1))
    record["epochs"] = {"toy": args.epochs, "motion": args.motion_epochs}
    record["seconds"] = round(time.monotonic() - began, 1)
    record.save()
    for miss in record["misses"]:
        print(miss)
    return 1 if record["misses"] else 0
