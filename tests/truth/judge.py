"""What a player shows of a file, and whether a sample of a dataset is the same."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastvid
from fastvid.errors import FastvidError
from tests.makers import ffmpeg
from tests.truth.recipes import ENCODED, PLACE, Recipe, read_number

LEVELS = 3.0  # mean difference of pixels, of 255
_TURNED_BACK = {
    "transpose=clock": lambda picture: np.rot90(picture, 1),
    "transpose=cclock": lambda picture: np.rot90(picture, -1),
    "hflip,vflip": lambda picture: np.rot90(picture, 2),
    "hflip": lambda picture: picture[:, ::-1],
    "vflip": lambda picture: picture[::-1],
    "transpose=cclock_flip": lambda picture: picture.transpose(1, 0, 2),
}


@dataclass(frozen=True)
class Truth:
    """What a player shows."""

    pictures: np.ndarray  # upright, with square pixels, uint8 [N, H, W, 3]
    seconds: np.ndarray  # when each is shown, float64 [N], from 0
    whole: np.ndarray | None = None  # pictures with their last odd row and column, scaled to even sides
    last: float = 0.0  # seconds that the last picture is shown: as the container tells, else as long as the one before
    slack: int = 0  # pixels by which its sides may differ: Matroska gives proportions in whole pixels

    @property
    def nominal(self) -> float:
        """Seconds that a frame usually lasts."""
        return float(np.median(np.diff(self.seconds))) if len(self.seconds) > 1 else 0.04

    @property
    def ends(self) -> np.ndarray:
        """When each picture is no longer shown, float64 [N]."""
        return np.append(self.seconds[1:], self.seconds[-1] + max(self.nominal, self.last))


def shown_size(recipe: Recipe) -> tuple[int, int]:
    """Return the height and width of what a player shows, without a last odd row or column."""
    top, left, bottom, right = recipe.crop
    height, width = recipe.size[0] - top - bottom, recipe.size[1] - left - right
    if (aspect := Fraction(recipe.aspect)) != 1:
        width = 2 * round(width * aspect / 2)
    if "transpose" in recipe.turned:
        height, width = width, height
    return height & ~1, width & ~1


def play(path: Path, recipe: Recipe) -> Truth:
    """Decode a file by the ffmpeg program, which turns pictures; only its newest versions cut them, too."""
    height, width = shown_size(recipe)
    before, filters = [], []
    if any(recipe.crop):
        top, left, bottom, right = recipe.crop
        before = ["-noautorotate", *uncropped()]
        filters = [f"crop=iw-{left + right}:ih-{top + bottom}:{left}:{top}:exact=1", recipe.turned or "null"]
    before += ["-i", str(path), "-map", "0:V:0"]
    scale = f"scale={width}:{height}:flags=bicubic+accurate_rnd"
    pictures, seconds, last = _decoded(before, [recipe.player, *filters, scale], width, height)
    whole = None
    if recipe.size[0] % 2 or recipe.size[1] % 2:
        whole = pictures
        pictures, *_ = _decoded(before, [recipe.player, *filters, f"crop={width}:{height}:0:0"], width, height)
    truth = Truth(
        pictures, seconds - seconds[:1], whole, last, 2 * (recipe.suffix in ("mkv", "webm") and recipe.aspect != "1")
    )
    if recipe.numbers is not None and recipe.name.startswith("av1"):  # see SHOWN_BY_OLD
        kept = [place for place, number in enumerate(numbers_of(truth, recipe)) if number in recipe.numbers]
        truth = Truth(pictures[kept], seconds[kept] - seconds[kept[0]])
    return truth


def _decoded(arguments: list[str], filters: list[str], width: int, height: int) -> tuple[np.ndarray, np.ndarray, float]:
    command = [ffmpeg(), "-hide_banner", "-v", "info", *arguments, "-vf", ",".join([*filters, "showinfo"])]
    command += ["-fps_mode", "passthrough", "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    seconds = np.array([float(time) for time in re.findall(rb"pts_time:\s*([-\d.e+]+)", done.stderr)])
    pictures = np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)
    assert len(seconds) == len(pictures), (len(seconds), len(pictures))
    told = [float(time) for time in re.findall(rb"duration_time:\s*([\d.e+]+)", done.stderr)][-1:]
    last = next(filter(None, told), float(np.diff(seconds)[-1]) if len(seconds) > 1 else 0.0)
    return pictures, seconds, last


def uncropped() -> list[str]:
    """Return the option by which ffmpeg leaves what a container cuts off."""
    version = subprocess.run([ffmpeg(), "-version"], capture_output=True, text=True, check=True).stdout.split()[2]
    numbers = re.match(r"n?(\d+)\.(\d+)", version)
    return ["-apply_cropping", "codec"] if numbers is None or tuple(map(int, numbers.groups())) >= (7, 1) else []


def numbers_of(truth: Truth, recipe: Recipe) -> list[int | None]:
    """Return the painted numbers that a player shows."""
    back = _TURNED_BACK.get(recipe.turned, lambda picture: picture)
    return [read_number(back(picture)) for picture in truth.pictures]


def fitted(pictures: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return pictures that cover a size, cut at its middle, as float32 [N, H, W, 3]."""
    own = pictures.shape[1:3]
    if own == (height, width):
        return pictures.astype(np.float32)
    scale = max(height / own[0], width / own[1])
    size = [max(one, round(side * scale)) for one, side in zip((height, width), own, strict=True)]
    data = torch.from_numpy(pictures.astype(np.float32)).permute(0, 3, 1, 2)
    data = torch.nn.functional.interpolate(data, size, mode="bilinear", antialias=True)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return data[:, :, top : top + height, left : left + width].permute(0, 2, 3, 1).numpy()


