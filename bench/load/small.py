"""Measure small pictures by CPU: windows of frames, as robots and world models take them, against JPEGs in Lance.

Real videos are cropped and scaled to squares. fastvid shards them with the profile `small`; Lance has each frame as a
JPEG of quality 95, decoded by libjpeg-turbo. One process and one thread; all deliver uint8 batches of the same windows.
"Clip by clip" is the loader without its common pass over the clips of a batch.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import av
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

import fastvid
from bench.common.footage import X264, shard
from bench.common.harness import NEEDED, Record, options
from bench.common.newest import use_newest
from bench.common.rounds import in_turn, ranged, ratios, spread, timed
from fastvid.decode.backends import Backend, backend
from fastvid.decode.pyav import PyAvDecoder
from fastvid.errors import FastvidError
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.runtime.arrays import UInt8Array

_QUALITY: Final = 95
_SECONDS: Final = (0.0, 0.2, 0.4, 0.6)
_FRAMES: Final = 120  # of each video
_TOLERANCE: Final = 4.0  # mean levels between the luma of a batch and its source's; of neighbouring frames it is more

Windows = Iterator[tuple[torch.Tensor, npt.NDArray[np.int64]]]
"""Batches without end: pictures, uint8 [B, 3, T, H, W], and their numbers among all frames, [B, T]."""

add_arguments = options(
    "cache rounds",
    json="small_pictures.json",
    footage=(Path, "real videos", NEEDED),
    sides=([96, 224], "sides of the pictures in pixels"),
    videos=(24, "videos"),
    batch=(64, "windows per batch"),
    batches=(20, "batches per round"),
)


class Corpus:
    """The same pictures in each store."""

    def __init__(self, args: argparse.Namespace, side: int) -> None:
        import lance
        import pyarrow as pa
        import simplejpeg

        self.side, self.batch, folder = side, args.batch, args.cache / f"small-{side}"
        raw, self.lance = folder / "raw", folder / "frames.lance"
        for number, source in enumerate(sorted(args.footage.glob("*.mp4"))[: args.videos]):
            _scaled(source, raw / f"{number:03}.mp4", side)
        self.dataset = fastvid.open(shard(raw, "small", folder))
        each = {path.stem: _pictures(path) for path in sorted(raw.glob("*.mp4"))}
        self.firsts = dict(zip(each, np.cumsum([0, *map(len, each.values())]).tolist(), strict=False))
        self.pictures = np.concatenate(list(each.values()))
        self.count = len(self.pictures)
        encode = partial(simplejpeg.encode_jpeg, quality=_QUALITY, colorsubsampling="420")
        jpegs = list(map(encode, self.pictures))
        if not self.lance.exists():
            lance.write_dataset(pa.table({"jpeg": pa.array(jpegs, pa.binary())}), str(self.lance))
        packets = sum(int(video.table.records["size"].sum()) for video in self.dataset)
        self.bytes = {"lance": sum(map(len, jpegs)) / self.count, "small": packets / self.count}

    def _arguments(self) -> dict[str, Any]:
        frames, crop = fastvid.Deltas(_SECONDS), fastvid.CenterCrop(self.side)
        return {"frames": frames, "spatial": [crop], "output": fastvid.Output(dtype=torch.uint8)}

    def loader(self, decoder: str | Backend) -> Windows:
        """Yield the windows of a `ClipLoader`."""
        items, workers = fastvid.EveryFrame(self.dataset), fastvid.Workers(num_threads=1, decoder=decoder)
        loader = fastvid.ClipLoader(items, global_batch_size=self.batch, workers=workers, **self._arguments())
        for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
            yield batch["video"], self._rows(batch)

    def items(self) -> Windows:
        """Yield the windows of a `ClipDataset` in a DataLoader without worker processes."""
        clips = fastvid.ClipDataset(fastvid.EveryFrame(self.dataset), **self._arguments())
        loader = DataLoader(clips, batch_size=self.batch, shuffle=True, drop_last=True)
        for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
            yield batch["video"], self._rows(batch)

    def jpegs(self) -> Windows:
        """Yield random windows of Lance's frames."""
        import lance
        import simplejpeg

        table, draws = lance.dataset(str(self.lance)), np.random.default_rng(0)
        # At its best: one memory for all batches.
        video = np.empty((self.batch, len(_SECONDS), self.side, self.side, 3), np.uint8)
        while True:
            rows = draws.integers(0, self.count - 16, (self.batch, 1)) + np.arange(0, 4 * 5, 5)[: len(_SECONDS)]
            rows = np.minimum(rows, self.count - 1)
            frames = itertools.chain.from_iterable(table.take(rows.ravel(), columns=["jpeg"])["jpeg"].chunks)
            for jpeg, picture in zip(frames, video.reshape(-1, *video.shape[2:]), strict=True):
                simplejpeg.decode_jpeg(jpeg.as_py(), buffer=picture)
            yield torch.from_numpy(video).permute(0, 4, 1, 2, 3), rows

    def _rows(self, batch: fastvid.Batch) -> npt.NDArray[np.int64]:
        """Return the number of each frame of a batch among all frames."""
        firsts = np.array([self.firsts[key] for key in batch["key"]], dtype=np.int64)
        rows: npt.NDArray[np.int64] = firsts[:, None] + batch["frame_index"].numpy()
        return rows

    def similarity(self, windows: Windows) -> float:
        """Return the mean SSIM of the luma of a batch; FastvidError if it shows other pictures."""
        video, rows = next(windows)
        wanted = torch.from_numpy(self.pictures[rows]).permute(0, 4, 1, 2, 3)
        pairs = [(_luma(one), _luma(two)) for one, two in zip(video, wanted, strict=True)]
        if (off := float(np.mean([float((one - two).abs().mean()) for one, two in pairs]))) > _TOLERANCE:
            raise FastvidError(f"windows differ from their sources by {off:.1f} levels")
        return float(np.mean([_ssim(one, two) for one, two in pairs]))


