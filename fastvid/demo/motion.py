"""A motion dataset: textures that drift in one of eight directions.

A single frame does not reveal the label. Every texture drifts in all eight directions from the same random position and
wraps around at the borders, so each frame of each direction is a uniformly random shift of the same picture. The
textures of the test split do not occur in training. The kind of texture is a second label, which needs no motion: it
shows whether a model learns at all.
"""

from __future__ import annotations

import concurrent.futures
import csv
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from fastvid.errors import JobError
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.runtime.arrays import FloatArray, UInt8Array
from fastvid.runtime.processes import available_cores

DIRECTIONS: Final = {
    "right": (0, 1),
    "down-right": (1, 1),
    "down": (1, 0),
    "down-left": (1, -1),
    "left": (0, -1),
    "up-left": (-1, -1),
    "up": (-1, 0),
    "up-right": (-1, 1),
}
SIDE: Final = 96  # width and height in pixels; a multiple of 16, so that sharding keeps every pixel
NUM_FRAMES: Final = 24
FPS: Final = 24
SPEED: Final = 2  # pixels per frame and moving axis: 6 between two of 8 sampled frames, a third of a texture's feature

Make = Callable[[np.random.Generator, FloatArray, FloatArray], FloatArray]


@dataclass(frozen=True, slots=True)
class MotionVideo:
    """One video to generate."""

    split: str
    direction: str  # key of `DIRECTIONS`
    texture: str  # key of `TEXTURES`
    instance: int  # number of the random texture of this kind, from 0
    seed: int

    @property
    def name(self) -> str:
        """File name without a folder; unique in the dataset."""
        return f"{self.split}-{self.texture}-{self.instance:02d}-{self.direction}.mp4"


def _waves(rng: np.random.Generator, y: FloatArray, x: FloatArray, low: int, high: int, count: int) -> FloatArray:
    """Return a sum of `count` random waves with `low` to `high` periods per side.

    Periods per axis are whole numbers, so that the picture wraps around. `y`, `x`: coordinates [SIDE, SIDE], 0 to 1.
    """
    total = np.zeros_like(x)
    for _ in range(count):
        angle, frequency = rng.uniform(0, 2 * np.pi), rng.uniform(low, high)
        fy, fx = round(frequency * np.sin(angle)), round(frequency * np.cos(angle))
        total += np.cos(2 * np.pi * (fy * y + fx * x) + rng.uniform(0, 2 * np.pi))
    return total


def _bricks(rng: np.random.Generator, y: FloatArray, x: FloatArray) -> FloatArray:
    tall, wide = rng.integers(2, 4), rng.integers(2, 4)
    row = np.floor(y * 2 * tall)
    joint = ((y * 2 * tall) % 1 < 0.16) | ((x * wide + 0.5 * (row % 2)) % 1 < 0.08)
    picture: FloatArray = np.where(joint, -1.0, 1.0)
    return picture


def _dots(rng: np.random.Generator, y: FloatArray, x: FloatArray) -> FloatArray:
    picture = np.full_like(x, -1.0)
    for _ in range(14):
        cy, cx, radius = rng.uniform(), rng.uniform(), rng.uniform(0.04, 0.08)
        dy, dx = (y - cy + 0.5) % 1 - 0.5, (x - cx + 0.5) % 1 - 0.5
        picture[dy**2 + dx**2 < radius**2] = 1.0
    return picture


def _rings(rng: np.random.Generator, y: FloatArray, x: FloatArray) -> FloatArray:
    cy, cx, count = rng.uniform(), rng.uniform(), rng.integers(5, 8)
    dy, dx = (y - cy + 0.5) % 1 - 0.5, (x - cx + 0.5) % 1 - 0.5
    return np.sign(np.sin(2 * np.pi * count * np.sqrt(dy**2 + dx**2)))


def _crosses(rng: np.random.Generator, y: FloatArray, x: FloatArray) -> FloatArray:
    picture = np.full_like(x, -1.0)
    for _ in range(9):
        cy, cx, arm = rng.uniform(), rng.uniform(), rng.uniform(0.08, 0.13)
        dy, dx = abs((y - cy + 0.5) % 1 - 0.5), abs((x - cx + 0.5) % 1 - 0.5)
        picture[((dy < 0.025) & (dx < arm)) | ((dx < 0.025) & (dy < arm))] = 1.0
    return picture


