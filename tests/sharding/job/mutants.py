"""Damaged copies of painted videos of all containers and codecs, and a judge of what `fastvid shard` makes of them.

The judge reads packed samples with the ffmpeg program, not with fastvid. A sample is *other* than its source if it
shows pictures that ffmpeg does not decode from the same damaged file, in that order; that would be fastvid's fault. It
is *damaged* if it shows pictures that the intact file does not have: the decoder reported no error for them. It is
*unsettled* if it differs from its source only in tiles that ffmpeg itself decodes differently each time: a decoder that
loses a slice without an error shows what its reused buffer contained.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from fastvid.errors import SourceError
from fastvid.format.tar import read_members
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.media.probe import HEAD_BYTES, sniff
from fastvid.runtime.processes import available_cores
from tests.makers import BLACK, ENCODINGS, encode, ffmpeg, paint
from tests.sharding.shardtools import REPOSITORY

FRAMES, SIZE = 30, (96, 160)
TILE = 16
SAME_LEVELS = 13.7
"""Largest mean difference of a 16x16 tile, in levels of limited range, between pictures that count as the same.
Encoding an intact one of these videos again changes its tiles by up to 5 levels, in each codec."""
REPEATS = 16
"""Decodes of a file in a row that show no further tile which differs from run to run, until it is decoded no more."""

_X264, _X265 = ENCODINGS["pyramid"], ENCODINGS["hevc"]
_LONG = "-g 12 -bf 2 -q:v 4"
_BASES = {
    "h264": (_X264, ("mp4", "mov", "mkv", "avi", "flv", "ts", "h264", "frag.mp4")),
    "hevc": (_X265, ("mp4", "mkv", "ts", "hevc")),
    "vp9": (ENCODINGS["vp9"], ("webm", "mp4", "ivf")),
    "vp8": ("-c:v libvpx -g 12 -b:v 600k -cpu-used 8", ("webm", "ivf")),
    "av1": (ENCODINGS["av1"], ("mp4", "webm", "ivf")),
    "mpeg4": (f"-c:v mpeg4 {_LONG}", ("avi", "mp4", "m4v")),
    "mpeg2video": (f"-c:v mpeg2video {_LONG}", ("mpg", "ts", "mxf", "m2v")),
    "mpeg1video": (f"-c:v mpeg1video {_LONG}", ("mpg",)),
    "mjpeg": (ENCODINGS["mjpeg"], ("avi", "mov", "mkv")),
    "wmv2": ("-c:v wmv2 -g 12 -q:v 4", ("wmv",)),
    "theora": ("-c:v libtheora -g 12 -q:v 7", ("ogv",)),
}
_FORMATS = {"m4v": "m4v", "m2v": "mpeg2video", "wmv": "asf", "ogv": "ogg"}


@dataclass(frozen=True)
class Base:
    """An intact video: its codec, file suffix, bytes, and luma [T, H, W] as ffmpeg decodes it."""

    codec: str
    suffix: str
    data: bytes
    luma: np.ndarray


def make_bases(folder: Path) -> list[Base]:
    folder.mkdir(exist_ok=True)
    planes, bases = paint(FRAMES, SIZE), []
    for codec, (options, suffixes) in _BASES.items():
        for suffix in suffixes:
            path = folder / f"{codec}.{suffix}"
            more = ["-movflags", "frag_keyframe+empty_moov"] if suffix == "frag.mp4" else []
            if suffix in _FORMATS:
                more += ["-f", _FORMATS[suffix]]
            if codec == "hevc" and suffix != "mp4":
                more += ["-tag:v", "0"]
            try:
                encode(path, planes, [*options.split(), *more])
            except (subprocess.CalledProcessError, BrokenPipeError):
                path.unlink(missing_ok=True)
                continue
            bases.append(Base(codec, suffix, path.read_bytes(), decode(path)))
    return bases


def decode(path: Path, *, hold: bool = False, times: int = 1, threads: int = 1) -> np.ndarray:
    """Return the luma of every frame that ffmpeg decodes, uint8 [T, H, W], scaled to SIZE; errors are not looked at.

    `hold`: keep every frame until the end, so that the decoder never reuses a buffer. New buffers contain zeros, others
    the pixels of an earlier frame; a decoder that loses a slice without an error shows them. `times`: how often one
    decoder decodes the file; from the second time on, it reuses buffers for all frames. `threads`: of the decoder; each
    has buffers of its own.
    """
    height, width = SIZE
    try:
        demuxer = ["-f", sniff(path.read_bytes()[:HEAD_BYTES])]  # ffmpeg does not recognise all that it can read
    except SourceError:
        demuxer = []
    command = [ffmpeg(), "-nostdin", "-v", "quiet", "-threads", str(threads), "-stream_loop", str(times - 1), *demuxer]
    command += ["-i", str(path), "-map", "0:v:0"]
    command += ["-vf", "reverse,reverse," * hold + f"scale={width}:{height}:flags=area:out_range=limited"]
    command[-1] += ",format=yuv420p,extractplanes=y"  # not format=gray, in which zeros equal black
    command += ["-fps_mode", "passthrough", "-frames:v", "1000", "-f", "rawvideo", "pipe:1"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=120)
    whole = len(done.stdout) // (height * width) * height * width
    return np.frombuffer(done.stdout[:whole], np.uint8).reshape(-1, height, width)


def tiles(pictures: np.ndarray) -> np.ndarray:
    """Return a view of pictures [T, H, W] as tiles [T, H / TILE, W / TILE, TILE, TILE]."""
    height, width = SIZE
    return pictures.reshape(-1, height // TILE, TILE, width // TILE, TILE).swapaxes(2, 3)


def difference(one: np.ndarray, others: np.ndarray, ignored: np.ndarray | bool = False) -> np.ndarray:
    """Return the largest mean difference of any tile between a picture [H, W] and others [T, H, W], float [T].

    `ignored`: tiles of the others that do not count, bool [T, H / TILE, W / TILE].
    """
    means = tiles(np.abs(others.astype(np.int16) - one.astype(np.int16))).mean(axis=(3, 4))
    return np.where(ignored, 0, means).max(axis=(1, 2))


def follows(shown: np.ndarray, decoded: np.ndarray, unsettled: np.ndarray | bool = False) -> bool:
    """Return whether all pictures shown are among those decoded, in their order; some may be repeated or left out.

    `shown`: luma [T, H, W]. `decoded`: luma [N, H, W]. `unsettled`: tiles of those decoded that any tile equals, bool
    [N, H / TILE, W / TILE].
    """
    last = np.zeros(len(decoded), bool)  # which of those decoded the previous picture can be
    for number, picture in enumerate(shown):
        later = np.ones(len(decoded), bool)
        if number:
            later[0], later[1:] = False, np.logical_or.accumulate(last)[:-1]
            if difference(picture, shown[number - 1 : number])[0] <= SAME_LEVELS:
                later |= last
        last = later & (difference(picture, decoded, unsettled) <= SAME_LEVELS)
        if not last.any():
            return False
    return True


def is_damaged(shown: np.ndarray, intact: np.ndarray) -> bool:
    return any(difference(picture, intact).min() > SAME_LEVELS for picture in shown)


def truncate(rng: random.Random, data: bytes, _other: bytes) -> bytes:
    """Truncate the file anywhere, or just before its end."""
    return data[: rng.randrange(1, len(data)) if rng.random() < 0.8 else max(1, len(data) - rng.randrange(1, 200))]


def flip(rng: random.Random, data: bytes, _other: bytes) -> bytes:
    """Flip one or many bits, anywhere or in the headers."""
    changed = bytearray(data)
    end = len(data) if rng.random() < 0.6 else min(len(data), 4096)
    for _ in range(rng.choice((1, 3, 10, 100, 1000))):
        changed[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Join two files, or remove, repeat, overwrite or move a piece of one."""
    first, second = sorted(rng.randrange(len(data)) for _ in range(2))
    piece = data[first:second]
    return rng.choice(
        (
            lambda: data[:second] + other[rng.randrange(len(other)) :],
            lambda: data[:first] + data[second:],
            lambda: data[:second] + piece + data[second:],
            lambda: data[:first] + bytes(second - first) + data[second:],
            lambda: data[:first] + rng.randbytes(second - first) + data[second:],
            lambda: data[second:] + data[:second],
        )
    )()