def run(args: argparse.Namespace) -> int:
    """Measure each size and write the result."""
    use_newest(["lance", "simplejpeg"], args.cache)
    torch.set_num_threads(1)
    record = Record("fastvid-small-pictures/1", args, "videos", "batch", "batches", "rounds", sizes={})
    for side in args.sides:
        corpus = Corpus(args, side)
        windows = {
            "ClipLoader": corpus.loader("pyav"),
            "ClipLoader, clip by clip": corpus.loader(_ALONE),
            "ClipDataset": corpus.items(),
            "lance": corpus.jpegs(),
        }
        similar = {name: corpus.similarity(one) for name, one in windows.items()}

        def work(name: str, _: int, windows: dict[str, Windows] = windows) -> float:
            return timed(lambda: [next(windows[name]) for _ in range(args.batches)])[0]

        spent = in_turn(list(windows), args.rounds, work, warm_up=1)
        scale = 1e3 / (args.batches * args.batch)
        bytes_of = {name: corpus.bytes["lance" if name == "lance" else "small"] for name in windows}
        record["sizes"][str(side)] = {
            name: ranged("cpu_ms_a_window", [one * scale for one in times])
            | {"times_lance": spread(ratios(spent["lance"], times))}
            | {"bytes_a_frame": bytes_of[name], "bytes_over_lance": bytes_of[name] / bytes_of["lance"]}
            | {"ssim": similar[name]}
            for name, times in spent.items()
        }
        for name, row in record["sizes"][str(side)].items():
            print(
                f"{side} px {name:25} {row['cpu_ms_a_window']:.3f} ms, {row['times_lance']['median']:.2f}x lance,"
                f" {row['bytes_over_lance']:.2f}x the bytes, SSIM {row['ssim']:.4f}"
            )
    record.save()
    return 0


class Alone(PyAvDecoder):
    """Decodes each clip by itself."""

    max_clips = 1  # type: ignore[misc]


_ALONE: Final = replace(backend("pyav"), name="alone", target="bench.load.small:Alone")


def _scaled(source: Path, target: Path, side: int) -> None:
    """Write the first frames of a video as squares, nearly without loss."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    filters = f"scale={side}:{side}:force_original_aspect_ratio=increase,crop={side}:{side},setsar=1,fps=25"
    command = [find_ffmpeg().path, "-v", "error", "-i", str(source), "-frames:v", str(_FRAMES), "-vf", filters]
    subprocess.run([*command, "-an", *X264, "-crf", "8", str(target)], check=True)


def _pictures(path: Path) -> UInt8Array:
    """Return all frames as RGB, [N, H, W, 3]."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def _luma(video: torch.Tensor) -> torch.Tensor:
    """Return [T, 1, H, W] of RGB [3, T, H, W]."""
    return (video.float() * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1, 1)).sum(0)[:, None]


def _ssim(one: torch.Tensor, two: torch.Tensor) -> float:
    """Return the mean SSIM (Wang et al. 2004) of levels 0 to 255, over windows of 8 x 8 pixels."""
    mean = partial(torch.nn.functional.avg_pool2d, kernel_size=8, stride=1)
    a, b, low, high = mean(one), mean(two), 6.5025, 58.5225
    spread_a, spread_b, both = mean(one * one) - a * a, mean(two * two) - b * b, mean(one * two) - a * b
    found = (2 * a * b + low) * (2 * both + high) / ((a * a + b * b + low) * (spread_a + spread_b + high))
    return float(found.mean())