def halved(data: np.ndarray, truth: Truth) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures of another size and those of a player at a third of the lesser, float32 [N, H, W, 3]."""
    expected = fitted(truth.pictures if truth.whole is None else truth.whole, *data.shape[1:3])
    least = min(data.shape[1], data.shape[2], *truth.pictures.shape[1:3]) / 3
    scale = least / min(data.shape[1:3])
    size = [round(side * scale) for side in data.shape[1:3]]
    return fitted(data, *size), fitted(expected, *size)


def _differences(shown: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the mean difference of each of some pictures to each expected one, float [T, N]."""
    return np.stack([np.abs(expected - picture.astype(np.float32)).mean(axis=(1, 2, 3)) for picture in shown])


def proportions(video: Any, truth: Truth, way: str) -> str:
    """Return what is wrong with the shape of a sample."""
    height, width = truth.pictures.shape[1:3]
    got = (video.height & ~1, video.width & ~1)
    if way not in ENCODED:
        alike = abs(got[0] - height) <= truth.slack and abs(got[1] - width) <= truth.slack
        return "" if alike else f"size {got} instead of {(height, width)}"
    scale = 256 / min(height, width)
    lost = [round(side * scale) - one for side, one in zip((height, width), got, strict=True)]
    return "" if all(-2 <= one < 18 for one in lost) else f"size {got} of {(height, width)}"


def frames(video: Any, truth: Truth, recipe: Recipe, way: str) -> str:
    """Return what is wrong with all frames of a sample."""
    if wrong := proportions(video, truth, way):
        return wrong
    batch = video.frames(slice(None))
    if way in ENCODED:
        return _at_times(batch.data, batch.seconds, float(1 / video.fps), truth, recipe)
    if len(video) != len(truth.pictures):
        return f"{len(video)} frames instead of {len(truth.pictures)}"
    if wrong := _pictures(batch.data, np.arange(len(video)), truth):
        return wrong
    if recipe.pictures == "counted":
        return ""
    halves = np.minimum(truth.ends - truth.seconds, truth.nominal) / 2
    late = np.abs(batch.seconds - truth.seconds)
    if (late > halves).any():
        return f"frame {int(late.argmax())} is {late.max():.3f} s off"
    return ""


def _pictures(data: np.ndarray, numbers: np.ndarray, truth: Truth) -> str:
    """Return which of the pictures is not the one of its number."""
    expected = fitted(truth.pictures, *data.shape[1:3])
    for picture, number in zip(data, numbers.tolist(), strict=True):
        near = np.arange(max(0, number - 2), min(len(expected), number + 3))
        found = _differences(picture[None], expected[near])[0]
        if found[near == number][0] > LEVELS:
            off = found[near == number][0]
            return f"frame {number} differs by {off:.1f}, frame {near[found.argmin()]} by {found.min():.1f}"
    return ""


