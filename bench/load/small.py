"""Measure small pictures by CPU: windows of frames, as robots and world models take them, against JPEGs in Lance.

Real videos are cropped and scaled to squares; "rendered" ones show plain shapes that move. fastvid shards them with the
profile `small`; Lance has each frame as a JPEG of quality 95, decoded by libjpeg-turbo. One process and one thread; all
deliver uint8 batches of the same windows. A case is the side of the pictures in pixels, with "r" if they are rendered,
and the CRF of fastvid's encoding: 96@16, 224r@21.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import av
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, default_collate

import fastvid
from bench.common.footage import X264, shard
from bench.common.harness import NEEDED, Record, options
from bench.common.newest import use_newest
from bench.common.rounds import in_turn, ranged, ratios, timed
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
    cases=(["96@18", "96@14", "224@18", "224@14", "224r@21"], "pictures and encodings"),
    videos=(24, "videos"),
    batch=(64, "windows per batch"),
    batches=(20, "batches per round"),
)


class Corpus:
    """The same pictures in each store."""

    def __init__(self, args: argparse.Namespace, case: str) -> None:
        import lance
        import pyarrow as pa
        import simplejpeg

        pictures, _, crf = case.partition("@")
        self.side, self.batch, folder = int(pictures.rstrip("r")), args.batch, args.cache / f"small-{pictures}"
        raw, self.lance = folder / "raw", folder / "frames.lance"
        for number, source in enumerate(sorted(args.footage.glob("*.mp4"))[: args.videos]):
            _make(None if pictures.endswith("r") else source, raw / f"{number:03}.mp4", self.side, number)
        self.dataset = fastvid.open(shard(raw, "small", folder, options=("--crf", crf), name=f"small-{crf}"))
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

    def loader(self) -> Windows:
        """Yield the windows of a `ClipLoader`."""
        items, workers = fastvid.EveryFrame(self.dataset), fastvid.Workers(num_threads=1)
        loader = fastvid.ClipLoader(items, global_batch_size=self.batch, workers=workers, **self._arguments())
        for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
            yield batch["video"], self._rows(batch)

    def items(self) -> Windows:
        """Yield the windows of a `ClipDataset` in a DataLoader without worker processes."""
        clips = fastvid.ClipDataset(fastvid.EveryFrame(self.dataset), **self._arguments())
        loader = DataLoader(clips, batch_size=self.batch, shuffle=True, drop_last=True)
        for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
            yield batch["video"], self._rows(batch)

    def jpegs(self, many: int) -> Windows:
        """Yield random windows of Lance's frames, so many at once; more than one share the memory of all batches."""
        import lance
        import simplejpeg

        table, draws = lance.dataset(str(self.lance)), np.random.default_rng(0)
        shape = (many, len(_SECONDS), self.side, self.side, 3)
        shared = np.empty(shape, np.uint8)
        while True:
            rows = draws.integers(0, self.count - 16, (many, 1)) + np.arange(0, 4 * 5, 5)[: len(_SECONDS)]
            rows = np.minimum(rows, self.count - 1)
            video = shared if many > 1 else np.empty(shape, np.uint8)
            frames = itertools.chain.from_iterable(table.take(rows.ravel(), columns=["jpeg"])["jpeg"].chunks)
            for jpeg, picture in zip(frames, video.reshape(-1, *shape[2:]), strict=True):
                simplejpeg.decode_jpeg(jpeg.as_py(), buffer=picture)
            yield torch.from_numpy(video).permute(0, 4, 1, 2, 3), rows

    def jpeg_items(self) -> Windows:
        """Yield random windows of Lance's frames, each an item that a DataLoader without worker processes collates."""
        items = ((video[0], rows[0]) for video, rows in self.jpegs(1))
        while True:
            video, rows = default_collate(list(itertools.islice(items, self.batch)))
            yield video, rows.numpy()

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
    record = Record("fastvid-small-pictures/2", args, "videos", "batch", "batches", "rounds", rows=[])
    for case in args.cases:
        corpus = Corpus(args, case)
        windows = {
            "ClipLoader": corpus.loader(),
            "ClipDataset": corpus.items(),
            "lance": corpus.jpegs(args.batch),
            "lance, DataLoader": corpus.jpeg_items(),
        }
        similar = {name: corpus.similarity(one) for name, one in windows.items()}

        def work(name: str, _: int, windows: dict[str, Windows] = windows) -> float:
            return timed(lambda: [next(windows[name]) for _ in range(args.batches)])[0]

        spent = in_turn(list(windows), args.rounds, work, warm_up=1)
        scale = 1e3 / (args.batches * args.batch)
        bytes_of = {name: corpus.bytes["lance" if "lance" in name else "small"] for name in windows}
        record["rows"] += [
            {
                "case": case,
                "loader": name,
                "ssim": similar[name],
                "bytes_over_lance": bytes_of[name] / bytes_of["lance"],
            }
            | {"bytes_a_frame": bytes_of[name], **ranged("cpu_ms_a_window", [one * scale for one in times])}
            | ranged("times_lance", ratios(spent["lance"], times))
            for name, times in spent.items()
        ]
    return record.finish()


def _make(source: Path | None, target: Path, side: int, number: int) -> None:
    """Write the first frames of a video as squares, nearly without loss; without a source, shapes that move."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source:
        inputs = ["-i", str(source)]
        filters = f"scale={side}:{side}:force_original_aspect_ratio=increase,crop={side}:{side},setsar=1,fps=25"
    else:
        inputs = ["-f", "lavfi", "-i", f"color=white:s={side}x{side}:r=25"]
        place = "x=iw*(.4+.3*sin(t*{}+{n})):y=ih*(.4+.3*cos(t*{}+{n})):w=iw*{}:h=ih*{}:color={}:t=fill"
        shapes = ((1.3, 0.9, 0.3, 0.1, "gray"), (1.3, 0.9, 0.1, 0.35, "gray"), (0.7, 1.7, 0.08, 0.08, "blue"))
        filters = ",".join(f"drawbox={place.format(*shape, n=number)}" for shape in shapes)
    command = [find_ffmpeg().path, "-v", "error", *inputs, "-frames:v", str(_FRAMES), "-vf", filters]
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
