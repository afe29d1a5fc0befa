"""Measure ``fastvid index`` on videos behind a slow network against downloading them.

The videos are real footage encoded as people have it: x264's defaults in MP4 at the bit rate of phones, with the tables
at the front or at the end. A web server on this machine answers each request after a delay and sends all responses
through one link of limited bandwidth. The rival downloads whole files over as many connections as it has files in
flight, and discards them: the least that any tool does which needs them on a disk. fastvid is timed as users call it,
from the start of the interpreter to the committed dataset. The server, fastvid and the rival share the cores.

Both run in alternating rounds; a ratio is the median of the rounds' ratios of seconds per file. The rival downloads
fewer files, because its time is proportional to bytes: the link is its limit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from bench.common.harness import Record, options
from bench.common.rounds import in_turn, ratios, spread, timed
from bench.load.slow_server import slow_server, totals
from fastvid.errors import FastvidError
from fastvid.media.ffmpeg import find_ffmpeg

SCHEMA: Final = "fastvid-bench-index/1"
CONNECTIONS: Final = 32
_SECONDS: Final = (12, 25, 40, 60, 95)
_CHUNK: Final = 1 << 20


add_arguments = options(
    "latency",
    json="index.json",
    footage=(Path, "a real video, used in a loop", {"required": True, "metavar": "FILE"}),
    files=(10_000, "files to index by --prove none"),
    sampled=(100, "files to index by --prove sample"),
    downloads=(100, "files to download in a round"),
    megabits=(1000.0, "bandwidth per second"),
    workers=(int, "workers of fastvid index (its own default)"),
    rounds=(3, "measured rounds"),
    scratch=(Path("runs/bench/index"), "folder of the videos"),
)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    videos = make_videos(args.footage, args.scratch / "videos")
    with tempfile.TemporaryDirectory(dir=args.scratch) as name:
        folder = Path(name).resolve()
        served = folder / "served"
        served.mkdir()
        for number in range(args.files):
            os.link(videos[number % len(videos)], served / f"{number:05d}.mp4")
        record = compare(args, served, folder)
    record["video_seconds"] = list(_SECONDS)
    record["video_bytes"] = [video.stat().st_size for video in videos]
    return record.finish()


def make_videos(footage: Path, folder: Path) -> list[Path]:
    """Return the distinct videos, made once: 1280x720 at about 5 Mbit/s, every second one with its tables in front."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for number, seconds in enumerate(_SECONDS):
        path = folder / f"{seconds}s.mp4"
        if not path.exists():
            part = path.with_suffix(".part.mp4")
            command = [find_ffmpeg().path, "-v", "error", "-stream_loop", "-1", "-i", str(footage), "-an"]
            filters = "scale=1280:720,setsar=1,noise=alls=12:allf=t"
            command += ["-t", str(seconds), "-vf", filters, "-r", "30"]
            command += ["-c:v", "libx264", "-preset", "veryfast", "-b:v", "5M", "-pix_fmt", "yuv420p"]
            command += ["-movflags", "+faststart"] if number % 2 else []
            subprocess.run([*command, "-y", str(part)], check=True)
            part.rename(path)
        made.append(path)
    return made


def compare(args: argparse.Namespace, served: Path, folder: Path) -> Record:
    """Time both in alternating rounds; return the record."""
    names = sorted(path.name for path in served.iterdir())
    proofs = {"none": len(names), "sample": min(args.sampled, len(names))}
    counts: dict[str, dict[str, float]] = {}
    with slow_server(served, args.latency, args.megabits) as (url, _):
        for proof, files in proofs.items():
            rows = [f"{url}/{name},video" for name in names[:files]]
            (folder / f"{proof}.csv").write_text("\n".join(["path,label", *rows]) + "\n")

        def once(name: str, number: int) -> float:
            before, files = totals(url), proofs.get(name, args.downloads)
            if name == "download":
                spent = download([f"{url}/{file}" for file in names[:files]])
            else:
                out = folder / f"{name}-{number}"
                spent = index(folder / f"{name}.csv", out, name, args.workers)
                _check(out, files)
                shutil.rmtree(out)
            counts[name] = _difference(before, totals(url), files)
            return spent / files

        seconds = in_turn(("download", *proofs), args.rounds, once)
    record = Record(SCHEMA, args, "downloads", "megabits", "rounds", files=proofs, connections=CONNECTIONS)
    record["latency_ms"] = args.latency
    record["times_faster"] = {proof: spread(ratios(seconds["download"], seconds[proof])) for proof in proofs}
    for name, spent_a_file in seconds.items():
        record[name] = {"seconds_a_file": spent_a_file, **counts[name]}
    return record


def download(urls: Sequence[str]) -> float:
    """Download files and discard them; return the seconds."""

    def one(url: str) -> None:
        with urllib.request.urlopen(url) as response:
            while response.read(_CHUNK):
                pass

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return timed(lambda: list(pool.map(one, urls)))[1]


def index(table: Path, out: Path, proof: str, workers: int | None) -> float:
    """Index the files of a table; return the seconds."""
    command = [sys.executable, "-m", "fastvid", "index", "--annotations", f"csv:{table}", "--out", str(out)]
    command += ["--prove", proof]
    command += [] if workers is None else ["--workers", str(workers)]
    return timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))[1]


def _check(out: Path, expected: int) -> None:
    import fastvid

    dataset = fastvid.open(str(out))
    if len(dataset) != expected:
        raise FastvidError(f"the dataset has {len(dataset)} videos instead of {expected}")


def _difference(before: Mapping[str, int], after: Mapping[str, int], files: int) -> dict[str, float]:
    return {f"{what}_a_file": (after[what] - before[what]) / files for what in ("requests", "bytes")}