def _at_times(data: np.ndarray, seconds: np.ndarray, lasts: float, truth: Truth, recipe: Recipe) -> str:
    """Return which picture is not shown at its time, give or take half of what a frame lasts."""
    slack = max(lasts, truth.nominal) / 2 + 1e-3
    data, expected = halved(data, truth)
    for place, (picture, time) in enumerate(zip(data, seconds.tolist(), strict=True)):
        if recipe.pictures == "counted":
            right = np.array([place])
        else:
            right = np.flatnonzero((truth.seconds <= time + slack) & (truth.ends > time - slack))
        if recipe.pictures == "numbers":
            shown, players = read_number(picture), numbers_of(truth, recipe)
            if shown not in [players[number] for number in right]:
                return f"frame {place} at {time:.3f} s shows {shown}"
            continue
        found = _differences(picture[None], expected)[0]
        if not len(right) or found[right].min() > LEVELS or found.argmin() not in right:
            shown = f"frame {found.argmin()} ({found.min():.1f})"
            return f"frame {place} at {time:.3f} s is {shown}, not one of {right.tolist()}"
    if recipe.pictures == "counted":
        return ""
    length = seconds[-1] + lasts
    if abs(length - truth.ends[-1]) > 2 * slack + truth.nominal:
        return f"lasts {length:.3f} s instead of {truth.ends[-1]:.3f}"
    return ""


def alone(video: Any, truth: Truth, recipe: Recipe, way: str) -> str:
    """Return what is wrong if frames are read one by one in random order."""
    everything = video.frames(slice(None)).data
    order = np.random.default_rng(len(everything)).permutation(len(everything))[:10]
    for number in order.tolist():
        if not np.array_equal(video.frames([number]).data[0], everything[number]):
            return f"frame {number} differs if it is read alone"
    return ""


def at_seconds(video: Any, truth: Truth, recipe: Recipe, way: str) -> str:
    """Return what is wrong if frames are asked for by their time."""
    if recipe.pictures == "counted":
        return ""
    times = truth.seconds + 0.25 * np.minimum(truth.ends - truth.seconds, truth.nominal)
    times = times[times < float(video.duration)] if way in ENCODED else times
    batch = video.frames(seconds=times)
    if way in ENCODED:
        return _at_times(batch.data, times, float(1 / video.fps), truth, recipe).partition("lasts")[0]
    return "" if batch.frames.tolist() == list(range(len(times))) else f"frames {batch.frames.tolist()}"


def sound(video: Any, truth: Truth, recipe: Recipe, way: str) -> str:
    """Return what is wrong with the sound: it has that of its pictures, or says that it has none."""
    if not recipe.sound or not (video.has_sound or way in PLACE):
        return ""  # a job that was not asked for sound
    rate = 16_000
    try:
        clip = video.audio(0.2, 0.6, rate, mono=True)
    except FastvidError as error:
        return "" if "without their sound" in str(error) else str(error)
    heard = np.asarray(clip.data, np.float64).reshape(-1)
    start = (numbers_of(truth, recipe)[0] or 0) / 25
    lags = np.arange(-0.08, 0.08, 1 / rate)
    t = 0.2 + start + np.arange(len(heard)) / rate
    found = [float(np.dot(heard, np.sin(2 * np.pi * (t + lag) * (300 + 600 * (t + lag))))) for lag in lags]
    best = float(lags[int(np.argmax(found))])
    if max(found) < 0.05 * len(heard):
        return "silence or other sound"
    # Half a frame, which a player is off as well where a copy begins between two frames.
    return "" if abs(best) <= 0.02 + 1 / rate else f"sound is {best:.3f} s off"


READINGS = {"frames": frames, "alone": alone, "seconds": at_seconds, "sound": sound}


def clips(dataset: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return what a loader delivers of each sample, by key: a clip, its frames, and their times."""
    loader = fastvid.ClipLoader(
        dataset,
        frames=fastvid.Segments(4),
        spatial=fastvid.Native(),
        global_batch_size=8,
        order=fastvid.Order(shuffle=True, last="keep"),
        output=fastvid.Output(dtype=torch.uint8, collate="list"),
        workers=fastvid.Workers(num_threads=2, on_error=fastvid.Skip(1.0)),
        rank=0,
        world_size=1,
    )
    found = {}
    try:
        for batch in loader:
            for row, key in enumerate(batch.key):
                if key and bool(batch.valid[row]):
                    found[key] = (batch.video[row], batch.frame_index[row], batch.seconds[row])
    finally:
        loader.close()
    return found


def loaded(clip: Any, video: Any, truth: Truth, recipe: Recipe, way: str) -> str:
    """Return what is wrong with a sample's clip of a loader, compared with the same frames as the video gives them."""
    if clip is None:
        return "was skipped"
    pictures, numbers, seconds = clip
    batch = video.frames(numbers.numpy())
    shown = pictures.permute(1, 2, 3, 0).numpy()
    if shown.shape != batch.data.shape:
        return f"has shape {shown.shape}"
    if np.abs(shown.astype(np.int16) - batch.data).mean() > 1:
        return "shows other pictures"
    late = np.abs(seconds.numpy() - batch.seconds).max()
    return "" if late <= truth.nominal / 2 else f"is {late:.3f} s off"
