"""Make datasets of the footage that people train on, from a folder of real videos: ``python -m bench footage``.

Frames of the videos follow one another, scaled to the size of the kind, and are encoded as it is usually stored.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.common.harness import NEEDED, options
from fastvid.errors import UsageError
from fastvid.media.ffmpeg import find_ffmpeg

SAMPLINGS: Final = ("tsn8", "dense16x4", "dense32x2")
"""Samplings to benchmark; see `fastvid.tune.measure.parse_sampling`."""


def shard(footage: Path, profile: str, cache: Path, *, options: Sequence[str] = (), name: str | None = None) -> Path:
    """Return the dataset of `footage` in a profile, created on first use."""
    folder = cache / (name or profile)
    if not (folder / "dataset.json").exists():
        command = [sys.executable, "-m", "fastvid", "shard", str(footage), "--out", str(folder), "--profile", profile]
        done = subprocess.run([*command, *options], stdout=subprocess.DEVNULL, check=False)
        # 3: complete, but some sources were rejected.
        if done.returncode not in (0, 3):
            raise UsageError(f"`{' '.join(command[1:])}` failed with exit code {done.returncode}")
    return folder


X264: Final = ("-c:v", "libx264", "-preset", "veryfast", "-pix_fmt", "yuv420p")
_X265: Final = ("-c:v", "libx265", "-preset", "veryfast", "-tag:v", "hvc1", "-pix_fmt", "yuv420p")
COPIED: Final = "as it is"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of footage."""

    size: tuple[int, int]  # height and width in pixels
    fps: int  # frames a second
    seconds: int
    videos: int
    options: tuple[str, ...]
    profiles: tuple[str, ...]
    samplings: tuple[str, ...]
    crop: int  # side of the square crop in pixels
    loops: int = 1


KINDS: Final[Mapping[str, Kind]] = {
    # 4 robots with 4 cameras each; 1 to 8 frames, a tenth of a second apart.
    "robot": Kind((480, 640), 30, 6, 16, X264, ("compact", "intra"), ("dense1x1", "dense2x3", "dense8x3"), 448),
    "diffusion": Kind((720, 1280), 24, 8, 4, X264, ("compact", "intra"), ("dense49x1", "dense121x1"), 704),
    # 2 fps and at most 768 frames, as for language models: one frame of each 4.7 seconds. As x264 writes it, most of
    # 108,000 frames would be decoded for a clip.
    "hour": Kind((480, 848), 30, 60, 1, X264, ("compact",), ("tsn768",), 224, loops=60),
    # 240 frames of a minute, every 15th.
    "two_fps": Kind((480, 848), 30, 60, 2, X264, (COPIED, "compact"), ("dense120x15",), 224, loops=10),
    "phone": Kind((1080, 1920), 30, 6, 4, _X265, (COPIED,), ("tsn8", "dense16x4"), 1024),
}

# Long videos are not to be split.
_WHOLE: Final = ("--max-seconds", "7200")


add_arguments = options(
    "cache", footage=(Path, "real videos", NEEDED), kinds=(list(KINDS), "kinds", {"choices": KINDS})
)


def run(args: argparse.Namespace) -> int:
    """Make the datasets."""
    for kind in args.kinds:
        for name, folder in datasets(kind, args.footage, args.cache):
            print(f"{kind}, {name}: {folder}")
    return 0


def datasets(name: str, footage: Path | None, cache: Path) -> Iterator[tuple[str, Path]]:
    """Yield each profile of a kind and its dataset, which is made when it is reached, unless it exists."""
    kind = KINDS[name]
    for profile in kind.profiles:
        yield profile, _dataset(name, kind, profile, footage, cache)


def _dataset(name: str, kind: Kind, profile: str, footage: Path | None, cache: Path) -> Path:
    label = f"{name}-{profile.replace(' ', '-')}"
    folder = cache / label
    if (folder / "dataset.json").exists():
        return folder
    files = sources(name, kind, footage, cache)
    encode = ("--short-side", str(min(kind.size)))
    if profile == COPIED:
        return shard(_looped(files, kind.loops), "copy", cache, options=_WHOLE, name=label)
    if kind.loops == 1:
        return shard(files, profile, cache, options=encode, name=label)
    # Encoded once, and repeated without being encoded again.
    once = shard(files, profile, cache, options=encode, name=f"{label}-once")
    unpacked = cache / f"{label}-files"
    unpacked.mkdir(exist_ok=True)
    for tar in sorted(once.glob("*.tar")):
        subprocess.run(["tar", "-xf", str(tar), "-C", str(unpacked), "--wildcards", "*.mp4"], check=True)
    return shard(_looped(unpacked, kind.loops), "copy", cache, options=_WHOLE, name=label)


def sources(name: str, kind: Kind, footage: Path | None, cache: Path) -> Path:
    """Return the folder of a kind's files, made on first use."""
    folder = cache / f"{name}-sources"
    if not folder.exists():
        if footage is None:
            raise UsageError(f"there is no {name} footage yet", hint="name a folder of videos with --footage")
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for number in range(kind.videos):
            pictures = itertools.islice(frames(footage, number, kind.videos, kind.size), kind.fps * kind.seconds)
            encode(pictures, part / f"{number:02d}.mp4", kind.size, kind.fps, kind.options)
        part.rename(folder)
    return folder


def encode(
    pictures: Iterator[npt.NDArray[np.uint8]], path: Path, size: tuple[int, int], fps: int, options: Sequence[str]
) -> None:
    """Encode frames [H, W, 3] of a height and width as a file."""
    raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{size[1]}x{size[0]}", "-r", str(fps), "-i", "-")
    command = [find_ffmpeg().path, "-v", "error", "-y", *raw, *options, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        for picture in pictures:
            process.stdin.write(picture.tobytes())
    if process.returncode:
        raise UsageError(f"`{' '.join(command)}` failed with exit code {process.returncode}")


def frames(footage: Path, first: int, step: int, size: tuple[int, int]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the frames of every `step`-th video from `first` on, scaled, without end; files that fail are skipped."""
    import av

    files = sorted(path for path in footage.rglob("*") if path.suffix in (".mp4", ".webm", ".mkv"))
    if not files:
        raise UsageError("no videos", file=footage, hint="name a folder of videos with --footage")
    for path in itertools.cycle(files[first % len(files) :: step]):
        try:
            with av.open(str(path)) as opened:
                for frame in opened.decode(video=0):
                    yield frame.reformat(size[1], size[0], "rgb24").to_ndarray().copy()
        except av.FFmpegError:
            continue


def _looped(files: Path, loops: int) -> Path:
    """Return a folder of the videos, each repeated without being encoded again."""
    if loops == 1:
        return files
    folder = files.with_name(f"{files.name}-by-{loops}")
    folder.mkdir(exist_ok=True)
    for file in sorted(files.glob("*.mp4")):
        command = [find_ffmpeg().path, "-v", "error", "-y", "-stream_loop", str(loops - 1), "-i", str(file)]
        subprocess.run([*command, "-map", "0:v", "-c", "copy", str(folder / file.name)], check=True)
    return folder