def _camouflage(rng: np.random.Generator, y: FloatArray, x: FloatArray) -> FloatArray:
    return np.sign(_waves(rng, y, x, 2, 4, 10)) + 0.5 * np.sign(_waves(rng, y, x, 2, 4, 10))


def _plaid(rng: np.random.Generator, y: FloatArray, x: FloatArray) -> FloatArray:
    a, b = rng.integers(2, 5, size=2)
    stripes: FloatArray = np.sign(np.sin(2 * np.pi * a * x)) + np.sin(2 * np.pi * b * y)
    stripes += 0.5 * np.cos(2 * np.pi * (x + y))
    return stripes


TEXTURES: Final[dict[str, Make]] = {
    "clouds": partial(_waves, low=1, high=4, count=12),
    "grain": partial(_waves, low=5, high=8, count=40),
    "bricks": _bricks,
    "dots": _dots,
    "rings": _rings,
    "crosses": _crosses,
    "camouflage": _camouflage,
    "plaid": _plaid,
}


def plan_videos(instances: dict[str, int], *, seed: int = 0) -> list[MotionVideo]:
    """Return the videos of a dataset: every texture instance in every direction."""
    return [
        MotionVideo(split, direction, texture, instance, seed)
        for split, count in instances.items()
        for texture in TEXTURES
        for instance in range(count)
        for direction in DIRECTIONS
    ]


def frames(video: MotionVideo) -> Iterator[UInt8Array]:
    """Yield the frames of a video, RGB uint8 [SIDE, SIDE, 3] each."""
    # The seed does not depend on the direction: all eight start with the same picture at the same position.
    names = (video.split, video.texture)
    rng = np.random.default_rng([video.seed, video.instance, *(ord(c) for name in names for c in name)])
    grid = np.arange(SIDE) / SIDE
    y, x = np.meshgrid(grid, grid, indexing="ij")
    picture = TEXTURES[video.texture](rng, y, x)
    span = picture.max() - picture.min()
    level = (picture - picture.min())[..., None] / (span or 1.0)
    dark, light = rng.uniform(10, 100, 3), rng.uniform(150, 245, 3)
    rgb = (dark + level * (light - dark)).round().astype(np.uint8)
    start = rng.integers(0, SIDE, 2)
    dy, dx = DIRECTIONS[video.direction]
    for number in range(NUM_FRAMES):
        yield np.roll(rgb, (start[0] + SPEED * number * dy, start[1] + SPEED * number * dx), axis=(0, 1))


def make_videos(folder: Path, videos: list[MotionVideo]) -> Path:
    """Write the videos and their annotations to a folder.

    Returns the path of the annotations, see `annotate`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = find_ffmpeg().path
    # One ffmpeg process per texture, for all its directions: starting one costs more than encoding 24 small frames.
    groups = [videos[start : start + len(DIRECTIONS)] for start in range(0, len(videos), len(DIRECTIONS))]
    with concurrent.futures.ThreadPoolExecutor(available_cores()) as pool:
        for _ in pool.map(lambda group: _encode(program, group, folder), groups):
            pass
    return annotate(folder / "annotations.csv", videos)


def annotate(path: Path, videos: list[MotionVideo]) -> Path:
    """Write a CSV of videos: path, label (the direction), split, and texture as a number; return `path`."""
    kinds = list(TEXTURES)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "label", "split", "texture"])
        for video in videos:
            table.writerow([video.name, video.direction, video.split, kinds.index(video.texture)])
    return path


def _encode(program: str, videos: list[MotionVideo], folder: Path) -> None:
    raw = f"-v error -nostdin -y -f rawvideo -pix_fmt rgb24 -s {SIDE}x{SIDE} -r {FPS} -i pipe:0"
    command = [program, *raw.split()]
    for number, video in enumerate(videos):
        cut = f"trim=start_frame={number * NUM_FRAMES}:end_frame={(number + 1) * NUM_FRAMES},setpts=PTS-STARTPTS"
        # Nearly lossless, so that compression artefacts in the demo come only from sharding.
        codec = "-c:v libx264 -preset ultrafast -crf 12 -pix_fmt yuv420p -threads 1"
        command += ["-map", "0:v", "-vf", cut, *codec.split(), f"file:{folder / video.name}"]
    data = b"".join(frame.tobytes() for video in videos for frame in frames(video))
    result = subprocess.run(command, input=data, capture_output=True, check=False)
    if result.returncode:
        raise JobError(f"ffmpeg failed: {result.stderr.decode(errors='replace').strip()}", file=folder)
