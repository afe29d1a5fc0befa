"""``--pack``: make the benchmark's data from real videos, small enough to carry to a machine without a network.

Every dataset has the digests of all its frames by PyAV, whose decoder the tests compare with ffmpeg bit by bit. A frame
of 720 lines takes 1.4 MB and its digest 32 bytes, so all frames of all clips can be carried.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import av
import numpy as np

import fastvid
from bench.common.footage import shard
from bench.gpu.conformance import clip_of, digests, planes_of
from bench.gpu.settings import MANIFEST, REFERENCE
from fastvid.decode.pyav import PyAvDecoder
from fastvid.errors import UsageError
from fastvid.media.ffmpeg import find_ffmpeg

LIMIT_MB: Final = 15.0
"""What may be carried besides the project and PyAV, within one transfer of 64 MiB."""

_SUFFIXES: Final = (".mkv", ".mov", ".mp4", ".webm")
_X264: Final = ("-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-pix_fmt", "yuv420p", "-threads", "1")


@dataclass(frozen=True)
class Part:
    """A dataset of the pack."""

    name: str
    profile: str
    lines: int  # its short side in pixels
    clips: int
    size: tuple[int, int] | None = None


def parts(clips: int, lines: Sequence[int]) -> list[Part]:
    """Return the datasets for `clips` clips of the fewest lines; more lines get fewer clips, by their area."""
    found = []
    for side in lines:
        count = max(1, round(clips * (lines[0] / side) ** 2))
        found += [
            Part(f"compact-{side}", "compact", side, count),
            Part(f"intra-{side}", "intra", side, max(1, count // 3)),
            Part(f"hevc-{side}", "hevc", side, max(1, count // 3)),
        ]
    # NVDEC codes 342x256 as 352x256 and 1080 lines as 1088: decoders crop them, and some forget to.
    small = lines[0]
    found.append(Part(f"tiles-{small}", "tiles", small, max(1, clips // 3)))
    odd = (small * 4 // 3 // 2 * 2 + (2 if small * 4 // 3 % 2 else 0), small)
    high = (lines[-1] * 8 // 3, lines[-1] * 3 // 2)
    return [
        *found,
        Part(f"copy-{odd[0]}x{odd[1]}", "copy", odd[1], 2, odd),
        Part(f"copy-{high[0]}x{high[1]}", "copy", high[1], 1, high),
    ]


def pack(footage: Path | None, out: Path, *, clips: int, lines: Sequence[int], seconds: float) -> float:
    """Make the datasets, their reference digests and the manifest.

    `footage`: real videos; None generates some, which may be given to anybody. `lines`: short sides in pixels. Returns
    the size in MB.
    """
    if out.exists():
        raise UsageError("the folder exists", file=out, hint="delete it or name another one")
    scratch = out.with_name(f"{out.name}.work")
    try:
        footage = footage or _generated(scratch / "footage", clips, max(lines), seconds)
        # Two at a time: small datasets spend most of it on starting processes.
        with ThreadPoolExecutor(2) as pool:
            made = [
                pool.submit(_make, part, footage, out, scratch / part.name, seconds) for part in parts(clips, lines)
            ]
            rows = [one.result() for one in made]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    (out / MANIFEST).write_text(json.dumps({"datasets": rows, "seconds": seconds}, indent=1) + "\n")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 1e6
    if size > LIMIT_MB:
        raise UsageError(
            f"the pack has {size:.1f} MB, more than {LIMIT_MB:g}", file=out, hint="lower --clips or --clip-seconds"
        )
    return size


def _make(part: Part, footage: Path, out: Path, scratch: Path, seconds: float) -> dict[str, Any]:
    sources = _cut(_chosen(footage, part), scratch, seconds, part.size)
    options = () if part.profile == "copy" else ("--short-side", str(part.lines))
    folder = shard(sources, part.profile, out, options=(*options, "--workers", "2"), name=part.name)
    dataset, decoder = fastvid.open(folder), PyAvDecoder()
    found = []
    for number in range(len(dataset)):
        clip = clip_of(dataset, number, np.arange(dataset[number].num_frames))
        found.append(digests(planes_of(decoder, clip)))
    decoder.close()
    (out / REFERENCE).mkdir(exist_ok=True)
    np.save(out / REFERENCE / f"{part.name}.npy", np.concatenate(found))
    info = dataset[0].info
    return asdict(part) | {"clips": len(dataset), "width": info.width, "height": info.height}


def _generated(folder: Path, count: int, lines: int, seconds: float) -> Path:
    """Write videos that zoom into the Mandelbrot set, each at another place of its edge."""
    folder.mkdir(parents=True)
    for number in range(count):
        angle = 2 * math.pi * (number + 0.5) / count
        x, y = (f(angle) / 2 - f(2 * angle) / 4 for f in (math.cos, math.sin))
        source = (
            f"mandelbrot=s={lines * 16 // 9 // 2 * 2}x{lines}:r=25:start_x={x}:start_y={y}:start_scale=1:end_pts=200"
        )
        command = [find_ffmpeg().path, "-v", "error", "-f", "lavfi", "-i", source, "-t", str(seconds), *_X264]
        subprocess.run([*command, str(folder / f"{number:03d}.mp4")], check=True)
    return folder


def _chosen(footage: Path, part: Part) -> list[Path]:
    """Return the part's videos: those with enough lines first, then by name."""
    rows = []
    for path in sorted(path for path in footage.rglob("*") if path.suffix.lower() in _SUFFIXES):
        with av.open(str(path)) as container:
            video = container.streams.video[0]
            rows.append((min(video.width, video.height) < part.lines, path.name, path))
    if len(rows) < part.clips:
        names = ", ".join(_SUFFIXES)
        raise UsageError(f"{len(rows)} videos ({names}), expected {part.clips}", file=footage, hint="lower --clips")
    return [path for _, _, path in sorted(rows)[: part.clips]]


def _cut(videos: list[Path], folder: Path, seconds: float, size: tuple[int, int] | None) -> Path:
    """Write the beginning of each video to a folder; with a size, encoded in H.264 as a camera would."""
    own = folder / "clips"
    own.mkdir(parents=True)
    for number, video in enumerate(videos):
        filters = () if size is None else ("-vf", f"scale={size[0]}:{size[1]},setsar=1,format=yuv420p")
        encoder = ("-c:v", "copy") if size is None else _X264
        target = own / f"{number:03d}-{video.stem[:40]}{'.mkv' if size is None else '.mp4'}"
        command = [find_ffmpeg().path, "-v", "error", "-nostdin", "-i", str(video), "-t", str(seconds), *filters]
        subprocess.run([*command, *encoder, "-an", "-sn", "-map", "0:v:0", str(target)], check=True)
    return folder
