"""Measure what sound costs: the CPU time of clips with and without it, by codec, window and rate.

The videos that have sound are made into a dataset in `compact` twice: with their AAC copied, and with the same sound as
ALAC. One thread loads clips of several lengths with and without sound in alternating rounds; the cost is the difference
of the process's CPU time. Before that, the sound of one batch of each kind is compared with `Video.audio`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import time
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from bench.common.footage import shard
from bench.common.harness import NEEDED, Record, options
from bench.common.rounds import in_turn, ranged
from fastvid.decode.sound import Audio
from fastvid.errors import UsageError
from fastvid.load.clips.crops import RandomResizedCrop
from fastvid.load.clips.sampling import Dense, Sampler, Segments
from fastvid.load.loader import ClipLoader
from fastvid.load.options import Workers
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.videos.dataset import VideoDataset
from fastvid.videos.dataset import open as open_dataset

SCHEMA: Final = "fastvid-bench-audio/1"

SAMPLERS: Final[Mapping[str, Sampler]] = {"dense16x2": Dense(16, 2), "dense16x4": Dense(16, 4), "tsn8": Segments(8)}
SOUNDS: Final = {"16 kHz mono": Audio(16_000), "48 kHz stereo": Audio(48_000, mono=False)}


add_arguments = options(
    "rounds",
    json="audio.json",
    footage=(Path, "videos; those with sound are used", NEEDED),
    cache=Path("runs/bench/audio"),
    clips=(160, "clips per round, about"),
)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    results: list[dict[str, Any]] = []
    for codec in ("aac", "alac"):
        dataset = _dataset(args.footage, args.cache, codec)
        for frames, sampler in SAMPLERS.items():
            for sound, audio in SOUNDS.items():
                _check(dataset, sampler, audio)
                found = _measure(dataset, sampler, audio, args.rounds, args.clips)
                results.append({"codec": codec, "frames": frames, "sound": sound, **found})
                print(
                    f"{codec:5} {frames:10} {sound:14} {found['seconds']:5.1f} s  video {found['video_ms']:6.2f} ms "
                    f" sound {found['sound_ms']:6.2f} ms  share {found['share']:.1%} "
                    f" ({found['share_min']:.1%} to {found['share_max']:.1%})"
                )
    Record(SCHEMA, args, "rounds", videos=len(dataset), results=results).save()
    return 0


def _dataset(footage: Path, cache: Path, codec: str) -> VideoDataset:
    folder = cache / f"sources-{codec}"
    if not folder.exists():
        folder.mkdir(parents=True)
        build = find_ffmpeg()
        for path in sorted(footage.iterdir()):
            target = folder / f"{path.stem}.mov"
            command = [build.path, "-nostdin", "-v", "error", "-i", str(path), "-map", "0:v:0", "-map", "0:a:0"]
            command += ["-c:v", "copy", "-c:a", codec, "-y", str(target)]
            if path.is_file() and subprocess.run(command, check=False, capture_output=True).returncode:
                target.unlink(missing_ok=True)  # no sound, or video that a MOV cannot contain
    if not any(folder.iterdir()):
        raise UsageError("no video with sound was found", file=footage, hint="give a folder of videos with sound")
    return open_dataset(str(shard(folder, "compact", cache, options=("--audio", "copy"), name=codec)))


def _loader(dataset: VideoDataset, sampler: Sampler, audio: Audio | None) -> ClipLoader:
    return ClipLoader(
        dataset,
        frames=sampler,
        spatial=RandomResizedCrop(224),
        global_batch_size=len(dataset),
        audio=audio,
        decoder="pyav",
        rank=0,
        world_size=1,
        workers=Workers(num_threads=1),
    )


def _check(dataset: VideoDataset, sampler: Sampler, audio: Audio) -> None:
    batch = next(iter(_loader(dataset, sampler, audio)))
    for row, key in enumerate(batch.key):
        video, frames = dataset[key], batch.frame_index[row].tolist()
        start, stop = min(frames) / video.fps, Fraction(max(frames) + 1) / video.fps
        clip = video.audio(start, stop, audio.rate, mono=audio.mono)
        found = batch.audio[row, :, : clip.data.shape[1]].numpy()
        if (found != clip.data).any() and len(clip.data) == len(found):
            raise UsageError("the loader's sound differs from that of the video", key=key)


def _measure(dataset: VideoDataset, sampler: Sampler, audio: Audio, rounds: int, clips: int) -> dict[str, Any]:
    epochs = max(1, clips // len(dataset))
    seconds: list[float] = []

    def spent(with_sound: bool, _: int) -> float:
        loader = _loader(dataset, sampler, audio if with_sound else None)
        begun, made = time.process_time(), 0
        # Not `repeats=`, which decodes the clips of one video together.
        for batch in itertools.chain.from_iterable(loader for _ in range(epochs)):
            made += len(batch.key)
            if with_sound:
                seconds.extend((batch.audio_mask.sum(1) / audio.rate).tolist())
        cost = 1e3 * (time.process_time() - begun) / made
        loader.close()
        return cost

    found = in_turn((True, False), rounds, spent, warm_up=1)
    shares = [1 - without / whole for whole, without in zip(found[True], found[False], strict=True)]
    video, whole = statistics.median(found[False]), statistics.median(found[True])
    costs = {"seconds": statistics.mean(seconds), "video_ms": video, "sound_ms": whole - video}
    return costs | ranged("share", shares)