def mutate(rng: random.Random, base: Base, other: Base) -> bytes:
    return rng.choice((truncate, flip, flip, splice))(rng, base.data, other.data)


def samples(out: Path):
    for tar in sorted(out.glob("*.tar")):
        data, source = memoryview(tar.read_bytes()), ""
        for member in read_members(data):
            body = bytes(data[member.offset : member.offset + member.size])
            if member.suffix == "json":
                source = json.loads(body)["source_id"]
            elif member.suffix == "mp4":
                yield source, body


class Block:
    """Some mutants, by their numbers, each a function of the seed of all blocks, its number and the bases."""

    def __init__(self, folder: Path, bases: list[Base], seed: int, numbers: range) -> None:
        self.folder, self.bases = folder, {}
        self.raw = folder / "raw"
        self.raw.mkdir(parents=True)
        for number in numbers:
            rng = random.Random(f"{seed}/{number}")
            base, other = bases[number % len(bases)], rng.choice(bases)
            self.add(f"{number:05d}-{base.codec}.{base.suffix}", base, mutate(rng, base, other))

    def add(self, name: str, base: Base, data: bytes) -> None:
        (self.raw / name).write_bytes(data)
        self.bases[name] = base

    def shard(self, profile: str, *, seconds: float) -> dict[str, Counter[str]]:
        """Run `fastvid shard` and return, by the codec of the intact file, how many files had which outcome."""
        out = self.folder / profile
        command = [sys.executable, "-m", "fastvid", "shard", str(self.raw), "--out", str(out), "--profile", profile]
        command += ["--short-side", str(SIZE[0])] if profile != "copy" else []
        variables = os.environ | {"PYTHONPATH": str(REPOSITORY), "FASTVID_FFMPEG": find_ffmpeg().path}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=seconds)
        rows = pq.read_table(out / "ledger.parquet").to_pylist() if done.returncode in (0, 3) else []
        assert sorted(row["source_id"] for row in rows) == sorted(self.bases), (done.returncode, done.stderr[-2000:])
        outcomes = {base.codec: Counter[str]() for base in self.bases.values()}
        for row in rows:
            counts = outcomes[self.bases[row["source_id"]].codec]
            counts["files"] += 1
            counts["packed" if row["status"] == "packed" else "rejected"] += 1
            counts["timeout"] += row["reason"] == "timeout"
        # A copied source has a sample for each part between changes of its stream.
        packed, found = list(samples(out)), {row["source_id"] for row in rows if row["status"] == "packed"}
        assert {name for name, _ in packed} == found, found.symmetric_difference(name for name, _ in packed)
        with ThreadPoolExecutor(available_cores()) as pool:
            for name, verdicts in pool.map(self.judge, packed):
                outcomes[self.bases[name].codec].update(verdicts)
                if "other" in verdicts:
                    (self.folder.parent / "other").mkdir(exist_ok=True)
                    (self.folder.parent / "other" / name).write_bytes((self.raw / name).read_bytes())
        return outcomes

    def unsettled(self, name: str, decoded: np.ndarray) -> np.ndarray:
        """Return which tiles of a file's pictures depend on reused buffers, bool [N, H / TILE, W / TILE]."""
        # The timing of ffmpeg's threads determines which buffers it reuses, so each run shows other pixels.
        path, undefined, alike = self.raw / name, np.zeros(tiles(decoded).shape[:3], bool), 0
        again = [decode(path, hold=True), *np.array_split(decode(path, times=3), 3)]
        while again or alike < REPEATS:
            one, known = again.pop() if again else decode(path, threads=1 + alike % 3), undefined.sum()
            if len(one) == len(decoded):
                undefined |= (tiles(one) != tiles(decoded)).any(axis=(3, 4))  # decoding is exact
            alike = alike + 1 if undefined.sum() == known else 0
        return undefined

    def judge(self, sample: tuple[str, bytes]) -> tuple[str, list[str]]:
        """Return a sample's source and what is wrong with the sample."""
        name, video = sample
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".mp4") as file:
            file.write(video)
            file.flush()
            shown, verdicts = decode(Path(file.name)), ["compared"]
        decoded = decode(self.raw / name)
        if not len(shown):
            verdicts.append("other")
        elif not follows(shown, decoded):
            verdicts.append("unsettled" if follows(shown, decoded, self.unsettled(name, decoded)) else "other")
        if is_damaged(shown, self.bases[name].luma):
            verdicts.append("damaged")
        return name, verdicts


def blank(video: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return pictures with a black tile, as a decoder shows a slice that it lost, and its picture, row and column."""
    place = (len(video) // 2, SIZE[0] // TILE - 1, 0)
    video = video.copy()
    tiles(video)[place] = BLACK
    return video, place
