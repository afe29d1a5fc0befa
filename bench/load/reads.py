"""Measure reading windows of long videos on a server: planned packets against whole ranges for a decoder of files.

Each reader delivers the same windows, frames of one video at regular steps, in random order, from a web server on this
machine that answers after a delay and counts requests and bytes. Frames show their number in a corner, so each that is
delivered is checked. What a reader needs to open its videos is counted apart; fastvid indexes them once, before.

fastvid     indexed in place over the same server; a window's packets are planned and read by ranges; by default the
            index is made of the files' tables, "proved" by reading them once (`--prove all`), which also tells which
            packets no other needs
torchcodec  reads the files over HTTP by itself, its decoders kept open, with exact and with approximate seeking
lance       stores the files as blobs; torchcodec decodes them through the ranges that lance reads

The last two are at their newest versions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bench.common.footage import X264, encode
from bench.common.footage import frames as frames_of
from bench.common.harness import Record, options, run_json, write_json
from bench.common.linked import video_decoder
from bench.common.newest import use_newest
from bench.common.rounds import in_turn
from bench.load.slow_server import slow_server, totals
from fastvid.errors import UsageError
from fastvid.runtime.arrays import UInt8Array

SCHEMA: Final = "fastvid-bench-reads/1"
FPS: Final = 30
LENGTH: Final = 1800  # frames of a video
SQUARE: Final = 16  # pixels of a painted bit
BITS: Final = 11

KINDS: Final[dict[str, tuple[tuple[int, int], tuple[str, ...], int, int]]] = {
    # Height and width, the encoder's options, frames of a window, their step.
    "x264": ((720, 1280), X264, 8, 4),
    "lerobot": ((480, 640), ("-c:v", "libsvtav1", "-preset", "12", "-crf", "30", "-g", "2"), 2, 3),
    "hevc": ((720, 1280), ("-c:v", "libx265", "-preset", "veryfast", "-tag:v", "hvc1", "-pix_fmt", "yuv420p"), 8, 4),
}
"""x264 and x265 with a key frame every 250 frames, their default; LeRobot's encoding."""

_PROOFS: Final = {"fastvid": "sample", "fastvid proved": "all"}
_READERS: Final = (*_PROOFS, "torchcodec exact", "torchcodec approximate", "lance exact", "lance approximate")
_VIDEOS: Final = 3


add_arguments = options(
    "footage cache latency",
    json="reads.json",
    kinds=(",".join(KINDS), "kinds of files"),
    windows=(60, "windows of a measurement"),
    rounds=3,
)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    use_newest(["torchcodec", "lance"], args.cache)
    record = Record(SCHEMA, args, "windows", "rounds", latency_ms=args.latency, kinds={})
    for kind in args.kinds.split(","):
        folder = _prepared(args, kind)
        with slow_server(folder, args.latency) as (url, _):
            indexed = {reader: _indexed(folder, url, _PROOFS[reader]) for reader in _PROOFS}
            measured = partial(_measured, args, kind, folder, url)
            found = in_turn(_READERS, args.rounds, lambda reader, _, measured=measured: measured(reader))
        record["kinds"][kind] = {
            reader: _summary(rounds, args.windows) | indexed.get(reader, {}) for reader, rounds in found.items()
        }
    return record.finish()


def _summary(rounds: list[dict[str, Any]], windows: int) -> dict[str, Any]:
    cpu = [1e3 * one["cpu_s"] / windows for one in rounds]
    middle = {name: statistics.median(one[name] for one in rounds) for name in ("open_requests", "open_bytes")}
    return middle | {
        "bytes": statistics.median(one["bytes"] for one in rounds) / windows,
        "requests": statistics.median(one["requests"] for one in rounds) / windows,
        "cpu_ms": statistics.median(cpu),
        "cpu_ms_range": [min(cpu), max(cpu)],
        "seconds": statistics.median(one["seconds"] for one in rounds),
        "wrong": max(one["wrong"] for one in rounds),
    }


def _indexed(folder: Path, url: str, proof: str) -> dict[str, Any]:
    """Index the videos, unless that is done; return its requests and bytes, as those that open them."""
    index, record = folder / f"index-{proof}", folder / f"index-{proof}.json"
    if not record.exists():
        shutil.rmtree(index, ignore_errors=True)
        before = totals(url)
        videos = [f"{url}/{path.name}" for path in sorted(folder.glob("*.mp4"))]
        command = [sys.executable, "-m", "fastvid", "index", *videos, "--out", str(index), "--prove", proof]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = totals(url)
        write_json(record, {f"open_{name}": after[name] - before[name] for name in ("requests", "bytes")})
    found: dict[str, Any] = json.loads(record.read_text())
    return found


def _measured(args: argparse.Namespace, kind: str, folder: Path, url: str, reader: str) -> dict[str, Any]:
    """Run a reader in a process of its own; return what it took to open its videos and to read the windows."""
    words = ("-m", "bench.load.reads", reader, kind, str(folder), url, str(args.windows))
    found = run_json([sys.executable, *words], FASTVID_LOG="ERROR")
    print(kind, reader, json.dumps(found), flush=True)
    return found


def _prepared(args: argparse.Namespace, kind: str) -> Path:
    """Return the folder of the files of a kind, and of lance's copy of them; made on first use."""
    folder = Path(args.cache) / f"reads-{kind}"
    if not (folder / "made").exists():
        if args.footage is None:
            raise UsageError("there are no files yet", hint="name a folder of videos with --footage")
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(_VIDEOS):
            _make(args.footage, folder / f"{number}.mp4", kind, number)
        subprocess.run([sys.executable, "-c", _STORE, str(folder)], check=True)
        (folder / "made").touch()
    return folder


def _make(footage: Path, path: Path, kind: str, number: int) -> None:
    (height, width), options, _, _ = KINDS[kind]
    pictures = itertools.islice(_numbered(frames_of(footage, number, _VIDEOS, (height, width))), LENGTH)
    encode(pictures, path, (height, width), FPS, options)


def _numbered(pictures: Iterator[UInt8Array]) -> Iterator[UInt8Array]:
    """Yield pictures that show their number in a corner."""
    for count, picture in enumerate(pictures):
        for bit in range(BITS):
            picture[:SQUARE, SQUARE * bit : SQUARE * (bit + 1)] = 255 * (count >> bit & 1)
        yield picture


_STORE = """
import sys
from functools import partial
from pathlib import Path
import lance, pyarrow as pa
folder = Path(sys.argv[1])
blob = pa.field("video", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
for path in sorted(folder.glob("*.mp4")):
    table = pa.table({"video": pa.array([path.read_bytes()], pa.large_binary())}, schema=pa.schema([blob]))
    lance.write_dataset(table, str(folder / "bucket/videos.lance"), mode="append")
"""


def _readers(reader: str, folder: str, url: str) -> Callable[[int, npt.NDArray[np.int64]], Any]:
    """Open a reader; return a function that delivers the frames [T, 3, H, W] of a window, of the video of a number."""
    name, _, mode = reader.partition(" ")
    if name == "fastvid":
        import fastvid

        # The list of files has the URL of the server that they were indexed on.
        dataset = fastvid.open(f"{folder}/index-{_PROOFS[reader]}", root=url)
        videos = {int(video.key.rpartition("/")[2].rpartition("_")[2][0]): video for video in dataset}
        return lambda number, frames: videos[number].frames(frames).data
    if name == "lance":
        import lance

        options = {"aws_endpoint": url, "allow_http": "true", "aws_region": "us-east-1"}
        options |= {"aws_access_key_id": "bench", "aws_secret_access_key": "bench"}
        table = lance.dataset("s3://bucket/videos.lance", storage_options=options)
        sources = table.take_blobs("video", indices=list(range(_VIDEOS)))
    else:
        sources = [f"{url}/{number}.mp4" for number in range(_VIDEOS)]
    decoders = [video_decoder()(source, seek_mode=mode, num_ffmpeg_threads=1) for source in sources]
    return lambda number, frames: decoders[number].get_frames_at(frames.tolist()).data


def main(reader: str, kind: str, folder: str, url: str, windows: str) -> dict[str, Any]:
    """Open a reader and read windows; return CPU seconds, seconds, wrong frames, and what the server has counted."""
    import torch

    torch.set_num_threads(1)
    before = totals(url)
    read = _readers(reader, folder, url)
    for number in range(_VIDEOS):
        read(number, np.arange(1))
    opened = totals(url)
    _, _, count, step = KINDS[kind]
    draws = random.Random(0)
    wrong, cpu, begun = 0, time.process_time(), time.perf_counter()
    for _ in range(int(windows)):
        number = draws.randrange(_VIDEOS)
        frames = draws.randrange(LENGTH - count * step - FPS) + step * np.arange(count)
        shown = _numbers(read(number, frames))
        wrong += sum(one != int(frame) for one, frame in zip(shown, frames, strict=True))
    found = {"cpu_s": time.process_time() - cpu, "seconds": time.perf_counter() - begun, "wrong": wrong}
    done = totals(url)
    found |= {name: done[name] - opened[name] for name in done}
    return found | {f"open_{name}": opened[name] - before[name] for name in before}


def _numbers(frames: Any) -> list[int]:
    """Return the numbers that frames [T, 3, H, W], or [T, H, W, 3], show."""
    pixels = np.asarray(frames)
    if pixels.shape[-1] == 3:
        pixels = pixels.transpose(0, 3, 1, 2)
    squares = pixels[:, :, :SQUARE, : SQUARE * BITS].astype(np.float32)
    bits = squares.reshape(len(pixels), 3, SQUARE, BITS, SQUARE).mean(axis=(1, 2, 4)) > 127
    return [sum(int(bit) << place for place, bit in enumerate(row)) for row in bits.tolist()]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
